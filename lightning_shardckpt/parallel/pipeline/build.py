"""Split a module into stages, and build the pipeline that runs it.

1. `split_into_stages`, while the module is whole.
2. `StagedModule.drop_other_stages`, before FSDP.
3. `StagedModule.build_pipeline`, last, since gates must run before all hooks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn

from lightning_shardckpt.compat.torch_modules import child_slots, compiled_call, parameter_slots
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.pipeline.absent_parameters import (
    AbsentParameters,
    copy_without_weights,
    register_placeholders,
)
from lightning_shardckpt.parallel.pipeline.gates import Gate, Gates, Stub
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder
from lightning_shardckpt.parallel.pipeline.runner import LossOf, PipelineRunner
from lightning_shardckpt.parallel.pipeline.schedule import Schedule, resolve_schedule
from lightning_shardckpt.parallel.pipeline.stages import StagePlan, Where, plan_stages
from lightning_shardckpt.parallel.sharding.fqn import is_inside, named_modules
from lightning_shardckpt.parallel.sharding.gradient_sync import GradientSync
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors.values import PIPELINES
from lightning_shardckpt.system.random_generators import GENERATORS


@dataclass(frozen=True, slots=True)
class Pipeline:
    """How layers are distributed over stages and run: the options of ``ShardedStrategy(pipeline=Pipeline(…))``.

    Attributes:
        layers: patterns that name the layers in the order in which they run; by default the layers of the largest
            list of layers whose classes repeat, or of the largest Sequential.
        split: ``"even"`` gives every stage as many layers; or the names of the first layers of all stages but the
            first.
        modules: pattern → ``"first"``, ``"last"`` or ``"every"`` stage, for modules other than layers. By default
            modules registered before the layers are on the first stage, modules after them on the last.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"interleaved_1f1b"``.
        microbatches: the number of microbatches of a batch; by default twice the number of processes, and never more
            than it has samples.
        loss: ``"batch"`` runs the rest of the step after the layers once, on the whole batch: exact for any loss.
            ``"microbatch"`` averages the losses of microbatches by their number of samples, which is equal for losses
            that are means over samples; schedules that mix forward and backward passes need it.
        stages_per_rank: the number of stages of each process.

    Raises:
        TopologyError: for a wrong value.
    """

    layers: list[str] | None = None
    split: str | list[str] = "even"
    modules: dict[str, Where] = field(default_factory=dict)
    schedule: str = "gpipe"
    microbatches: int | None = None
    loss: LossOf = "batch"
    stages_per_rank: int = 1

    def __post_init__(self) -> None:
        """Check the values that depend neither on the module nor on the number of processes."""
        for name in ("microbatches", "stages_per_rank"):
            if (size := getattr(self, name)) is not None and (not isinstance(size, int) or size < 1):
                raise TopologyError(f"Pipeline({name}=…) must be at least 1, found {size!r}")
        if self.loss not in get_args(LossOf):
            raise TopologyError(f"Pipeline(loss=…) must be one of {get_args(LossOf)}, found {self.loss!r}")

    def check(self, ranks: int) -> None:
        """Check the values for a number of processes.

        Raises:
            TopologyError: for a schedule that does not fit it or the other values.
        """
        if ranks == 1:
            return
        schedule = resolve_schedule(self.schedule, ranks, self.stages_per_rank)
        if self.loss == "batch" and schedule.interleaves_backward:
            raise TopologyError(
                f"Pipeline(schedule={self.schedule!r}) runs backward passes before the last forward pass, so it needs "
                'the losses of microbatches: set Pipeline(loss="microbatch") (exact if the loss is a mean over '
                'samples), or use Pipeline(schedule="gpipe").'
            )


@dataclass(frozen=True, slots=True)
class StagedModule:
    """A module that is split into stages.

    Attributes:
        plan: the assignment of modules to stages.
        schedule: the order of passes.
        meshes: the process groups.
        recipe: the user's options.
        modules: the layers and other modules with parameters, by clean FQN.
        copies: copies of these modules without weights, made while the module was whole.
        placeholders: by id of the whole module's parameters and buffers.
        holders: the stages of each parameter, by the name that is registered first.
    """

    plan: StagePlan
    schedule: Schedule
    meshes: Meshes
    recipe: Pipeline
    modules: dict[str, nn.Module]
    copies: dict[str, nn.Module]
    placeholders: dict[int, Placeholder]
    holders: Mapping[str, frozenset[int]]

    @property
    def _own(self) -> frozenset[int]:
        return frozenset(self.schedule.stages_of(self.meshes.pipeline_rank))

    def drop_other_stages(self, root: nn.Module) -> None:
        """Replace the modules of other stages in ``root``, under all their names, by copies without weights."""
        units = self.plan.units()
        absent = [name for name, stages in units.items() if not stages & self._own]
        present = {module for name in units.keys() - absent for module in self.modules[name].modules()}
        replacements = {self.modules[name]: self.copies[name] for name in absent}
        for name in absent:
            parts = zip(self.modules[name].modules(), self.copies[name].modules(), strict=True)
            replacements |= {part: copy for part, copy in parts if part not in present}
        for module in (*root.modules(), *replacements.values()):
            if parameter_slots(module):
                PIPELINES[module] = self.meshes.pipeline_group.group_name
        for parent in list(root.modules()):
            children = child_slots(parent)
            for name, child in children.items():
                if child in replacements:
                    children[name] = replacements[child]

    def shared_parameters(
        self, parameters: Mapping[str, nn.Parameter], names: Sequence[Sequence[str]]
    ) -> list[tuple[nn.Parameter, dist.ProcessGroup]]:
        """Return this rank's parameters that several ranks of its pipeline have, with the group of these ranks.

        Collective: every rank of the world must call it, with the ``names`` of all parameters of the whole module.
        """
        ranks = {name: frozenset(map(self.schedule.rank_of, stages)) for name, stages in self.holders.items()}
        pipelines = self.meshes.root.mesh.flatten(1).T.tolist()  # world ranks of each pipeline, in order of its stages
        groups = {frozenset(range(self.meshes.topology.pipeline)): self.meshes.pipeline_group}
        for some in sorted({some for some in ranks.values() if len(some) > 1} - groups.keys(), key=sorted):
            each = [[pipeline[rank] for rank in sorted(some)] for pipeline in pipelines]
            groups[some], _ = dist.new_subgroups_by_enumeration(each)  # type: ignore[no-untyped-call]  # torch's
        owned = {tie[0]: parameters[name] for tie in names for name in tie if name in parameters}
        return [(owned[name], groups[ranks[name]]) for name in sorted(owned) if len(ranks[name]) > 1]

    def register_absent(
        self, whole: Mapping[str, nn.Parameter], owned: Mapping[nn.Parameter, nn.Parameter]
    ) -> AbsentParameters:
        """Register placeholders for parameters of other stages, so that ``parameters()`` of the root returns all.

        Args:
            whole: the parameters of the module before the split, by name.
            owned: the parameters of this rank, by the parameter of the whole module.
        """
        present = {id(self.placeholders[id(old)]) for old in owned if id(old) in self.placeholders}
        for name, stages in self.plan.units().items():
            register_placeholders(self.copies[name], () if stages & self._own else present)
        names: dict[nn.Parameter, str] = {}
        for name, old in whole.items():
            names.setdefault(old, clean_fqn(name))
        parameters = [(name, owned.get(old), self.placeholders.get(id(old))) for old, name in names.items()]
        return AbsentParameters(parameters)

    def build_pipeline(
        self, root: nn.Module, gradients: GradientSync, absent: AbsentParameters, device: torch.device
    ) -> PipelineRunner:
        """Add gates to all modules, and return the pipeline that runs their steps."""
        gates = Gates(self.plan.layers)
        places: dict[str, int | Where] = {name: index for index, name in enumerate(self.plan.layers)}
        places |= self.plan.others
        for name, stages in self.plan.units().items():
            owned = bool(stages & self._own)
            module = self.modules[name] if owned else self.copies[name]
            Gate(gates, module, name, places[name], Stub(self.copies[name], name), owned=owned)
        staged = [m for name, m in root.named_modules() if is_inside(clean_fqn(name), places)]
        topology = self.meshes.topology
        return PipelineRunner(
            root,
            gates,
            self.plan,
            self.schedule,
            self.meshes,
            device,
            gradients,
            absent,
            microbatches=self.recipe.microbatches or 2 * topology.pipeline,
            loss_of=self.recipe.loss,
            staged=staged,
        )


def refuse_stages(root: nn.Module) -> None:
    """Refuse a module around one that was split into pipeline stages.

    Raises:
        UnsupportedCodeError: naming the module inside.
    """
    for name, module in root.named_modules():
        if module is not root and module in PIPELINES:
            raise UnsupportedCodeError(
                f"{clean_fqn(name)} of {type(root).__name__} was split into pipeline stages before, as a part of "
                "another module, so that this process has only some of its layers. Build it anew, and load a "
                "checkpoint of the other module (pretrained=)."
            )


def split_into_stages(root: nn.Module, meshes: Meshes, recipe: Pipeline, device: torch.device) -> StagedModule | None:
    """Plan the stages of ``root``, which is not changed; None for a pipeline of one rank.

    Raises:
        TopologyError: if the module has too few layers, or ``recipe`` doesn't fit.
        UnsupportedCodeError: if the module cannot run in a pipeline.
    """
    ranks = meshes.topology.pipeline
    if ranks == 1:
        return None
    schedule = resolve_schedule(recipe.schedule, ranks, recipe.stages_per_rank)
    plan = plan_stages(root, schedule.stages, layers=recipe.layers, split=recipe.split, modules=recipe.modules)
    modules = named_modules(root)
    units = {name: modules[name] for name in plan.units()}
    _refuse_unsupported(root, plan)
    placeholders: dict[int, Placeholder] = {}
    copies = {}
    for name, module in units.items():
        others = set(root.modules()).difference(module.modules())
        copies[name] = copy_without_weights(module, name, device, placeholders, others)
    # Of modules, not of names: a module may be registered under several.
    inside = {module for unit in units.values() for module in unit.modules()}
    outside = [p for m in root.modules() if m not in inside for p in m.parameters(recurse=False)]
    stages_of = dict.fromkeys(outside, frozenset(range(plan.stages)))
    for name, stages in plan.units().items():
        for parameter in units[name].parameters():
            stages_of[parameter] = stages_of.get(parameter, frozenset()) | stages
    holders = {name: stages_of[parameter] for name, parameter in root.named_parameters()}
    return StagedModule(plan, schedule, meshes, recipe, units, copies, placeholders, holders)


def _refuse_unsupported(root: nn.Module, plan: StagePlan) -> None:
    for name, module in root.named_modules():
        clean = clean_fqn(name)
        compiled = type(module).__name__ == "OptimizedModule" or (clean and compiled_call(module) is not None)
        if compiled and any(layer.startswith(f"{clean}.") or not clean for layer in plan.layers):
            raise UnsupportedCodeError(
                f"{clean or 'the module'} is compiled as a whole, with all layers of the pipeline inside. Compile the "
                "layers instead."
            )
        if type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft."):
            raise UnsupportedCodeError(
                f"{clean} is an adapter of PEFT for single parameters (target_parameters), which adds and removes a "
                "parametrization in each forward. A pipeline stage would undo that. Use target_modules, or "
                "pipeline_parallel_size=1."
            )
        generator = next((key for key, value in vars(module).items() if _holds_generator(value)), None)
        if generator is not None:
            raise UnsupportedCodeError(
                f"{generator} of {type(module).__name__} is or holds a random generator. In a pipeline a step runs "
                "several times, on parts of the batch: use the global generators, draw in the dataloader, or use "
                "pipeline_parallel_size=1."
            )
        config: Any = getattr(module, "config", None)
        if getattr(config, "output_router_logits", False):
            raise UnsupportedCodeError(
                f"{clean or type(module).__name__} collects the router logits of all layers for its loss "
                "(config.output_router_logits), which are on different stages of a pipeline. Switch that off."
            )


def _holds_generator(value: Any) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(item, GENERATORS) for item in items)
