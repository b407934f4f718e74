"""Reduction of the gradients of replicated parameters, in any backward.

Gradients are reduced when the backward ends, many in one buffer; until then, user code may not use them. Two kinds are
reduced immediately, one by one: gradients of parameters with hooks of the user, which must get the gradient of all
batches, and gradients that ``torch.autograd.grad`` returns or that are differentiated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import after_backward, returns_gradient_of
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    without_torch_function,
)
from lightning_shardckpt.distributed.host_numbers import gather_numbers, on_device, wait_for
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import refuse_batched, refuse_sparse
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of

_BUFFER_BYTES = 25 << 20  # as in DistributedDataParallel


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are reduced.

    Attributes:
        group: the ranks to sum over.
        scale: multiplies the sum. Only for 1 / size does a second reduction change nothing but rounding.
        dtype: the dtype of the sums; None for the dtype of the gradients, but at least float32.
    """

    group: dist.ProcessGroup
    scale: float = 1.0
    dtype: torch.dtype | None = None

    def widen(self, gradient: Tensor) -> Tensor:
        """Return a gradient in the dtype of the sums."""
        if not gradient.is_floating_point():
            return gradient
        return gradient.to(self.dtype or (torch.float32 if gradient.itemsize < 4 else gradient.dtype))


class _Reduce(torch.autograd.Function):
    """Reduces a gradient immediately. Its backward is the same, because gradients belong to a mean."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        refuse_batched(gradient)
        reduced = gradient.clone(memory_format=torch.contiguous_format)
        total = reduction.widen(local_tensor(reduced))
        dist.all_reduce(total, group=reduction.group)
        local_tensor(reduced).copy_(total.mul_(reduction.scale))
        return reduced

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_now([ctx.reduction], gradient), None


def _reduce_now(reductions: Iterable[Reduction], gradient: Tensor) -> Tensor:
    for reduction in reductions:
        gradient = _Reduce.apply(gradient, reduction)  # type: ignore[no-untyped-call]  # torch's
    return gradient


_reductions: MutableMapping[Tensor, list[Reduction]] = WeakIdKeyDictionary()
"""The reductions of a parameter's gradients, one after the other: over tensor-parallel ranks, over replicas."""
_handles: MutableMapping[Tensor, tuple[RemovableHandle, ...]] = WeakIdKeyDictionary()
"""The hooks of `ReplicatedGradients` on a parameter; another instance that takes it over removes them."""


def is_reduced(parameter: Tensor) -> bool:
    """Return whether a `ReplicatedGradients` reduces the gradients of a parameter."""
    return parameter in _reductions


def average_gradients_of_copy(parameter: nn.Parameter, copied: nn.Parameter) -> None:
    """Reduce the gradients of a deep copy as those of the original, immediately: other ranks may have no copy."""
    if parameter in _reductions:
        with _trained(copied):
            copied.register_hook(partial(_reduce_now, _reductions[parameter]))  # type: ignore[no-untyped-call]  # torch's
        _reductions[copied] = _reductions[parameter]


@contextmanager
def _trained(leaf: Any) -> Iterator[None]:
    """Inside, a leaf takes hooks: a frozen one may be trained later."""
    before = leaf.requires_grad
    leaf.requires_grad_(True)
    yield
    leaf.requires_grad_(before)


class ReplicatedGradients:
    """Reduces the gradients of parameters; one instance lives as long as they do.

    Args:
        mean: the reduction over the replicas; None if there are none.

    Attributes:
        accumulates: whether backward passes only accumulate.
    """

    def __init__(self, mean: Reduction | None) -> None:
        self._mean, self.accumulates = mean, False
        self._replicated, self._changed = list[nn.Parameter](), set[int]()
        self._queued: Callable[[], object] = lambda: None
        """A weak reference to the function that the running backward calls at its end."""

    def add(self, parameters: Iterable[nn.Parameter], sums: Sequence[Reduction] = ()) -> None:
        """Reduce the gradients of these parameters.

        Args:
            parameters: plain, or DTensors of a tensor-parallel plan. All ranks must add them in the same order.
            sums: immediate reductions before the mean, of gradients that are partial sums.
        """
        reductions = [*sums, *([] if self._mean is None else [self._mean])]
        for parameter in parameters:
            is_trained = parameter.is_floating_point() or parameter.is_complex()  # quantized weights never are
            if reductions and is_trained:
                _reductions[parameter] = reductions
                self._watch(parameter, sums)
                self._replicated.append(parameter)

    def _watch(self, parameter: nn.Parameter, sums: Sequence[Reduction]) -> None:
        for handle in _handles.pop(parameter, ()):
            handle.remove()
        leaf: Any = parameter  # its hooks are untyped
        with _trained(leaf):
            before = leaf.register_hook(partial(self._on_gradient, ref(parameter), sums))
            after = leaf.register_post_accumulate_grad_hook(self._accumulated)
        for hooks, handle in ((gradient_hooks(leaf), before), (accumulation_hooks(leaf), after)):
            assert hooks is not None  # one was registered
            own, others = hooks.pop(handle.id), dict(hooks)
            hooks.clear()  # torch calls hooks in the order of insertion, not of the OrderedDict
            hooks.update({handle.id: own, **others})  # own first, so that the user's hooks get its result
        _handles[parameter] = before, after

    def _on_gradient(self, reference: ref[nn.Parameter], sums: Sequence[Reduction], gradient: Tensor) -> Tensor:
        parameter: Any = reference()
        refuse_sparse(gradient)
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # such as a partial sum
            gradient = gradient.redistribute(placements=parameter.placements)
        is_used = torch.is_grad_enabled() or _count_hooks(parameter) or returns_gradient_of(parameter)
        if self._mean is None or is_used:
            return _reduce_now(_reductions[parameter], gradient)
        self._changed.add(id(parameter))
        return _reduce_now(sums, gradient)

    def _accumulated(self, parameter: Tensor) -> None:
        if id(parameter) not in self._changed:
            return
        if type(parameter.grad) is Tensor:
            parameter.grad.__class__ = _LocalGradient
        if not self.accumulates and self._queued() is None:
            finish = partial(self._finish)
            self._queued = ref(finish)
            after_backward(finish)

    def _finish(self) -> None:
        if not self.accumulates:
            self.reduce()

    def reduce(self) -> None:
        """Reduce the gradients that any rank has changed. Collective: every rank of the group must call it."""
        if self._mean is not None:
            reduce_gradients(self._replicated, self._mean, lambda p: id(p) in self._changed and p.grad is not None)
            self._changed.clear()

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Inside, backward passes only accumulate, or don't if not ``enabled``."""
        before, self.accumulates = self.accumulates, enabled
        try:
            yield
        finally:
            self.accumulates = before

    def drop_local(self) -> None:
        """Drop the gradients that are not reduced, for a run that failed and can't reduce them."""
        for parameter in self._replicated:
            if type(parameter.grad) is _LocalGradient:
                parameter.grad = None


