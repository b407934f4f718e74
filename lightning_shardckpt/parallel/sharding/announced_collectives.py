"""The collectives of ``fully_shard`` on CPUs, announced where they are not those of the step before.

gloo ends the process, or mixes memory, where the ranks enter different collectives. On other devices they are torch's
own, and the ranks compare what they did at the end of each backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.parallel.tensors.peers import Peers


@dataclass(frozen=True, slots=True)
class _Announced:
    peers: Peers
    purpose: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective."""
        return torch.empty(size, dtype=dtype, device=device)


class AnnouncedGather(_Announced):
    """An all-gather for ``set_custom_all_gather``."""

    __slots__ = ()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self.peers.enter(self.purpose)
        work = all_gather_single(output_tensor, input_tensor, group=group, async_op=True)
        self.peers.wait(work, self.purpose, output_tensor.device)


class AnnouncedReduction(_Announced):
    """A reduce-scatter for ``set_custom_reduce_scatter``."""

    __slots__ = ()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        purpose = f"the gradients of {self.purpose}"
        self.peers.enter(f"{purpose}, {input_tensor.numel()} elements")
        # as gloo reduces and scatters, but a wait for it ends in time
        work = dist.all_reduce(input_tensor, group=group, async_op=True)
        self.peers.wait(work, purpose, output_tensor.device)
        output_tensor.copy_(input_tensor.view(self.peers.size, -1)[self.peers.rank])
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(self.peers.size)
