"""Synchronization of the gradients of one sharded module.

Gradients of sharded parameters are reduced by the backward of their gather. Gradients of replicated parameters are
reduced when a backward ends, many in one buffer; until then, user code may not use them. Two kinds are reduced
immediately, one by one: gradients of parameters with hooks of the user, which must get the gradient of all batches, and
gradients that ``torch.autograd.grad`` returns or that are differentiated. Gradients of parameters on several pipeline
stages are summed after all passes of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
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
from lightning_shardckpt.compat.torch_autograd import after_backward, returns_gradient_of
from lightning_shardckpt.compat.torch_modules import set_frame_callback
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    without_torch_function,
)
from lightning_shardckpt.distributed.host_numbers import gather_numbers, on_device, wait_for
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.consistency import check_gradients
from lightning_shardckpt.parallel.sharding.fsdp import fsdp_modules
from lightning_shardckpt.parallel.sharding.gathered_parameters import KeptGathers
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors.gather import mark_part, reduce_part, refuse_batched, refuse_sparse
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of, name_of
from lightning_shardckpt.parallel.tensors.placement import describe
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor
from lightning_shardckpt.parallel.tensors.values import sharding_of


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


Shared = Sequence[tuple[nn.Parameter, dist.ProcessGroup]]

_BUFFER_BYTES = 25 << 20  # as in DistributedDataParallel
_reductions: MutableMapping[Tensor, list[Reduction]] = WeakIdKeyDictionary()
"""The reductions of a parameter's gradients, one after the other: over tensor-parallel ranks, over replicas."""
_handles: MutableMapping[Tensor, tuple[RemovableHandle, ...]] = WeakIdKeyDictionary()
"""The hooks of `GradientSync` on a parameter; another instance that takes it over removes them."""


class GradientSync:
    """Synchronizes the gradients of one sharded module; one instance lives as long as its parameters.

    Args:
        root: the sharded module.
        meshes: the device meshes.
        device: where gradients of ``shared`` are summed.
        partial: names of plain parameters whose gradients are partial sums over the tensor axis.
        reduce_dtype: the dtype of the sums; None for the dtype of the gradients, but at least float32.
        shared: parameters on several pipeline stages, with the group of their ranks, in the same order on all ranks.

    Attributes:
        adopted: plain parameters that the module got after it was sharded.
        has_stage_alone: whether each pipeline stage is one rank, so that `finish_kept` does not communicate.
        is_blocked: whether `backward` only accumulates.
    """

    def __init__(
        self,
        root: nn.Module,
        meshes: Meshes,
        device: torch.device,
        *,
        partial: Collection[str] = (),
        reduce_dtype: torch.dtype | None = None,
        shared: Shared = (),
    ) -> None:
        topology = meshes.topology
        self._root, self._device, self._shared, self._dtype = root, device, shared, reduce_dtype
        self._tensor_group = meshes.tensor_group if topology.tensor > 1 else None
        self._mean: Reduction | None = None
        if (ranks := topology.data_parallel) > 1:
            self._mean = Reduction(meshes.data_parallel_group, 1 / ranks, reduce_dtype)
        self._fsdp: list[Any] = list(fsdp_modules(root))  # FSDPModule does not declare the methods of nn.Module
        self._replicated, self._changed = list[nn.Parameter](), set[int]()
        self._queued: Callable[[], object] = lambda: None
        """A weak reference to the function that the running backward calls at its end."""
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self.adopted: MutableMapping[nn.Parameter, None] = WeakIdKeyDictionary()
        self._adopts, self._checked = True, False
        self.is_blocked = self._accumulates = False
        self._is_pipelined = topology.pipeline > 1
        self.has_stage_alone = topology.world_size == topology.pipeline
        self._reduce_own_parameters(frozenset(partial))
        _watch_for_new_parameters(root, self._adopt)

    # --- replicated parameters ---

    def _reduce_own_parameters(self, partial: frozenset[str]) -> None:
        managed = {id(p) for module in self._fsdp for p in module.parameters() if isinstance(p, DTensor)}
        for name, parameter in self._root.named_parameters():
            if isinstance(parameter, ShardedTensor):
                self._keep_part(parameter)
            elif id(parameter) not in managed:
                group = self._tensor_group if name in partial else None
                self._reduce_later(parameter, [] if group is None else [Reduction(group, dtype=self._dtype)])

    def _keep_part(self, leaf: Any) -> None:
        """Let a parameter that only a tensor-parallel plan shards compute by itself in forwards."""
        sharding = sharding_of(leaf)
        if sharding.batches == 1 and not self._is_pipelined and _is_trainable(leaf):
            mark_part(leaf)
            with _trained(leaf), without_torch_function():
                handle = leaf.register_hook(partial(reduce_part, leaf.placements, describe(leaf)))
            _put_first(gradient_hooks(leaf), handle)

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
        leaf: Any = parameter  # its hooks are untyped
        with _trained(leaf):
            before = leaf.register_hook(partial(self._on_gradient, ref(parameter), sums))
            after = leaf.register_post_accumulate_grad_hook(self._accumulated)
        _put_first(gradient_hooks(leaf), before)
        _put_first(accumulation_hooks(leaf), after)
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
        if not self._accumulates and self._queued() is None:
            finish = partial(self._finish)
            self._queued = ref(finish)
            after_backward(finish)

    def _finish(self) -> None:
        if not self._accumulates:
            self._reduce_replicated()

    def _reduce_replicated(self) -> None:
        """Reduce the gradients that any rank has changed. Collective: every data-parallel rank must call it."""
        if self._mean is not None:
            reduce_gradients(self._replicated, self._mean, lambda p: id(p) in self._changed and p.grad is not None)
            self._changed.clear()

    # --- parameters that the module gets later ---

    @contextmanager
    def without_adoption(self) -> Iterator[None]:
        """Inside, new parameters are not adopted: ``configure_model`` may build the module once more."""
        self._adopts = False
        try:
            yield
        finally:
            self._adopts = True

    def _adopt(self, parameters: Sequence[nn.Parameter]) -> None:
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
    def blocked(self) -> Iterator[None]:
        """Inside, `backward` only accumulates."""
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = False

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Inside, backward passes only accumulate gradients of replicated parameters, or don't if not ``enabled``."""
        before, self._accumulates = self._accumulates, enabled
        try:
            yield
        finally:
            self._accumulates = before

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Inside, a backward may run; after it, gradients are synchronized, unless they only accumulate."""
        for module in self._fsdp:
            module.set_requires_gradient_sync(not self.is_blocked, recurse=False)
        with self.no_sync(self.is_blocked):
            yield
        if not self.is_blocked:
            self._check()

    def reset(self) -> None:
        """Discard the state of a step that raised an error and ended the run, and gradients that are not reduced."""
        self._before.clear()
        for parameter in self._replicated:
            if type(parameter.grad) is _LocalGradient:
                parameter.grad = None

    def _check(self) -> None:
        if not self._checked and self._tensor_group is not None:
            self._checked = True
            check_gradients(self._root, self._tensor_group)

    # --- the passes of a pipeline ---

    def begin_passes(self) -> None:
        """Set aside the reduced gradients of shared parameters before the passes of a pipeline step."""
        for parameter, _ in self._shared:
            if parameter not in self._before:
                self._before[parameter], parameter.grad = parameter.grad, None

    def finish_kept(self, kept: KeptGathers) -> None:
        """Reduce the gradients that passes within `no_sync` have accumulated in ``kept``.

        Collective: every rank of a pipeline stage must call it.
        """
        with self.no_sync():
            kept.reduce()

    def has_earlier(self, parameter: nn.Parameter) -> bool:
        """Return whether a gradient of the parameter is set aside."""
        return self._before.get(parameter) is not None

    def finish_passes(self) -> None:
        """Synchronize gradients after the backward passes of a pipeline step, which ran within `no_sync`, or of a run.

        Collective: every rank of the world must call it.
        """
        if self.is_blocked:
            return
        self._reduce_replicated()
        together: dict[dist.ProcessGroup, list[nn.Parameter]] = defaultdict(list)
        for parameter, group in self._shared:
            if parameter.requires_grad:
                together[group].append(parameter)
        for group, parameters in together.items():
            reduction = Reduction(group, dtype=self._dtype)
            reduce_gradients(parameters, reduction, lambda p: p.grad is not None, device=self._device, asks_host=True)
        for parameter, before in self._before.items():
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._before.clear()
        self._check()


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


def _is_trainable(parameter: Tensor) -> bool:
    """Return whether a parameter can have gradients; quantized weights can't."""
    return parameter.is_floating_point() or parameter.is_complex()


