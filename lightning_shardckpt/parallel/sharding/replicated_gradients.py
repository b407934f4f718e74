"""Average the gradients of replicated parameters, in whatever backward they arise.

As DistributedDataParallel does it, when autograd is done with a backward: all gradients in a few buffers. Two kinds
are reduced at once, one by one: those of a parameter with hooks of the user's, which must see the gradient of all
batches, and what ``torch.autograd.grad`` returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from lightning_shardckpt.parallel.sharding.gather import refuse_sparse

_HANDLES = "_shardckpt_averaging"  # of a parameter: what to remove when it is given to another one of these
_BUFFER_BYTES = 32 << 20


class _Reduce(torch.autograd.Function):
    """A gradient → the scaled sum over a group. Its derivative is the same, since gradients are those of a mean."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
        ctx.group, ctx.scale = group, scale
        found = gradient.clone(memory_format=torch.contiguous_format)
        local = _local(found)
        dist.all_reduce(local, group=group)
        local.mul_(scale)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Reduce.apply(gradient, ctx.group, ctx.scale), None, None  # type: ignore[no-untyped-call]  # torch's


class PlainGradients:
    """Reduces the gradients of some parameters over ``group``; one instance lives as long as they do.

    Args:
        parameters: plain ones, or DTensors that nothing but a tensor-parallel plan has cut; in the same order on all
            ranks.
        scale: of the sum. Only 1 / size may be reduced again without a change.
        at_once: reduce each gradient by itself, for sums.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, scale: float, *, at_once: bool = False
    ) -> None:
        self._parameters, self._group, self._scale, self._at_once = list(parameters), group, scale, at_once
        self._changed: set[int] = set()
        self._holding = self._queued = False
        for parameter in self._parameters:
            for handle in parameter.__dict__.pop(_HANDLES, ()):
                handle.remove()
            self._watch(parameter)

    def _watch(self, parameter: nn.Parameter) -> None:
        leaf: Any = parameter  # its hooks are untyped
        trained = leaf.requires_grad
        leaf.requires_grad_(True)  # one that is frozen now may be trained later
        before = leaf.register_hook(partial(self._on_gradient, ref(parameter)))
        after = leaf.register_post_accumulate_grad_hook(self._accumulated)
        leaf.requires_grad_(trained)
        for hooks, handle in ((leaf._backward_hooks, before), (leaf._post_accumulate_grad_hooks, after)):
            others = {number: hook for number, hook in hooks.items() if number != handle.id}
            own = hooks[handle.id]
            hooks.clear()  # torch calls them in the order of insertion, not that of an OrderedDict
            hooks.update({handle.id: own, **others})  # those of the user see what these return
        parameter.__dict__[_HANDLES] = (before, after)

    @contextmanager
    def hold(self, enabled: bool = True) -> Iterator[None]:
        """Inside, gradients only accumulate."""
        before, self._holding = self._holding, enabled
        try:
            yield
        finally:
            self._holding = before

    def _on_gradient(self, reference: ref[nn.Parameter], gradient: Tensor) -> Tensor:
        parameter: Any = reference()
        refuse_sparse(gradient)
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # such as a partial sum
            gradient = gradient.redistribute(placements=parameter.placements)
        hooked = len(parameter._backward_hooks) + len(parameter._post_accumulate_grad_hooks) > 2
        if self._at_once or hooked or _is_returned(parameter):
            return _Reduce.apply(gradient, self._group, self._scale)  # type: ignore[no-untyped-call,no-any-return]
        self._changed.add(id(parameter))
        return gradient

    def _accumulated(self, parameter: Tensor) -> None:
        if id(parameter) in self._changed and not self._queued and not self._holding:
            self._queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _finish(self) -> None:
        self._queued = False
        if not self._holding:
            self.reduce()

    @torch.no_grad()
    def reduce(self) -> None:
        """Average all gradients, if some changed here or elsewhere. Collective, if any rank has seen a backward.

        Those that no rank changed stay as they are. One that only others have is made.
        """
        together: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
        for parameter in self._parameters:
            if parameter.requires_grad:
                together[parameter.dtype, parameter.device].append(parameter)
        for some in together.values():
            for part in _buffers(some):
                self._reduce(part)
        self._changed.clear()

    def _reduce(self, parameters: list[nn.Parameter]) -> None:
        first = _local(parameters[0])
        marks = [float(id(p) in self._changed) for p in parameters]
        flat = torch.cat([first.new_tensor(marks), *(_flat_gradient(p) for p in parameters)])
        dist.all_reduce(flat, group=self._group)
        anywhere, *sums = torch.split(flat, [len(parameters), *(_local(p).numel() for p in parameters)])
        exist = marks if all(marks) else (anywhere > 0).tolist()  # tolist waits for the device
        for parameter, exists, total in zip(parameters, exist, sums, strict=True):
            if exists:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                local = _local(parameter.grad)
                torch.mul(total.view(local.shape), self._scale, out=local)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return _local(parameter).new_zeros(_local(parameter).numel())
    return _local(parameter.grad).detach().reshape(-1)


def _buffers(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Consecutive parameters whose gradients fill one buffer."""
    part, size = list[nn.Parameter](), 0
    for parameter in parameters:
        part.append(parameter)
        size += parameter.numel() * parameter.itemsize
        if size >= _BUFFER_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _is_returned(parameter: nn.Parameter) -> bool:
    """Whether ``torch.autograd.grad`` asks for the gradient that a hook has got."""
    try:
        torch._C._will_engine_execute_node(get_gradient_edge(parameter).node)
    except RuntimeError:  # torch cannot answer that for leaves then, and only then
        return True
    return False
