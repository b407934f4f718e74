"""Synchronization of the gradients of one sharded module.

Gradients of sharded parameters are reduced by the backward of their gather. Gradients of replicated parameters are
reduced when a backward ends, many in one buffer; until then, user code may not use them. Those that user code gets
earlier, in hooks or by ``torch.autograd.grad``, are reduced immediately, one by one. Gradients of parameters on several
pipeline stages are summed after all passes of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakMethod, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import accumulates_gradient_of, after_backward
from lightning_shardckpt.compat.torch_modules import set_frame_callback
from lightning_shardckpt.compat.torch_tensors import accumulation_hooks, gradient_hooks, without_torch_function
from lightning_shardckpt.distributed.host_numbers import gather_numbers, on_device, reduce_tensor
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.consistency import check_gradients
from lightning_shardckpt.parallel.sharding.fsdp import fsdp_modules
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors.operations import handler_of, name_of, run_plain
from lightning_shardckpt.parallel.tensors.placement import describe, sharding_of
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import PART, reduce_part, refuse_batched, refuse_sparse

# ── reductions ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Reduction(NamedTuple):
    """A sum over ``group``, times ``scale``. A dtype of None is that of the gradients, but at least float32."""

    group: dist.ProcessGroup
    scale: float
    dtype: torch.dtype | None

    def total(self, gradient: Tensor) -> Tensor:
        """Return the sum of a gradient over the ranks, in the dtype of the sums. Collective; reuses the memory."""
        if gradient.is_floating_point():
            gradient = gradient.to(self.dtype or (torch.float32 if gradient.itemsize < 4 else gradient.dtype))
        return reduce_tensor(gradient, self.group, None)


class _Reduce(torch.autograd.Function):
    """Reduces a gradient immediately. Its backward is the same, because gradients belong to a mean."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, reduction: Reduction) -> Tensor:
        ctx.reduction = reduction
        refuse_batched(gradient)
        reduced = gradient.clone(memory_format=torch.contiguous_format)
        local_tensor(reduced).copy_(reduction.total(local_tensor(reduced)).mul_(reduction.scale))
        return reduced

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _reduce_now([ctx.reduction], gradient), None


def _reduce_now(reductions: Iterable[Reduction], gradient: Tensor) -> Tensor:
    for reduction in reductions:
        gradient = _Reduce.apply(gradient, reduction)  # type: ignore[no-untyped-call]  # torch's
    return gradient


class _LocalGradient(Tensor):
    """A gradient with the batches of this rank; one process would have the gradient of all."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if handler_of(func) is not run_plain and name_of(func) not in ("zero_", "_foreach_zero_"):
            raise UnsupportedCodeError(
                f"{name_of(func)} of the gradient of a replicated parameter, which has the batches of this rank alone, "
                "in a backward or while gradients accumulate. Use it in on_before_optimizer_step, or in a hook of the "
                "parameter (register_hook)."
            )
        return run_plain(func, args, kwargs or {})


_BUFFER_BYTES = 25 << 20  # as in DistributedDataParallel


@torch.no_grad()
def _reduce_together(
    parameters: Iterable[nn.Parameter], reduction: Reduction, changed: Collection[int] | None, device: torch.device
) -> None:
    """Reduce the gradients of trained parameters on ``device``, many in one buffer.

    A gradient that no rank has changed stays as it is, even if None; one that only other ranks have is created.
    ``changed`` has the ids of parameters to whose gradients this rank contributes. If it is None, to those that exist;
    since ranks usually differ in these, they tell one another over gloo, and no host waits for its device.

    Collective: every rank of the group must call it, with the same parameters in the same order.
    """
    for alike in _buffers(parameter for parameter in parameters if parameter.requires_grad):
        marks = [float(p.grad is not None and (changed is None or id(p) in changed)) for p in alike]
        with without_torch_function():
            pieces = [
                local_tensor(torch.zeros_like(p) if p.grad is None else p.grad).detach().reshape(-1) for p in alike
            ]
            flat = torch.cat([*pieces, on_device(marks, alike[0].dtype, alike[0].device)]).to(device)
        *sums, anywhere = torch.split(reduction.total(flat), [*map(len, pieces), len(marks)])
        if changed is None:
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


def _buffers(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Yield parameters of one dtype and device whose gradients fill one buffer."""
    alike, sizes = defaultdict[Any, list[nn.Parameter]](list), defaultdict[Any, int](int)
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        alike[key].append(parameter)
        sizes[key] += parameter.numel() * parameter.itemsize
        if sizes[key] >= _BUFFER_BYTES:
            yield alike.pop(key)
            sizes[key] = 0
    yield from alike.values()


# ── the gradients of a module ───────────────────────────────────────────────────────────────────────────────────────