class _LocalGradient(Tensor):
    """A gradient with the batches of this rank; one process would have the gradient of all."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kind_of(func) is not Kind.METADATA and name_of(func) not in ("zero_", "_foreach_zero_"):
            raise UnsupportedCodeError(
                f"{name_of(func)} of the gradient of a replicated parameter, which has the batches of this rank alone, "
                "in a backward or while gradients accumulate. Use it in on_before_optimizer_step, in a hook of the "
                "parameter (register_hook), or train with data_parallel_shard_size greater than 1."
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


def _count_hooks(parameter: nn.Parameter) -> int:
    """Return the number of hooks on the gradient of a parameter, without those of `ReplicatedGradients`."""
    every = len(gradient_hooks(parameter) or ()) + len(accumulation_hooks(parameter) or ())
    return every - len(_handles.get(parameter, ()))


@torch.no_grad()
def reduce_gradients(
    parameters: Iterable[nn.Parameter],
    reduction: Reduction,
    is_changed: Callable[[nn.Parameter], bool],
    *,
    device: torch.device | None = None,
    asks_host: bool = False,
) -> None:
    """Reduce the gradients of trained parameters, many in one buffer.

    Collective: every rank of the group must call it, with the same parameters in the same order. A gradient that no
    rank has changed stays as it is, even if None; one that only other ranks have is created.

    Args:
        parameters: plain parameters, or DTensors with the same sharding on all ranks of the group.
        reduction: of the gradients.
        is_changed: whether this rank contributes to the gradient of a parameter.
        device: where to reduce; by default the device of the gradients.
        asks_host: exchange over gloo which ranks contribute, where ranks usually differ in that: by default a host
            that does not contribute everywhere waits for its device.
    """
    for alike in _group_alike(parameter for parameter in parameters if parameter.requires_grad):
        marks = [float(is_changed(parameter)) for parameter in alike]
        with without_torch_function():
            flat = torch.cat([_flat_gradient(parameter) for parameter in alike])
            flat = reduction.widen(flat if device is None else flat.to(device))
            flat = torch.cat([flat, on_device(marks, flat.dtype, flat.device)])  # a mark is 1 if this rank contributes
        work = dist.all_reduce(flat, group=reduction.group, async_op=True)
        assert work is not None  # since this rank is in the group
        wait_for(work) if flat.is_cpu else work.wait()  # on a GPU, only the stream waits
        *sums, anywhere = torch.split(flat, [*(local_tensor(parameter).numel() for parameter in alike), len(marks)])
        if asks_host:
            anywhere = gather_numbers(torch.tensor(marks), reduction.group).sum(0)
        exist = marks if all(marks) else (anywhere != 0).tolist()
        for parameter, exists, total in zip(alike, exist, sums, strict=True):
            if type(parameter.grad) is _LocalGradient:
                parameter.grad.__class__ = Tensor  # type: ignore[assignment]  # back to what it was
            if exists:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                target = local_tensor(parameter.grad)
                target.copy_(total.mul_(reduction.scale).view(target.shape))


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        local = local_tensor(parameter)
        return local.new_zeros(local.numel())
    return local_tensor(parameter.grad).detach().reshape(-1)


def _group_alike(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device whose gradients fill one buffer."""
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        alike[parameter.dtype, parameter.device].append(parameter)
    for group in alike.values():
        part, size = list[nn.Parameter](), 0
        for parameter in group:
            part.append(parameter)
            size += parameter.numel() * parameter.itemsize
            if size >= _BUFFER_BYTES:
                yield part
                part, size = [], 0
        if part:
            yield part
