"""Average the gradients of replicated parameters, in whatever backward they arise.

As DistributedDataParallel does it, when autograd is done with a backward: all gradients in a few buffers. Two kinds
are reduced at once, one by one: those of a parameter with hooks of the user's, which must see the gradient of all
batches, and what ``torch.autograd.grad`` returns.
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
from lightning_shardckpt.compat.torch_tensors import accumulation_hooks, gradient_hooks
from lightning_shardckpt.distributed.host_numbers import gathered, on_device
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import refuse_batched, refuse_sparse

_handles: MutableMapping[Tensor, tuple[RemovableHandle, ...]] = WeakIdKeyDictionary()
"""What to remove from a parameter when it is given to another one of these."""
_sums: MutableMapping[Tensor, tuple[dist.ProcessGroup, float]] = WeakIdKeyDictionary()
"""The group over which the gradients of a parameter are summed, and what the sums are multiplied with."""
_BUFFER_BYTES = 32 << 20


class _SumOverGroup(torch.autograd.Function):
    """A gradient → the scaled sum over a group. Its derivative is the same, since gradients are those of a mean."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
        ctx.group, ctx.scale = group, scale
        refuse_batched(gradient)
        found = gradient.clone(memory_format=torch.contiguous_format)
        local = local_tensor(found)
        dist.all_reduce(local, group=group)
        local.mul_(scale)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _SumOverGroup.apply(gradient, ctx.group, ctx.scale), None, None  # type: ignore[no-untyped-call]  # torch's


def is_reduced(parameter: Tensor) -> bool:
    """Return whether the gradients of a parameter are reduced here."""
    return parameter in _sums


def average_copy(parameter: nn.Parameter, copied: nn.Parameter) -> None:
    """Sum the gradients of a copy as those of the original are, each at once: not every rank need make one."""
    if parameter not in _sums:
        return
    group, scale = _sums[copied] = _sums[parameter]
    trained = copied.requires_grad
    copied.requires_grad_(True)
    copied.register_hook(lambda gradient: _SumOverGroup.apply(gradient, group, scale))  # type: ignore[no-untyped-call]
    copied.requires_grad_(trained)


