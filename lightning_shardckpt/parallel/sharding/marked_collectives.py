"""The collectives of ``fully_shard`` on CPUs, each with a mark of the module it is for, which the ranks compare.

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
from lightning_shardckpt.parallel.tensors.peers import MARK_BYTES, Peers

_EXACT = (torch.float32, torch.float64)  # hold the numbers of modules, and their squares, exactly


@dataclass(frozen=True, slots=True)
class _Marked:
    peers: Peers
    number: int
    purpose: str

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a collective."""
        return torch.empty(size, dtype=dtype, device=device)


class MarkedGather(_Marked):
    """An all-gather for ``set_custom_all_gather``."""

    __slots__ = ()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        mark = self.peers.mark(self.number, "gather")
        rows = input_tensor.view(torch.uint8)
        own = torch.cat([rows, torch.frombuffer(bytearray(mark), dtype=torch.uint8)])
        found = own.new_empty(self.peers.size * own.numel())
        work = all_gather_single(found, own, group=group, async_op=True)
        self.peers.wait(work, self.purpose, own.device)
        every = found.view(self.peers.size, -1)
        self.peers.check_marks([bytes(tail) for tail in every[:, -MARK_BYTES:].tolist()])
        output_tensor.view(torch.uint8).view(self.peers.size, -1).copy_(every[:, :-MARK_BYTES])


class MarkedReduction(_Marked):
    """A reduce-scatter for ``set_custom_reduce_scatter``."""

    __slots__ = ()

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        peers, number = self.peers, self.number + 1
        peers.mark(self.number, "reduce")
        parts = input_tensor.view(peers.size, -1)
        marked = input_tensor.dtype in _EXACT
        if marked:
            parts = torch.cat([parts, parts.new_tensor([number, number**2]).expand(peers.size, 2)], dim=1)
        work = dist.all_reduce(parts, group=group, async_op=True)  # gloo does the same for a reduce-scatter
        peers.wait(work, f"the gradients of {self.purpose}", parts.device)
        total = parts[peers.rank]
        if marked:
            if total[-2:].tolist() != [peers.size * number, peers.size * number**2]:
                peers.refuse_gradients(self.purpose)
            total = total[:-2]
        output_tensor.copy_(total)
        if op == dist.ReduceOp.AVG:
            output_tensor.div_(peers.size)
