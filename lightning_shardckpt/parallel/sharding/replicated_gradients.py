"""Reduction of the gradients of replicated parameters, in any backward.

As in DistributedDataParallel, gradients are reduced in buckets, and the all-reduce of a bucket starts when autograd has
computed all of its gradients. ``grad`` has the mean when the backward ends; changes by user code during the backward
are included. Two kinds of gradients are reduced immediately, one by one: gradients of parameters with hooks of the
user, which must get the gradient of all batches, and gradients that ``torch.autograd.grad`` returns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
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
    NO_TORCH_FUNCTION,
    accumulation_hooks,
    gradient_hooks,
    version_of,
    without_torch_function,
)
from lightning_shardckpt.distributed.host_numbers import any_rank, gather_numbers, on_device, wait_for
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import refuse_batched, refuse_sparse
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of

_handles: MutableMapping[Tensor, tuple[RemovableHandle, ...]] = WeakIdKeyDictionary()
"""The hooks of `ReplicatedGradients` on a parameter; another instance that takes it over removes them."""
_sums: MutableMapping[Tensor, tuple[dist.ProcessGroup, float]] = WeakIdKeyDictionary()
"""The group over which the gradients of a parameter are summed, and the scale of the sum."""
_BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel
_data: Any = Tensor.data


class _SumOverGroup(torch.autograd.Function):
    """Sums a gradient over a group, and scales it. Its backward is the same, because gradients belong to a mean."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, group: dist.ProcessGroup, scale: float) -> Tensor:
        ctx.group, ctx.scale = group, scale
        refuse_batched(gradient)
        total = gradient.clone(memory_format=torch.contiguous_format)
        local = local_tensor(total)
        dist.all_reduce(local, group=group)
        local.mul_(scale)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _SumOverGroup.apply(gradient, ctx.group, ctx.scale), None, None  # type: ignore[no-untyped-call]  # torch's


def is_reduced(parameter: Tensor) -> bool:
    """Return whether a `ReplicatedGradients` reduces the gradients of a parameter."""
    return parameter in _sums


def average_gradients_of_copy(parameter: nn.Parameter, copied: nn.Parameter) -> None:
    """Reduce the gradients of a deep copy as those of the original, immediately: other ranks may have no copy."""
    if parameter not in _sums:
        return
    group, scale = _sums[copied] = _sums[parameter]
    trained = copied.requires_grad
    copied.requires_grad_(True)
    copied.register_hook(lambda gradient: _SumOverGroup.apply(gradient, group, scale))  # type: ignore[no-untyped-call]
    copied.requires_grad_(trained)


