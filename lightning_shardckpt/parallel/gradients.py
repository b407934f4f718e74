"""Which gradients does FSDP2 leave unreduced, and how do they become right?

Four kinds: partial sums over the tensor axis (a norm that sees only this rank's heads), parameters outside FSDP (0-dim
ones, modules that the user cut without it), parameters that several pipeline stages hold, and DTensor gradients in
another layout than their parameter.
Each backward's contribution is reduced exactly once, also when gradients accumulate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_shardckpt.parallel.clip import local
from lightning_shardckpt.parallel.fsdp import StepModule, fsdp_modules
from lightning_shardckpt.parallel.mesh import Meshes
from lightning_shardckpt.parallel.replicas import check_gradients


@dataclass(frozen=True, slots=True)
class _Reduction:
    """One parameter's missing all-reduce: its gradient becomes the sum over ``group`` times ``scale``."""

    parameter: nn.Parameter
    group: dist.ProcessGroup
    scale: float


class GradientSync:
    """Finishes the gradients of one sharded module; one instance lives as long as its parameters.

    Args:
        step: the module's step module, in its sharded state.
        partial: names of parameters whose gradients are partial sums over the tensor axis.
        shared: parameters that several pipeline stages hold, with the group of their ranks, in the same order on all.
        keep_gathered: whether FSDP keeps parameters gathered between the backward passes that make up one.
    """

    def __init__(
        self,
        step: StepModule,
        meshes: Meshes,
        partial: Iterable[str],
        device: torch.device,
        *,
        shared: Sequence[tuple[nn.Parameter, dist.ProcessGroup]] = (),
        keep_gathered: bool = False,
    ) -> None:
        self._step = step
        self._keep_gathered = keep_gathered
        self._device = device
        self._tensor_group = meshes.tensor_group if meshes.topology.tensor > 1 else None
        self._reductions = _missing_reductions(step, meshes, frozenset(partial))
        self._reductions += [_Reduction(parameter, group, 1.0) for parameter, group in shared]
        self._held = False
        self._before: dict[nn.Parameter, Tensor | None] = {}
        self._checked = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Inside, backward passes only accumulate: nothing is communicated until one outside it."""
        self._set_held(True)
        try:
            yield
        finally:
            self._set_held(False)

    def before_backward(self, *, last: bool) -> None:
        """Call before each of several backward passes that make up one; FSDP reduces in the last."""
        for module in fsdp_modules(self._step):
            module.set_requires_gradient_sync(last and not self._held, recurse=False)
            module.set_is_last_backward(last)
            if self._keep_gathered:
                module.set_reshard_after_backward(last, recurse=False)

    def begin(self) -> None:
        """Call before a backward: sets aside gradients that are already reduced."""
        for parameter in self._parameters():
            if parameter not in self._before:
                self._before[parameter], parameter.grad = parameter.grad, None

    def finish(self) -> bool:
        """Call after a backward: reduces what came in since the last time; False if held, which does nothing.

        Collective: every rank of the world must call it.
        """
        if self._held:
            return False
        for parameter in self._step.parameters():
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
                parameter.grad = grad.redistribute(placements=parameter.placements)
        buckets: dict[tuple[dist.ProcessGroup, float, torch.dtype], list[nn.Parameter]] = defaultdict(list)
        for item in self._reductions:
            if item.parameter.requires_grad:
                buckets[item.group, item.scale, item.parameter.dtype].append(item.parameter)
        for (group, scale, _), parameters in buckets.items():
            _reduce(parameters, group, scale, self._device)
        for parameter, before in self._before.items():
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self._before.clear()
        if not self._checked and self._tensor_group is not None:
            self._checked = True
            check_gradients(self._step.module, self._tensor_group, self._device)
        return True

    def reset(self) -> None:
        """Forget a backward that did not finish."""
        self._before.clear()

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (item.parameter for item in self._reductions)

    def _set_held(self, held: bool) -> None:
        self._held = held
        for module in fsdp_modules(self._step):
            module.set_requires_gradient_sync(not held, recurse=False)


def _missing_reductions(step: StepModule, meshes: Meshes, partial: frozenset[str]) -> list[_Reduction]:
    """The all-reduces that nobody else does; a partial sum outside FSDP has two, tensor first."""
    ranks = meshes.topology.data_parallel
    managed = _managed(step)
    found = []
    seen: set[nn.Parameter] = set()
    for name, parameter in step.module.named_parameters(remove_duplicate=False):
        if parameter in seen:
            continue
        if name in partial and meshes.topology.tensor > 1:
            found.append(_Reduction(parameter, meshes.tensor_group, 1.0))
            seen.add(parameter)
        if id(parameter) not in managed and ranks > 1:
            found.append(_Reduction(parameter, meshes.data_parallel_group, 1.0 / ranks))
            seen.add(parameter)
    return found


def sharing_groups(ranks: Iterable[frozenset[int]], meshes: Meshes) -> dict[frozenset[int], dist.ProcessGroup]:
    """A group of this rank's pipeline for each set of pipeline ranks, of which this rank is in.

    Collective: every rank of the world must call it, with the same sets.
    """
    groups: dict[frozenset[int], dist.ProcessGroup] = {}
    pipelines = meshes.root.mesh.flatten(1).T.tolist()  # world ranks of each pipeline, in order of its stages
    for some in sorted(set(ranks), key=sorted):
        if len(some) == meshes.topology.pipeline:
            groups[some] = meshes.pipeline_group
        elif len(some) > 1:
            for pipeline in pipelines:
                members = [pipeline[rank] for rank in sorted(some)]
                group = dist.new_group(members)
                if dist.get_rank() in members:
                    groups[some] = group
    return groups


def _managed(step: StepModule) -> set[int]:
    """Ids of the parameters that FSDP reduces: the DTensors below any module it was applied to."""
    return {
        id(parameter)
        for module in step.modules()
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
        if isinstance(parameter, DTensor)
    }


@torch.no_grad()
def _reduce(parameters: list[nn.Parameter], group: dist.ProcessGroup, scale: float, device: torch.device) -> None:
    """All-reduce the gradients as one tensor; a gradient that no rank has stays None."""
    some_missing = any(p.grad is None for p in parameters)
    grads = [torch.zeros_like(local(p)) if p.grad is None else local(p.grad).contiguous() for p in parameters]
    present = torch.tensor([float(p.grad is not None) for p in parameters], dtype=grads[0].dtype, device=device)
    flat = torch.cat([present, *(g.detach().reshape(-1).to(device) for g in grads)])
    dist.all_reduce(flat, group=group)
    sizes = [len(parameters), *(g.numel() for g in grads)]
    anywhere, *sums = torch.split(flat, sizes)
    exist = anywhere.tolist() if some_missing else [True] * len(parameters)  # tolist waits for the device
    for parameter, exists, total in zip(parameters, exist, sums, strict=True):
        if not exists:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        target = local(parameter.grad)
        target.copy_(total.view(target.shape) * scale)
