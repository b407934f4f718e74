"""Run a function on several ranks, each with a pretend GPU of its own, and NCCL between them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tests.accelerator import build, device
from tests.support.pool import run_ranks

BACKEND = "cpu:gloo,cuda:nccl"  # as the strategies choose it for CUDA
_TIMEOUT = timedelta(seconds=100)


def require_device() -> None:
    """Skip where the pretend device can't be built, but fail in CI; build it if that was not done before."""
    if reason := build.why_not():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    build.built()


def run_on_gpus(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    pretend: dict[str, Any] | None = None,
    backend: str = BACKEND,
    **options: Any,
) -> list[Any]:
    """Return ``[fn(*args) on rank 0, on rank 1, …]``, as `run_ranks` does, from processes that see ``world`` GPUs.

    Args:
        pretend: options of the device.
        backend: of the process group.
        options: of `run_ranks`.
    """
    __tracebackhide__ = True
    require_device()
    return run_ranks(world, _on_gpu, fn, args, pretend or {}, backend, init_process_group=False, **options)


def _on_gpu(fn: Callable[..., Any], args: tuple[Any, ...], pretend: dict[str, Any], backend: str) -> Any:
    import torch

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device.install(pretend.pop("devices", world), **pretend)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    warnings.filterwarnings("ignore", "barrier.*: using the device under current context")
    store = dist.FileStore(os.path.abspath("../store"), world)  # type: ignore[attr-defined]  # public
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    value = fn(*args)
    torch.cuda.synchronize()
    return value