@dataclass(slots=True)
class Accumulation:
    """A switch: while it is on, backward passes only accumulate gradients of replicated parameters."""

    is_on: bool = False

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Inside, the switch is on, or off if not ``enabled``."""
        before, self.is_on = self.is_on, enabled
        try:
            yield
        finally:
            self.is_on = before


class ReplicatedGradients:
    """Reduces the gradients of parameters over ``group``; one instance lives as long as they do.

    Args:
        parameters: plain parameters, or DTensors of a tensor-parallel plan, in the same order on all ranks.
        group: the ranks to reduce over.
        scale: the scale of the sum. Only for 1 / size does a second reduction change nothing.
        accumulation: says whether backward passes only accumulate.
        at_once: reduce each gradient immediately; needed for sums.
        overlapping: a separate group of the same ranks for reductions during a backward; None to reduce at its end.
        bucket_bytes: the size of the gradients in a bucket.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: dist.ProcessGroup,
        scale: float,
        accumulation: Accumulation,
        *,
        at_once: bool = False,
        overlapping: dist.ProcessGroup | None = None,
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._replicated, self._group, self._scale, self._at_once = list[nn.Parameter](), group, scale, at_once
        self._accumulation = accumulation
        self._changed: set[int] = set()
        self._queued: Callable[[], object] = lambda: None
        """A weak reference to the function that the running backward calls at its end."""
        self._overlapping, self._bucket_bytes = overlapping, bucket_bytes
        self._buckets, self._sent = list[_Bucket](), 0
        self._bucket_of: dict[int, _Bucket] = {}
        self._has_lost_count = False
        self.add(parameters)

    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Also reduce the gradients of these parameters. All ranks must add the same ones in the same order."""
        for parameter in parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):  # quantized weights are never trained
                continue
            for handle in _handles.pop(parameter, ()):
                handle.remove()
            self._replicated.append(parameter)
            self._watch(parameter)
            _sums[parameter] = self._group, self._scale

    def _watch(self, parameter: nn.Parameter) -> None:
        leaf: Any = parameter  # its hooks are untyped
        trained = leaf.requires_grad
        leaf.requires_grad_(True)  # a frozen one may be trained later
        before = leaf.register_hook(partial(self._on_gradient, ref(parameter)))
        after = leaf.register_post_accumulate_grad_hook(self._accumulated)
        leaf.requires_grad_(trained)
        for hooks, handle in ((gradient_hooks(leaf), before), (accumulation_hooks(leaf), after)):
            assert hooks is not None  # one was registered
            others = {number: hook for number, hook in hooks.items() if number != handle.id}
            own = hooks[handle.id]
            hooks.clear()  # torch calls hooks in the order of insertion, not of the OrderedDict
            hooks.update({handle.id: own, **others})  # own first, so that the user's hooks get its result
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
        if id(parameter) not in self._changed or self._accumulation.is_on:
            return
        if self._queued() is None:
            self.reset()  # an earlier backward may have failed
            finish = partial(self._finish)
            self._queued = ref(finish)
            self._buckets, self._sent = self._plan_buckets(), 0
            self._bucket_of = {number: bucket for bucket in self._buckets for number in bucket.missing}
            after_backward(finish)
        if self._buckets:
            self._bucket_of[id(parameter)].missing.discard(id(parameter))
        while self._sent < len(self._buckets) and not self._buckets[self._sent].missing:
            self._send_next()

    def _plan_buckets(self) -> list[_Bucket]:
        """Return buckets of parameters in reverse order of registration; none if one bucket would do."""
        trained = [parameter for parameter in reversed(self._replicated) if parameter.requires_grad]
        if self._overlapping is None or any(isinstance(parameter, DTensor) for parameter in trained):
            return []
        if self._has_lost_count:
            raise UnsupportedCodeError(
                "an earlier backward failed while it was reducing gradients over the replicas, which may have reduced "
                "other ones. Let an error in a backward end the run, and resume from a checkpoint."
            )
        buckets = [_Bucket(part, {id(p) for p in part}) for part in _group_alike(trained, self._bucket_bytes)]
        return buckets if len(buckets) > 1 else []

    def _send_next(self) -> None:
        """Start the reduction of the next bucket; all ranks use the same order."""
        assert self._overlapping is not None
        self._buckets[self._sent].send(self._overlapping, self._is_changed)
        self._sent += 1

    def _finish(self) -> None:
        self._queued, self._bucket_of = (lambda: None), {}
        if not self._buckets:
            if not self._accumulation.is_on:
                self.reduce()
            return
        while self._sent < len(self._buckets):
            self._send_next()
        buckets, self._buckets = self._buckets, []
        changed = [bucket.end_sending() for bucket in buckets]
        if any_rank(any(changed), self._group):  # by user code during the backward
            self.reduce()
            return
        for bucket in buckets:
            bucket.unpack(self._scale)
        self._changed.clear()

    def _is_changed(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._changed and parameter.grad is not None

    def refuse_reads(self) -> None:
        """Refuse uses of the gradients that accumulate, each of which has the batches of this rank alone."""
        for parameter in self._replicated:
            if id(parameter) in self._changed and type(parameter.grad) is Tensor:
                parameter.grad.__class__ = _LocalGradient

    def allow_reads(self) -> None:
        """Undo `refuse_reads`."""
        for parameter in self._replicated:
            if type(parameter.grad) is _LocalGradient:
                parameter.grad.__class__ = Tensor  # type: ignore[assignment]  # back to what it was

    def drop_local(self) -> None:
        """Drop the gradients that `refuse_reads` refuses; for a run that failed and can't reduce them."""
        for parameter in self._replicated:
            if type(parameter.grad) is _LocalGradient:
                parameter.grad = None

    def reset(self) -> None:
        """Discard the state of a backward that raised an error."""
        self._has_lost_count |= self._sent > 0 and bool(self._buckets)
        for bucket in self._buckets:
            bucket.release()
        self._queued, self._buckets, self._bucket_of = (lambda: None), [], {}

    def reduce(self) -> None:
        """Reduce the gradients that any rank has changed.

        Collective: every rank of the group must call it.
        """
        trained = [parameter for parameter in self._replicated if parameter.requires_grad]
        all_reduce_gradients(trained, self._group, self._is_changed, scale=self._scale)
        self._changed.clear()


