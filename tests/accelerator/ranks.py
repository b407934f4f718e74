"""Run a function on several ranks with GPUs, and NCCL between them: pretend ones, or real ones.

Where there are fewer real GPUs than ranks, ranks share the first one: kernels, streams and memory are real. Collectives
are NCCL's own with ``NCCL_MULTI_RANK_GPU_ENABLE=1``, which NCCL 2.30 and newer know; else they go through the host by
nccl.cpp, since NCCL takes one rank per GPU.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import build, device, nccl
from tests.support.pool import run_ranks

BACKEND = "cpu:gloo,cuda:nccl"  # as the strategies choose it for CUDA
_TIMEOUT = timedelta(seconds=100)


on_real_gpus = False
"""Set by conftest.py."""


def require_device() -> None:
    """Skip where the pretend device can't be built, but fail in CI; build it if that was not done before."""
    if on_real_gpus:
        pytest.skip("looks into the pretend device")
    if reason := build.why_not():
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    build.built(build.PRETEND)


def require_gpus(count: int) -> None:
    """Skip where there are fewer real GPUs."""
    found = torch.cuda.device_count()
    if found < count:
        pytest.skip(f"needs {count} GPUs and a build of torch for them, found {found}")


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
        pretend: options of the pretend device; of a real one, ``eager`` alone says something.
        backend: of the process group.
        options: of `run_ranks`.
    """
    __tracebackhide__ = True
    if on_real_gpus:
        require_gpus((pretend or {}).get("devices", 1))
    else:
        require_device()
    pretend = {"devices": world, **(pretend or {})}
    return run_ranks(world, _on_gpu, fn, args, on_real_gpus, pretend, backend, init_process_group=False, **options)


def _on_gpu(fn: Callable[..., Any], args: tuple[Any, ...], real: bool, pretend: dict[str, Any], backend: str) -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not real:
        device.install(**pretend)
    elif torch.cuda.device_count() < world:
        nccl.share_gpu(world)
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1":
            nccl.share(eager=pretend.get("eager", True))
    torch.cuda.set_device(rank % torch.cuda.device_count())
    warnings.filterwarnings("ignore", "barrier.*: using the device under current context")
    store = dist.FileStore(os.path.abspath("../store"), world)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=_TIMEOUT)
    value = fn(*args)
    torch.cuda.synchronize()
    return value