@dataclass(slots=True)
class Accumulation:
    """Whether the backward passes of a module only accumulate gradients of replicated parameters now."""

    is_on: bool = False

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Inside, they do, without communication."""
        before, self.is_on = self.is_on, enabled
        try:
            yield
        finally:
            self.is_on = before


class ReplicatedGradients:
    """Reduces the gradients of some parameters over ``group``; one instance lives as long as they do.

    Args:
        parameters: plain ones, or DTensors that nothing but a tensor-parallel plan has sharded; in the same order on
            all ranks.
        scale: of the sum. Only 1 / size may be reduced again without a change.
        accumulation: says whether backward passes only accumulate.
        at_once: reduce each gradient by itself, for sums.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        scale: float,
        accumulation: Accumulation,
        *,
        at_once: bool = False,
    ) -> None:
        self._replicated, self._group, self._scale, self._at_once = list[nn.Parameter](), group, scale, at_once
        self._accumulation = accumulation
        self._changed: set[int] = set()
        self._queued = False
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Reduce the gradients of these, too. Every rank must add the same ones in the same order."""
        for parameter in parameters:
            for handle in _handles.pop(parameter, ()):
                handle.remove()
            self._replicated.append(parameter)
            self._watch(parameter)
            _sums[parameter] = self._group, self._scale

    def _watch(self, parameter: nn.Parameter) -> None:
        leaf: Any = parameter  # its hooks are untyped
        trained = leaf.requires_grad
        leaf.requires_grad_(True)  # one that is frozen now may be trained later
        before = leaf.register_hook(partial(self._on_gradient, ref(parameter)))
        after = leaf.register_post_accumulate_grad_hook(self._accumulated)
        leaf.requires_grad_(trained)
        for hooks, handle in ((gradient_hooks(leaf), before), (accumulation_hooks(leaf), after)):
            assert hooks is not None  # one was registered
            others = {number: hook for number, hook in hooks.items() if number != handle.id}
            own = hooks[handle.id]
            hooks.clear()  # torch calls them in the order of insertion, not that of an OrderedDict
            hooks.update({handle.id: own, **others})  # those of the user see what these return
        _handles[parameter] = before, after

    def _on_gradient(self, reference: ref[nn.Parameter], gradient: Tensor) -> Tensor:
        parameter: Any = reference()
        refuse_sparse(gradient)
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # such as a partial sum
            gradient = gradient.redistribute(placements=parameter.placements)
        if self._at_once or count_hooks(parameter) or returns_gradient_of(parameter):
            return _SumOverGroup.apply(gradient, self._group, self._scale)  # type: ignore[no-untyped-call,no-any-return]
        self._changed.add(id(parameter))
        return gradient

    def _accumulated(self, parameter: Tensor) -> None:
        if id(parameter) in self._changed and not self._queued and not self._accumulation.is_on:
            self._queued = True
            after_backward(self._finish)

    def _finish(self) -> None:
        self._queued = False
        if not self._accumulation.is_on:
            self.reduce()

    def reduce(self) -> None:
        """Average all gradients, if some changed here or elsewhere. Collective, if any rank has seen a backward.

        Those that no rank changed stay as they are. One that only others have is made.
        """
        trained = [parameter for parameter in self._replicated if parameter.requires_grad]
        all_reduce_gradients(trained, self._group, lambda p: id(p) in self._changed, scale=self._scale)
        self._changed.clear()


def count_hooks(parameter: nn.Parameter) -> int:
    """Return how many hooks on the gradient of a parameter are not of `ReplicatedGradients`."""
    every = len(gradient_hooks(parameter) or ()) + len(accumulation_hooks(parameter) or ())
    return every - len(_handles.get(parameter, ())) if every else 0


@torch.no_grad()
def all_reduce_gradients(
    parameters: Iterable[nn.Parameter],
    group: dist.ProcessGroup,
    is_changed: Callable[[nn.Parameter], bool],
    *,
    scale: float = 1.0,
    device: torch.device | None = None,
    hooks_count: bool = False,
) -> None:
    """Sum the gradients of parameters over ``group``, several in one buffer, and multiply them by ``scale``.

    Collective: every rank of ``group`` must call it, with the same parameters in the same order. The gradient of a
    parameter that no rank changed stays as it is, also None; one that only others have is made.

    Args:
        parameters: plain ones, or DTensors that are sharded alike on all ranks of ``group``.
        is_changed: whether this rank has something to add to the gradient of a parameter.
        scale: of the sums.
        device: where to reduce; by default that of the gradients.
        hooks_count: whether hooks have seen the part of this rank alone, and should have seen the sum.

    Raises:
        UnsupportedCodeError: on all ranks, with ``hooks_count``, for a parameter that several of them have changed.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        alike[parameter.dtype, parameter.device].append(parameter)
    for some in alike.values():
        for buffered in _buffers(some):
            marks = [float(is_changed(p)) for p in buffered]
            hooked = [float(count_hooks(p) > 0) for p in buffered] if hooks_count else []
            _all_reduce(buffered, group, marks, hooked, scale, device)


def _all_reduce(
    parameters: list[nn.Parameter],
    group: dist.ProcessGroup,
    marks: list[float],
    hooked: list[float],
    scale: float,
    device: torch.device | None,
) -> None:
    parts = [_flat_gradient(parameter) for parameter in parameters]
    flat = torch.cat([on_device(marks, parts[0].dtype, parts[0].device), *parts])
    flat = flat if device is None else flat.to(device)
    dist.all_reduce(flat, group=group)
    flat[len(marks) :].mul_(scale)
    anywhere, *sums = torch.split(flat, [len(marks), *(part.numel() for part in parts)])
    hooks = torch.zeros(len(marks))
    if hooked:  # by pipeline stages, which often differ
        anywhere, hooks = gathered(torch.tensor([marks, hooked]), group).sum(0)
    if hooked and bool(((anywhere > 1) & (hooks > 0)).any()):
        raise UnsupportedCodeError(
            "a parameter that several pipeline stages use, such as a tied weight, has a hook on its gradient, of which "
            "each of them has a part. Change the gradient in on_before_optimizer_step, or use pipeline_parallel_size=1."
        )
    exist = marks if all(marks) else (anywhere != 0).tolist()  # on a GPU, waits for the device
    for parameter, exists, total in zip(parameters, exist, sums, strict=True):
        if exists:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            target = local_tensor(parameter.grad)
            target.copy_(total.view(target.shape))


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        local = local_tensor(parameter)
        return local.new_zeros(local.numel())
    return local_tensor(parameter.grad).detach().reshape(-1)


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