class _SentGradient(Tensor):
    """A gradient whose bucket is being reduced; records uses through which changes do not increase its version."""

    __torch_function__ = NO_TORCH_FUNCTION

    @property
    def data(self) -> Tensor:
        """The values."""
        self.__dict__["_touched"] = True
        return _data.__get__(self)  # type: ignore[no-any-return]  # a Tensor

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__["_touched"] = True
        _data.__set__(self, value)

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array over the same memory."""
        self.__dict__["_touched"] = True
        return super().numpy(force=force)


class _LocalGradient(Tensor):
    """A gradient that accumulates, with the batches of this rank; one process would have those of all ranks."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kind_of(func) is not Kind.METADATA and name_of(func) not in ("zero_", "_foreach_zero_"):
            raise UnsupportedCodeError(
                f"{name_of(func)} of the gradient of a replicated parameter, while gradients accumulate: it has the "
                "batches of this rank alone until the last of the accumulated batches. Use it in "
                "on_before_optimizer_step, or train with data_parallel_shard_size greater than 1."
            )
        with without_torch_function():
            return func(*args, **(kwargs or {}))


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are reduced together.

    Attributes:
        parameters: parameters of one dtype and device.
        missing: the ids of the parameters whose gradients the running backward has not computed yet.
    """

    parameters: list[nn.Parameter]
    missing: set[int]
    _marks: list[float] = field(default_factory=list)
    _flat: Tensor | None = None
    _work: dist.Work | None = None
    _gradients: list[tuple[Tensor, int]] = field(default_factory=list)

    @torch.no_grad()
    def send(self, group: dist.ProcessGroup, is_changed: Callable[[nn.Parameter], bool]) -> None:
        """Start to sum the gradients over ``group``; ``is_changed``: whether this rank contributes to one."""
        self._marks = [float(is_changed(parameter)) for parameter in self.parameters]
        self._flat = _pack(self.parameters, self._marks)
        self._work = dist.all_reduce(self._flat, group=group, async_op=True)
        for parameter in self.parameters:
            gradient = parameter.grad
            if type(gradient) is Tensor:
                gradient.__class__ = _SentGradient
                self._gradients.append((gradient, version_of(gradient)))

    def end_sending(self) -> bool:
        """Wait for the sums, on a GPU by the stream; return whether a gradient may have changed since `send`."""
        assert self._flat is not None
        _wait(self._work, self._flat)
        present = {id(parameter.grad) for parameter in self.parameters}
        changed = any(
            "_touched" in vars(gradient) or version_of(gradient) != version or id(gradient) not in present
            for gradient, version in self._gradients
        )
        self.release()
        return changed

    def release(self) -> None:
        """Turn the gradients into plain tensors again."""
        for gradient, _ in self._gradients:
            vars(gradient).pop("_touched", None)
            gradient.__class__ = Tensor
        self._gradients.clear()

    @torch.no_grad()
    def unpack(self, scale: float) -> None:
        """Write the sums, multiplied by ``scale``, into the gradients."""
        assert self._flat is not None
        _unpack(self.parameters, self._marks, self._flat, scale, None)


def _wait(work: dist.Work | None, flat: Tensor) -> None:
    """Wait for a reduction, on a GPU by the stream; raises a RankError on a CPU if a rank is lost meanwhile."""
    assert work is not None  # since this rank is in the group
    wait_for(work) if flat.is_cpu else work.wait()


def count_hooks(parameter: nn.Parameter) -> int:
    """Return the number of hooks on the gradient of a parameter, without those of `ReplicatedGradients`."""
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

    Collective: every rank of ``group`` must call it, with the same parameters in the same order. A gradient that no
    rank has changed stays as it is, even if None; one that only other ranks have is created.

    Args:
        parameters: plain parameters, or DTensors with the same sharding on all ranks of ``group``.
        group: the ranks to sum over.
        is_changed: whether this rank contributes to the gradient of a parameter.
        scale: the scale of the sums.
        device: where to reduce; by default the device of the gradients.
        hooks_count: whether hooks on gradients are errors: they got the part of this rank, and not the sum.

    Raises:
        UnsupportedCodeError: on all ranks, with ``hooks_count``, for a parameter that several ranks have changed.
    """
    for buffered in _group_alike(parameters, _BUCKET_BYTES):
        marks = [float(is_changed(p)) for p in buffered]
        flat, anywhere = _pack(buffered, marks), None
        flat = flat if device is None else flat.to(device)
        _wait(dist.all_reduce(flat, group=group, async_op=True), flat)
        if hooks_count:
            hooked = [float(count_hooks(p) > 0) for p in buffered]
            anywhere, hooks = gather_numbers(torch.tensor([marks, hooked]), group).sum(0)
            if bool(((anywhere > 1) & (hooks > 0)).any()):
                raise UnsupportedCodeError(
                    "a parameter that several pipeline stages use, such as a tied weight, has a hook on its gradient, "
                    "and each stage has only a part of the gradient. Change the gradient in on_before_optimizer_step, "
                    "or use pipeline_parallel_size=1."
                )
        _unpack(buffered, marks, flat, scale, anywhere)


def _pack(parameters: Sequence[nn.Parameter], marks: Sequence[float]) -> Tensor:
    """Return a flat buffer of marks and gradients."""
    parts = [_flat_gradient(parameter) for parameter in parameters]
    return torch.cat([on_device(marks, parts[0].dtype, parts[0].device), *parts])


def _unpack(
    parameters: Sequence[nn.Parameter], marks: Sequence[float], flat: Tensor, scale: float, anywhere: Tensor | None
) -> None:
    """Write the sums in ``flat``, multiplied by ``scale``, into the gradients that any rank has changed.

    ``anywhere`` has the sums of the marks in host memory, if known.
    """
    flat[len(marks) :].mul_(scale)
    summed, *sums = torch.split(flat, [len(marks), *(local_tensor(parameter).numel() for parameter in parameters)])
    anywhere = summed if anywhere is None else anywhere
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


def _group_alike(parameters: Iterable[nn.Parameter], limit_bytes: int) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device whose gradients fill one buffer."""
    alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        alike[parameter.dtype, parameter.device].append(parameter)
    for group in alike.values():
        part, size = list[nn.Parameter](), 0
        for parameter in group:
            part.append(parameter)
            size += parameter.numel() * parameter.itemsize
            if size >= limit_bytes:
                yield part
                part, size = [], 0
        if part:
            yield part
