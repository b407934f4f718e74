"""Private names of Lightning Fabric: launchers, process groups, reductions, and the guard of the backward.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

import atexit
import os
import signal
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric, wrappers
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shardckpt.compat.data_loading import keeps_samplers


class FabricScriptLauncher(_SubprocessScriptLauncher):
    """The launcher that starts the same script once for each local process."""


_keeping: set[int] = set()  # the ids of the living strategies of `keep_samplers_of`
_original_setup = Fabric._setup_dataloader


def keep_samplers_of(strategy: object) -> None:
    """Let the Fabric of ``strategy`` keep the samplers of loaders for which `keeps_samplers` is true.

    Ends with the last such strategy, since Fabric has no teardown. Relies on ``Fabric._setup_dataloader``, which makes
    each loader again.
    """
    _keeping.add(id(strategy))
    weakref.finalize(strategy, _end_keeping, id(strategy)).atexit = False
    Fabric._setup_dataloader = _setup_and_keep  # type: ignore[method-assign]  # see _end_keeping


def _end_keeping(strategy: int) -> None:
    _keeping.discard(strategy)
    if not _keeping:
        Fabric._setup_dataloader = _original_setup  # type: ignore[method-assign]


def _setup_and_keep(
    self: Fabric, dataloader: DataLoader[Any], use_distributed_sampler: bool = True, move_to_device: bool = True
) -> DataLoader[Any]:
    distributes = use_distributed_sampler and not (
        id(self.strategy) in _keeping and keeps_samplers(dataloader, self.world_size)
    )
    return _original_setup(self, dataloader, distributes, move_to_device)


def init_process_group(
    environment: ClusterEnvironment, device: torch.device, *, timeout_s: float
) -> None:
    """Create the default process group, unless it exists. Collective over the world.

    Its backend is torch's default for the device, with gloo for CPU tensors beside nccl.

    A single process needs no store that others reach: it listens on no port, and sets no environment variable, which
    the ranks of a program that it starts would use. Several set ``MASTER_ADDR`` and ``MASTER_PORT``, as in Lightning.

    Args:
        environment: has address, rank and world size.
        device: of this process.
        timeout_s: of collectives.
    """
    if dist.is_initialized():
        return
    chosen: str = dist.get_default_backend_for_device(device)
    if chosen == "nccl":
        chosen = f"cpu:gloo,{device.type}:nccl"
    bound, timeout = device if device.type != "cpu" else None, timedelta(seconds=timeout_s)
    rank, size, store = environment.global_rank(), environment.world_size(), None
    if size == 1:
        rank, store = 0, HashStore()
    else:
        os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    if chosen.endswith(":nccl"):
        atexit.register(_destroy_group)  # as Lightning does for "nccl": torch warns about a group that is left


def _destroy_group() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this must not be interrupted
    if dist.is_initialized():
        dist.destroy_process_group()


def optimizer_to_device(optimizer: Optimizer, device: torch.device) -> None:
    """Move the state of an optimizer to a device, except ``step``, which torch's optimizers keep on the CPU."""
    _optimizer_to_device(optimizer, device)


def is_in_backward() -> bool:
    """Return True inside of ``fabric.backward`` and `disable_backward_guard`, in all threads."""
    return wrappers._in_fabric_backward


@contextmanager
def disable_backward_guard() -> Generator[None, None, None]:
    """Inside, allow backward passes, which Fabric refuses outside of ``fabric.backward``.

    Relies on the flag ``_in_fabric_backward`` of ``lightning.fabric.wrappers``, which its backward hooks check.
    """
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before