_reductions: MutableMapping[Tensor, list[Reduction]] = WeakIdKeyDictionary()  # one after the other
_handles: MutableMapping[Tensor, list[RemovableHandle]] = WeakIdKeyDictionary()
"""The hooks of `GradientSync` on a parameter; another instance that takes it over removes them."""


class GradientSync:
    """Synchronizes the gradients of one sharded module on a device; one instance lives as long as its parameters.

    Args:
        partial_names: names of plain parameters whose gradients are partial sums over the tensor axis.
        shared: parameters on several pipeline stages, with the group of their ranks, in the same order on all ranks.

    Attributes:
        adopted: plain parameters that the module got after it was sharded.
        set_aside: gradients of shared parameters from before the passes of a pipeline step.
        has_stage_alone: whether each pipeline stage is one rank, so that only `finish_passes` communicates.
        is_blocked: whether a backward only accumulates.
    """

    def __init__(
        self,
        root: nn.Module,
        meshes: Meshes,
        device: torch.device,
        *,
        partial_names: Collection[str] = (),
        reduce_dtype: torch.dtype | None = None,
        shared: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
    ) -> None:
        topology = meshes.topology
        self._root, self._device, self._shared, self._dtype = root, device, shared, reduce_dtype
        self._tensor_group, ranks = meshes.tensor_group if topology.tensor > 1 else None, topology.data_parallel
        self._mean = Reduction(meshes.data_parallel_group, 1 / ranks, reduce_dtype) if ranks > 1 else None
        self._fsdp: list[Any] = list(fsdp_modules(root))  # FSDPModule does not declare the methods of nn.Module
        self._replicated, self._changed = list[nn.Parameter](), set[int]()
        self._queued: Callable[[], object] = lambda: None  # a weak reference to what the running backward calls last
        self.set_aside: dict[nn.Parameter, Tensor | None] = {}
        self.adopted: MutableMapping[nn.Parameter, None] = WeakIdKeyDictionary()
        self._adopts, self._checked, self.is_blocked = True, False, False
        self._is_pipelined = topology.pipeline > 1
        self.has_stage_alone = topology.world_size == topology.pipeline
        managed = {id(p) for module in self._fsdp for p in module.parameters() if isinstance(p, DTensor)}
        for name, parameter in root.named_parameters():
            if isinstance(parameter, ShardedTensor):
                if sharding_of(parameter).batches == 1 and not self._is_pipelined and _is_trainable(parameter):
                    parameter.__dict__[PART] = True  # it computes by itself in forwards
                    _hook(parameter, partial(reduce_part, parameter.placements, describe(parameter)))
            elif id(parameter) not in managed:
                group = self._tensor_group if name in partial_names else None
                self._reduce_later(parameter, [] if group is None else [Reduction(group, 1, reduce_dtype)])
        _watch_for_new_parameters(root, self._adopt)

    # --- replicated parameters ---

    def _reduce_later(self, parameter: nn.Parameter, sums: Sequence[Reduction] = ()) -> None:
        """Reduce the gradients of a parameter: plain, or a DTensor of a tensor-parallel plan.

        All ranks must call it in the same order. ``sums`` are immediate reductions of partial sums, before the mean.
        """
        reductions = [*sums, *([] if self._mean is None else [self._mean])]
        if not reductions or not _is_trainable(parameter):
            return
        _reductions[parameter] = reductions
        self._replicated.append(parameter)
        for handle in _handles.pop(parameter, ()):
            handle.remove()
        _handles[parameter] = _hook(parameter, partial(self._on_gradient, ref(parameter), sums), self._accumulated)

    def _on_gradient(self, reference: ref[nn.Parameter], sums: Sequence[Reduction], gradient: Tensor) -> Tensor:
        parameter: Any = reference()
        refuse_sparse(gradient)
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):  # such as a partial sum
            gradient = gradient.redistribute(placements=parameter.placements)
        hooks = len(gradient_hooks(parameter) or ()) + len(accumulation_hooks(parameter) or ())
        has_hooks = hooks > len(_handles.get(parameter, ()))
        if self._mean is None or torch.is_grad_enabled() or has_hooks or not accumulates_gradient_of(parameter):
            return _reduce_now(_reductions[parameter], gradient)
        self._changed.add(id(parameter))
        return _reduce_now(sums, gradient)

    def _accumulated(self, parameter: Tensor) -> None:
        if id(parameter) in self._changed:
            if type(parameter.grad) is Tensor:
                parameter.grad.__class__ = _LocalGradient
            if not self.is_blocked and self._queued() is None:
                finish = partial(self._reduce_replicated)  # which the engine drops if the backward fails
                self._queued = ref(finish)
                after_backward(finish)

    def _reduce_replicated(self) -> None:
        """Reduce the gradients that any rank has changed. Collective: every data-parallel rank must call it."""
        if self._mean is not None and not self.is_blocked:
            changed, self._changed = self._changed, set()
            _reduce_together(self._replicated, self._mean, changed, self._device)

    # --- parameters that the module gets later ---

    @contextmanager
    def without_adoption(self) -> Iterator[None]:
        """Inside, new parameters are not adopted: ``configure_model`` may build the module once more."""
        self._adopts = False
        try:
            yield
        finally:
            self._adopts = True

    def _adopt(self, parameters: Iterable[nn.Parameter]) -> None:
        new = [p for p in parameters if self._adopts and p not in self.adopted and p not in _reductions]
        if new and self._is_pipelined:
            raise UnsupportedCodeError(
                f"{type(self._root).__name__} got {len(new)} parameters after it was split into pipeline stages, the "
                f"first of shape {tuple(new[0].shape)}. Build them in __init__, setup or configure_model."
            )
        for parameter in new:
            self.adopted[parameter] = None
            self._reduce_later(parameter)

    # --- a backward ---

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes only accumulate gradients, and reduce none of replicated parameters."""
        before, self.is_blocked = self.is_blocked, True
        try:
            yield
        finally:
            self.is_blocked = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, a backward may run; after it, gradients are synchronized, unless they only accumulate."""
        for module in self._fsdp:
            module.set_requires_gradient_sync(not self.is_blocked, recurse=False)
        yield
        self._check()

    def reset(self) -> None:
        """Discard the state of a step that raised an error and ended the run, and gradients that are not reduced."""
        self.set_aside.clear()
        for parameter in self._replicated:
            if type(parameter.grad) is _LocalGradient:
                parameter.grad = None

    def _check(self) -> None:
        """Compare the gradients of replicated parameters over tensor-parallel ranks, after the first whole backward."""
        if not self._checked and not self.is_blocked and self._tensor_group is not None:
            self._checked = True
            check_gradients(self._root, self._tensor_group)

    # --- the passes of a pipeline ---

    def begin_passes(self) -> None:
        """Set aside the reduced gradients of shared parameters before the passes of a pipeline step."""
        for parameter, _ in self._shared:
            if parameter not in self.set_aside:
                self.set_aside[parameter], parameter.grad = parameter.grad, None

    def finish_passes(self) -> None:
        """Synchronize gradients after the backward passes of a pipeline step, which ran within `no_sync`, or of a run.

        Collective: every rank of the world must call it.
        """
        if self.is_blocked:
            return
        self._reduce_replicated()
        for group in dict.fromkeys(group for _, group in self._shared):
            shared, reduction = [p for p, of in self._shared if of is group], Reduction(group, 1, self._dtype)
            _reduce_together(shared, reduction, None, self._device)
        for parameter, before in self.set_aside.items():
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self.set_aside.clear()
        self._check()


