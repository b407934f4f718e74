"""Make ``backend="nccl"`` mean nccl.cpp in this process: of the pretend device, or of a real GPU that ranks share."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import lightning.fabric as fabric
import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tests.accelerator.build import SHARED, load

_GROUPS_TIMEOUT = timedelta(minutes=10)

_module: Any = None


def share(*, eager: bool = True, deadlock_s: float = 60) -> None:
    """Let collectives of processes that share a real GPU go through the host; see `device.install` for the options."""
    module = load(SHARED)
    module.begin(eager, deadlock_s)
    install(module)


def share_gpu(world: int) -> None:
    """Let Lightning's accelerators take the first GPU as that of each of ``world`` ranks."""
    for accelerator in (pl.accelerators.CUDAAccelerator, fabric.accelerators.CUDAAccelerator):
        accelerator.parse_devices = staticmethod(lambda devices: list(range(world)))
        accelerator.get_parallel_devices = staticmethod(lambda devices: [torch.device("cuda", 0) for _ in devices])


def install(module: Any) -> None:
    """Take the place of NCCL for the rest of the process, by an extension that has nccl.cpp."""
    global _module
    _module = module
    initialize = c10d.init_process_group

    def init_process_group(*args: Any, device_id: Any = None, **kwargs: Any) -> None:
        initialize(*args, **kwargs)  # groups would be split from a communicator that is bound to device_id

    for home in (c10d, dist):
        home.ProcessGroupNCCL = ProcessGroupNCCL
        home.init_process_group = init_process_group
    _module.PretendNccl._group_start = _module.PretendNccl._group_end = _group_nothing
    c10d._NCCL_AVAILABLE = True
    c10d.default_pg_nccl_timeout = _GROUPS_TIMEOUT


class _Options:
    """``ProcessGroupNCCL.Options``."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout, self.config = _GROUPS_TIMEOUT, SimpleNamespace()
        self.global_ranks_in_group: list[int] = []
        self.group_name = ""
        self.split_from = self.split_color = None


class _Instances(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _module.PretendNccl)


class ProcessGroupNCCL(metaclass=_Instances):
    """Makes a pretend NCCL over a gloo group of the same ranks."""

    Options = _Options

    def __new__(cls, store: Any, rank: int, size: int, options: _Options) -> Any:
        _module.set_rank(dist.get_rank() if dist.is_initialized() else rank)

        def pair_with(peer: int) -> Any:
            low, high = sorted((rank, peer))
            return _gloo(c10d.PrefixStore(f"pretend {low} {high}/", store), int(rank == high), 2)

        name = f"{options.group_name}{list(options.global_ranks_in_group)}"
        return _module.PretendNccl(_gloo(c10d.PrefixStore("pretend/", store), rank, size), rank, size, name, pair_with)


def _group_nothing(self: Any) -> None:
    """``ncclGroupStart`` and ``ncclGroupEnd``: an abort waits for nobody here."""


def _gloo(store: Any, rank: int, size: int) -> Any:
    return c10d.ProcessGroupGloo(store, rank, size, timeout=_GROUPS_TIMEOUT)