def _put_first(hooks: dict[int, Any] | None, handle: RemovableHandle) -> None:
    """Call a registered hook before the user's, so that these get its result."""
    assert hooks is not None  # one was registered
    own, others = hooks.pop(handle.id), dict(hooks)
    hooks.clear()  # torch calls hooks in the order of insertion, not of the OrderedDict
    hooks.update({handle.id: own, **others})


def _count_hooks(parameter: nn.Parameter) -> int:
    """Return the number of hooks on the gradient of a parameter, without those of `GradientSync`."""
    every = len(gradient_hooks(parameter) or ()) + len(accumulation_hooks(parameter) or ())
    return every - len(_handles.get(parameter, ()))


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


def build_sharing_groups(ranks: Iterable[frozenset[int]], meshes: Meshes) -> dict[frozenset[int], dist.ProcessGroup]:
    """Return a process group for each set of pipeline ranks that this rank is in.

    Collective: every rank of the world must call it, with the same sets.
    """
    groups: dict[frozenset[int], dist.ProcessGroup] = {}
    pipelines = meshes.root.mesh.flatten(1).T.tolist()  # world ranks of each pipeline, in order of its stages
    for pipeline_ranks in sorted(set(ranks), key=sorted):
        if len(pipeline_ranks) == meshes.topology.pipeline:
            groups[pipeline_ranks] = meshes.pipeline_group
        elif len(pipeline_ranks) > 1:
            for pipeline in pipelines:
                members = [pipeline[rank] for rank in sorted(pipeline_ranks)]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    groups[pipeline_ranks] = group
    return groups


# ── parameters that a module gets after it was sharded ──────────────────────────────────────────────────────────────


def _watch_for_new_parameters(root: nn.Module, adopt: Callable[[Sequence[nn.Parameter]], None]) -> None:
    """Call ``adopt`` with the plain parameters that modules inside ``root`` get from now on, such as an added head.

    Ends with the object of the method.
    """
    watched, method = WeakSet(root.modules()), WeakMethod(adopt)

    def is_watched(module: nn.Module) -> bool:
        compiler = set_frame_callback(None)  # torch.compile can't trace a WeakSet
        try:
            return module in watched
        finally:
            set_frame_callback(compiler)

    def on_parameter(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        if type(parameter) is nn.Parameter and is_watched(module) and (call := method()) is not None:
            call([parameter])

    def on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is not None and is_watched(module) and (call := method()) is not None:
            watched.update(child.modules())
            call([p for p in child.parameters() if type(p) is nn.Parameter])

    register_module_parameter_registration_hook(on_parameter)
    register_module_module_registration_hook(on_module)
