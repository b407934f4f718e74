"""Gather plain tensors of all ranks, with gradients: what ``self.all_gather`` does."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.distributed.host_numbers import gather_numbers
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import refuse_batched

_NDIM = 7  # of the most dims that are compared


class _AllGather(torch.autograd.Function):
    """A tensor of each rank → all of them, stacked. torch's own has no backward for parts of all processes on gloo."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        tensor = tensor.detach().contiguous()
        parts = tensor.new_empty(group.size(), *tensor.shape)
        all_gather_single(parts, tensor, group=group)
        return parts

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _SumOfParts.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]  # torch's


class _SumOfParts(torch.autograd.Function):
    """A part for each rank, from each rank → the sum of those for this rank."""

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
    """The tensors of all ranks of ``group``, stacked in front. Collective.

    Args:
        tensor: of the same shape on all ranks.
        group: whose ranks take part.
        sync_grads: whether the gradient of a rank's tensor is the sum of those that all ranks have of it.
    """
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        if group.size() == 1:
            return torch.stack([tensor])
        _check_alike(tensor, group)
        found: Tensor = _AllGather.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch's
    return found


def _check_alike(tensor: Tensor, group: dist.ProcessGroup) -> None:
    """Refuse tensors of other sizes on other ranks, of which collectives make anything or never end.

    Raises:
        UnsupportedCodeError: on every rank.
    """
    own = torch.tensor([tensor.ndim, *tensor.shape[:_NDIM], *[0] * (_NDIM - tensor.ndim)])
    shapes = [tuple(numbers[1 : 1 + numbers[0]]) for numbers in gather_numbers(own, group).tolist()]
    if any(shape != shapes[0] for shape in shapes):
        raise UnsupportedCodeError(
            f"all_gather of tensors of other shapes on other ranks: {', '.join(map(str, dict.fromkeys(shapes)))}. "
            "Samples that do not fill the last step of an epoch are divided unevenly: set drop_last=True in the "
            "DataLoader, or gather what has the same shape on all ranks"
        )
