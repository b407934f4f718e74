"""What would be wrong, silently, when a batch goes through the layers in microbatches?"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.names import clean_fqn, inside, own_parameters
from lightning_shardckpt.parallel.stages import StagePlan
from lightning_shardckpt.parallel.step import Step


def _hooks(module: nn.Module) -> frozenset[int]:
    return frozenset((*module._forward_hooks, *module._backward_hooks, *module._backward_pre_hooks))


class Soundness:
    """Checks of the steps of one module. All give the same answer on all ranks of a pipeline, or are agreed upon.

    Args:
        root: the module, cut into stages.
        plan: its stages.
        rest_runs_once: whether what comes behind the layers sees the whole batch.
    """

    def __init__(self, root: nn.Module, plan: StagePlan, *, rest_runs_once: bool) -> None:
        self._root = root
        self._whole = [unit for unit, where in plan.others.items() if where == "last" and rest_runs_once]
        self._buffers = [
            (f"{name}.{key}", module, key)
            for name, module in root.named_modules()
            if len(plan.holders(clean_fqn(name))) == 1 and not self._sees_whole(clean_fqn(name))
            for key in module._buffers
        ]
        units = plan.units()
        self._parts = [
            (name, module, _hooks(module))
            for name, module in root.named_modules()
            if inside(clean_fqn(name), units) and not self._sees_whole(clean_fqn(name))
        ]
        self._norms = [
            (name, module)
            for name, module in root.named_modules()
            if isinstance(module, _BatchNorm) and not self._sees_whole(clean_fqn(name))
        ]

    def check_start(self, now: Step, *, whole: bool) -> None:
        """Before the passes; ``whole``: whether the last stage runs whole steps on microbatches.

        Raises:
            TopologyError: for random numbers that passes would draw differently, and for batch norms.
        """
        self._check_hooks()
        if len(now.batches) == 1:
            return
        if now.draws and not whole:
            raise TopologyError(
                f"{now.job.name} draws random numbers outside of modules before its layers. Microbatches and the rest "
                "of the step, which sees the whole batch, would draw different ones: draw them in the dataloader or "
                'inside a module, or use pipeline_loss="microbatch" (for training) or pipeline_microbatches=1.'
            )
        if now.job.train and any(module.training for _, module in self._norms):
            raise TopologyError(
                f"{self._norms[0][0]} is a batch norm: its statistics would be those of microbatches. Use another "
                "norm, or pipeline_microbatches=1."
            )

    def _check_hooks(self) -> None:
        hooked = [name for name, module, before in self._parts if _hooks(module) - before]
        if torch.nn.modules.module._has_any_global_hook():  # type: ignore[no-untyped-call]  # torch's
            hooked.append("every module (torch.nn.modules.module.register_module_forward_hook, …)")
        if hooked:
            raise TopologyError(
                f"{hooked[0]} got a forward or backward hook. In a pipeline layers, and what comes before them, run on "
                "microbatches, and those of other stages not at all: what the hook sees would not be what it expects. "
                "Remove it."
            )

    def buffer_marks(self) -> dict[str, tuple[int, int]]:
        """Which buffers see microbatches, with marks that change when their values do."""
        buffers = [(name, module._buffers.get(key)) for name, module, key in self._buffers]
        return {name: (id(buffer), buffer._version) for name, buffer in buffers if buffer is not None}

    def check_buffers(self, now: Step, before: dict[str, tuple[int, int]]) -> None:
        """After the passes.

        Raises:
            TopologyError: for a buffer of a layer that training changes, such as an average of activations.
        """
        changed = [name for name, mark in self.buffer_marks().items() if before.get(name) != mark]
        if changed and now.job.train and len(now.batches) > 1:
            raise TopologyError(
                f"{changed[0]} is a buffer that training changes in a layer or before the layers, where it sees "
                "microbatches, not batches. Use pipeline_microbatches=1, or keep such state out of these modules."
            )

    @torch.no_grad()
    def parameter_marks(self) -> Tensor:
        """A number for each parameter of this rank that changes when its values do."""
        parts = [p._local_tensor if isinstance(p, DTensor) else p.data for _, p in own_parameters(self._root)]
        kinds = [torch.complex128 if part.is_complex() else torch.float64 for part in parts]
        sums = [part.sum(dtype=kind).abs() for part, kind in zip(parts, kinds, strict=True)]
        return torch.stack(sums).nan_to_num() if sums else torch.zeros(0)

    def check_parameters(self, now: Step, before: Tensor) -> None:
        """After the passes.

        Raises:
            TopologyError: for a parameter that the step itself changes.
        """
        differ = (self.parameter_marks() != before).tolist()
        changed = [name for (name, _), differs in zip(own_parameters(self._root), differ, strict=True) if differs]
        if changed:
            raise TopologyError(
                f"{now.job.name} changes {changed[0]}. In a pipeline, parts of a step run once for each microbatch, "
                "and more often, so it would change more than once. Change parameters in a hook between steps, such as "
                "on_train_batch_start."
            )

    def _sees_whole(self, name: str) -> bool:
        return any(name == unit or name.startswith(f"{unit}.") for unit in self._whole)