def average_gradients_of_copy(parameter: nn.Parameter, copied: nn.Parameter) -> None:
    """Reduce the gradients of a deep copy as those of the original, immediately: other ranks may have no copy."""
    if parameter in _reductions:
        _hook(copied, partial(_reduce_now, _reductions[parameter]))
        _reductions[copied] = _reductions[parameter]


def _is_trainable(parameter: Tensor) -> bool:
    """Return whether a parameter can have gradients; quantized weights can't."""
    return parameter.is_floating_point() or parameter.is_complex()


def _hook(leaf: Any, *hooks: Callable[[Tensor], Any]) -> list[RemovableHandle]:
    """Register a gradient hook, and one for after its accumulation, before the user's, which get their results."""
    before = leaf.requires_grad  # a frozen leaf may be trained later
    with without_torch_function():
        leaf.requires_grad_(True)
        registers = leaf.register_hook, leaf.register_post_accumulate_grad_hook
        handles = [register(hook) for register, hook in zip(registers, hooks, strict=False)]
        leaf.requires_grad_(before)
    for registered, handle in zip((gradient_hooks(leaf), accumulation_hooks(leaf)), handles, strict=False):
        assert registered is not None
        own, others = registered.pop(handle.id), dict(registered)
        registered.clear()  # torch calls hooks in the order of insertion, not of the OrderedDict
        registered.update({handle.id: own, **others})
    return handles


def _watch_for_new_parameters(root: nn.Module, adopt: Callable[[Iterable[nn.Parameter]], None]) -> None:
    """Call the method ``adopt`` with the plain parameters that modules inside ``root`` get, while its object lives."""
    watched, method = WeakSet(root.modules()), WeakMethod(adopt)

    def on_change(module: nn.Module, name: str, value: nn.Module | Tensor | None) -> None:
        compiler = set_frame_callback(None)  # torch.compile can't trace a WeakSet
        try:
            call = method() if module in watched else None
        finally:
            set_frame_callback(compiler)
        if call is not None and isinstance(value, nn.Module):
            watched.update(value.modules())
            call(p for p in value.parameters() if type(p) is nn.Parameter)
        elif call is not None and type(value) is nn.Parameter:
            call([value])

    register_module_parameter_registration_hook(on_change)
    register_module_module_registration_hook(on_change)
