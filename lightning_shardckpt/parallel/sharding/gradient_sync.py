"""Synchronization of the gradients of one sharded module.

Gradients of sharded parameters are reduced by the backward of their gather, gradients of replicated parameters at the
end of a backward. Gradients of parameters on several pipeline stages are summed here, after all passes of a step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from weakref import WeakMethod, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.torch_modules import set_frame_callback
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.consistency import check_gradients
from lightning_shardckpt.parallel.sharding.fsdp import fsdp_modules
from lightning_shardckpt.parallel.sharding.gathered_parameters import KeptGathers
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.sharding.replicated_gradients import (
    Reduction,
    ReplicatedGradients,
    is_reduced,
    reduce_gradients,
)
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor

Shared = Sequence[tuple[nn.Parameter, dist.ProcessGroup]]


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
        self._root, self._device, self._shared, self._reduce_dtype = root, device, shared, reduce_dtype
        self._tensor_group = meshes.tensor_group if meshes.topology.tensor > 1 else None
        self._replicated = _replicated_gradients(root, meshes, frozenset(partial), reduce_dtype)
        self._stages = meshes.topology.pipeline
        self.adopted: MutableMapping[nn.Parameter, None] = WeakIdKeyDictionary()
        self._adopts = True
        _watch_for_new_parameters(root, self._adopt)
        self._fsdp = list(fsdp_modules(root))
        self.has_stage_alone = meshes.topology.world_size == meshes.topology.pipeline
        self._communicates = meshes.topology.world_size > 1 or bool(self._fsdp)
        self.is_blocked = self._checked = False
        self._before: dict[nn.Parameter, Tensor | None] = {}

    @contextmanager
    def without_adoption(self) -> Iterator[None]:
        """Inside, new parameters are not adopted: ``configure_model`` may build the module once more."""
        self._adopts = False
        try:
            yield
        finally:
            self._adopts = True

    def _adopt(self, parameters: Sequence[nn.Parameter]) -> None:
        if not self._adopts:
            return
        new = [p for p in parameters if p not in self.adopted and not is_reduced(p)]
        if new and self._stages > 1:
            raise UnsupportedCodeError(
                f"{type(self._root).__name__} got {len(new)} parameters after it was split into pipeline stages, the "
                f"first of shape {tuple(new[0].shape)}. Build them in __init__, setup or configure_model."
            )
        self.adopted.update(dict.fromkeys(new))
        self._replicated.add(new)

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Inside, `backward` only accumulates."""
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = False

    def backward(self) -> AbstractContextManager[None]:
        """Return a context for a backward; after it, gradients are synchronized, unless they only accumulate."""
        return self._synchronized() if self._communicates else nullcontext()

    @contextmanager
    def _synchronized(self) -> Iterator[None]:
        for module in self._fsdp:
            module.set_requires_gradient_sync(not self.is_blocked, recurse=False)
        with self.no_sync(self.is_blocked):
            yield
        if not self.is_blocked:
            self._check()

    def no_sync(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context in which backward passes only accumulate gradients of replicated parameters."""
        return self._replicated.no_sync(enabled)

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
        self._replicated.reduce()
        self._reduce_shared()
        self._check()

    def _reduce_shared(self) -> None:
        """Sum the gradients of shared parameters. Collective: every rank of the pipeline must call it."""
        together: dict[dist.ProcessGroup, list[nn.Parameter]] = defaultdict(list)
        for parameter, group in self._shared:
            if parameter.requires_grad:
                together[group].append(parameter)
        for group, parameters in together.items():
            reduction = Reduction(group, dtype=self._reduce_dtype)
            reduce_gradients(
                parameters, reduction, lambda p: p.grad is not None, device=self._device, asks_host=True
            )
        for parameter, before in self._before.items():
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._before.clear()

    def _check(self) -> None:
        if not self._checked and self._tensor_group is not None:
            self._checked = True
            check_gradients(self._root, self._tensor_group)

    def reset(self) -> None:
        """Discard the state of a step that raised an error and ended the run."""
        self._before.clear()
        self._replicated.drop_local()


def _replicated_gradients(
    root: nn.Module, meshes: Meshes, partial: frozenset[str], dtype: torch.dtype | None
) -> ReplicatedGradients:
    """Return the reduction of plain parameters: sums of ``partial`` over the tensor axis, means over the data axes."""
    modules: list[Any] = list(fsdp_modules(root))  # FSDPModule does not declare the methods of nn.Module
    managed = {id(p) for module in modules for p in module.parameters() if isinstance(p, DTensor)}
    managed |= {id(p) for p in root.parameters() if isinstance(p, ShardedTensor)}
    ranks = meshes.topology.data_parallel
    replicated = ReplicatedGradients(Reduction(meshes.data_parallel_group, 1 / ranks, dtype) if ranks > 1 else None)
    for name, parameter in root.named_parameters():
        if id(parameter) not in managed:
            is_partial = meshes.topology.tensor > 1 and name in partial
            replicated.add([parameter], [Reduction(meshes.tensor_group, dtype=dtype)] if is_partial else [])
    return replicated


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
