"""Values beside parameters that ranks share: noise of optimizers, statistics of norms, and tensors to gather."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.optim import Optimizer

from lightning_shardckpt.compat.torch_distributed import all_gather_single
from lightning_shardckpt.compat.torch_modules import NormWithStatistics
from lightning_shardckpt.distributed.host_numbers import any_rank, gather_numbers
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.fqn import walk_modules
from lightning_shardckpt.parallel.tensors.values import refuse_batched, share_rng

_T = TypeVar("_T")
_DRAWS = "_shardckpt_draws"  # an attribute of an optimizer: whether its first step drew random numbers on any rank


@contextmanager
def share_optimizer_rng(
    optimizer: Optimizer, closure: Callable[[], _T], group: dist.ProcessGroup | None
) -> Iterator[Callable[[], _T]]:
    """Inside, a step of ``optimizer`` draws the random numbers of the first rank, to add alike to replicas.

    Yields the closure for the step, within which each rank draws its own numbers. An optimizer whose first step draws
    nothing on any rank is left alone from then on; a step that a GradScaler skips does not count as the first.

    Collective: every rank of ``group`` must call it. A group of None means that there are no other ranks.
    """
    draws: bool | None = getattr(optimizer, _DRAWS, None)  # None before the first step
    if group is None or group.size() == 1 or draws is False:
        yield closure
        return
    stack, drawn, steps = ExitStack(), list[list[str]](), list[Any]()

    def run_closure() -> _T:
        stack.close()
        result = closure()
        drawn.append(stack.enter_context(share_rng(group)))
        return result

    handle = optimizer.register_step_post_hook(lambda *call: steps.append(None))
    try:
        with stack:
            drawn.append(stack.enter_context(share_rng(group)))
            yield run_closure
    finally:
        handle.remove()
    if draws is None:  # a rank with empty shards may draw nothing, but must take part if others draw
        drew = any_rank(any(drawn), group)
        if drew or steps:  # a GradScaler skips a step on all ranks
            setattr(optimizer, _DRAWS, drew)


# ── norms, and all_gather ───────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def broadcast_statistics(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the first rank's running statistics of norms in training mode; as under DDP, these count.

    Collective: every rank of ``group`` must call it.
    """
    if group.size() == 1:
        return
    norms = [m for _, m in walk_modules(root) if isinstance(m, NormWithStatistics) and m.training]
    statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    if not statistics:
        return
    flat = torch.cat([buffer.double().reshape(-1) for buffer in statistics])  # exact for every narrower dtype
    dist.broadcast(flat, group=group, group_src=0)
    for buffer, values in zip(statistics, torch.split(flat, [b.numel() for b in statistics]), strict=True):
        buffer.copy_(values.view_as(buffer))


_NDIM = 7  # shapes are compared up to so many dims


class _AllGather(torch.autograd.Function):
    """Stacks the tensors of all ranks. The backward of torch's own does not run on a gloo group of some ranks."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, tensor = group, tensor.detach().contiguous()
        parts = tensor.new_empty(group.size(), *tensor.shape)
        all_gather_single(parts, tensor, group=group)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        refuse_batched(gradient)
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.group.rank()].clone(), None


def all_gather_tensors(tensor: Tensor, group: dist.ProcessGroup, *, sync_grads: bool = False) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dim.

    Collective: every rank of ``group`` must call it.

    With ``sync_grads`` the result is differentiable; the gradient of ``tensor`` is then the sum over all ranks.

    Raises:
        UnsupportedCodeError: on every rank, if shapes differ: collectives would mix memory, or hang.
    """
    with torch.set_grad_enabled(sync_grads and torch.is_grad_enabled()):
        if group.size() == 1:
            return torch.stack([tensor])
        own = torch.tensor([tensor.ndim, *tensor.shape[:_NDIM], *[0] * (_NDIM - tensor.ndim)])
        shapes = {tuple(numbers[1 : 1 + numbers[0]]): None for numbers in gather_numbers(own, group).tolist()}
        if len(shapes) > 1:
            raise UnsupportedCodeError(
                f"all_gather of tensors of other shapes on other ranks: {', '.join(map(str, shapes))}. For the last "
                "batch, set drop_last=True in the DataLoader, or gather tensors of the same shape"
            )
        return _AllGather.apply(tensor, group)  # type: ignore[no-any-return, no-untyped-call]  # torch's
