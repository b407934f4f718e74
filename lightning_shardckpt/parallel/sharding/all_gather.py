"""Differentiable all-gather of plain tensors, for ``self.all_gather``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.distributed.host_numbers import gather_numbers
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import refuse_batched

_NDIM = 7  # shapes are compared up to so many dims


class _AllGather(torch.autograd.Function):
    """Stacks the tensors of all ranks. The backward of torch's own does not run on a gloo group of some ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.detach().contiguous()
        parts = tensor.new_empty(group.size(), *tensor.shape)
        all_gather_single(parts, tensor, group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _ReduceScatter.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]  # torch's


class _ReduceScatter(torch.autograd.Function):
    """Sums the stacked parts of all ranks, and returns this rank's part of the sum."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        refuse_batched(parts)
        total = parts.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total[group.rank()].clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllGather.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]  # torch's


def all_gather_tensors(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool = False) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dim.

    Collective: every rank of ``group`` must call it.

    Args:
        tensor: this rank's tensor, with the same shape on all ranks.
        group: the ranks.
        sync_grads: whether the result is differentiable; the gradient of ``tensor`` is then the sum over all ranks.
    """
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        if group.size() == 1:
            return torch.stack([tensor])
        _check_shapes(tensor, group)
        gathered: Tensor = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch's
    return gathered


def _check_shapes(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Raise on every rank if shapes differ between ranks: collectives would mix memory, or hang."""
    own = torch.tensor([tensor.ndim, *tensor.shape[:_NDIM], *[0] * (_NDIM - tensor.ndim)])
    shapes = [tuple(numbers[1 : 1 + numbers[0]]) for numbers in gather_numbers(own, group).tolist()]
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedCodeError(
            f"all_gather of tensors of other shapes on other ranks: {', '.join(map(str, dict.fromkeys(shapes)))}. "
            "The samples of the last batch may be divided unevenly: set drop_last=True in the DataLoader, or gather "
            "tensors that have the same shape on all ranks"
        )
