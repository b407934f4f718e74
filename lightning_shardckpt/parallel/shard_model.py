"""Sharding of an ordinary module over the mesh: all steps, in call order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import buffer_slots, compiled_from, convert_tensors, parameter_slots
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.first_values.initializers import Initialization
from lightning_shardckpt.parallel.first_values.one_rank import Build, CopySlice, send_values, share_tensors
from lightning_shardckpt.parallel.pipeline.build import Pipeline, StagedModule, refuse_stages, split_into_stages
from lightning_shardckpt.parallel.pipeline.runner import PipelineRunner
from lightning_shardckpt.parallel.sharding.fqn import (
    module_names,
    named_modules,
    own_parameters,
    parameter_names,
    select_modules,
    tied_state,
)
from lightning_shardckpt.parallel.sharding.fsdp import (
    FSDP,
    Engine,
    Unit,
    choose_units,
    fsdp_modules,
    reshard,
    units_around,
)
from lightning_shardckpt.parallel.sharding.gradient_sync import GradientSync
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.sharding.replaced_functions import refuse_node_hooks, replace_functions
from lightning_shardckpt.parallel.sharding.tensor_parallel import Plan, TensorPlan, apply_plan, resolve_plan
from lightning_shardckpt.parallel.sharding.units import make_unit, refuse_nested_tensors
from lightning_shardckpt.parallel.tensors.operations import keep_gathered
from lightning_shardckpt.parallel.tensors.parameters import follow_parameters, retire_parameter, shard_parameters
from lightning_shardckpt.parallel.tensors.placement import peers_of


@dataclass(frozen=True, slots=True)
class Recipe:
    """Instructions for sharding a module, from the arguments of ``ShardedStrategy`` with the same names.

    Attributes:
        autocast_dtype: the dtype of autocast in steps, from the precision plugin; None without autocast.
    """

    tensor_parallel_plan: Plan = "auto"
    fsdp: FSDP = field(default_factory=FSDP)
    pipeline: Pipeline = field(default_factory=Pipeline)
    autocast_dtype: torch.dtype | None = None

    @property
    def reduce_dtype(self) -> torch.dtype | None:
        """The dtype in which gradients are reduced, if the user has chosen one."""
        return getattr(torch, self.fsdp.reduce_dtype) if self.fsdp.reduce_dtype else None


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A sharded module.

    Attributes:
        meshes: the device meshes.
        root: the module.
        gradients: synchronizes its gradients.
        pipeline: runs steps over all stages; None without pipeline parallelism.
        parameter_names: the clean canonical FQN of each parameter of the whole module.
        state_names: the clean FQNs of all entries of the whole module's state dict.
        state_ties: the clean FQNs of each tied tensor of the state dict, canonical first.
        replaced: for each parameter before sharding, the one that replaced it.
        elsewhere: for each parameter that is now on other stages only, its placeholder.
        holders: for each parameter, the number of ranks that hold it or a part of it.
        engine: torch's engine, which gathers parameters and reduces gradients; None if rows are not sharded.
    """

    meshes: Meshes
    root: nn.Module
    gradients: GradientSync
    pipeline: PipelineRunner | None
    parameter_names: tuple[str, ...]
    state_names: frozenset[str]
    state_ties: tuple[tuple[str, ...], ...]
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)
    elsewhere: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    holders: dict[Tensor, int] = field(default_factory=dict)
    engine: Engine | None = None

    def run(self, step: Callable[[], Any]) -> Any:
        """Run a step of the module, and return its result."""
        with keep_gathered():
            return step() if self.engine is None else self.engine.run(step)

    def ranks_of(self, parameter: Tensor) -> int:
        """Return the number of ranks that hold a parameter or a part of it; all of a stage's for unknown ones."""
        return self.holders.get(parameter, self.meshes.topology.world_size // self.meshes.topology.pipeline)

    def holds(self, root: nn.Module) -> bool:
        """Return whether ``root`` has the sharded parameters; False if it was built again since.

        Raises:
            UnsupportedCodeError: if it has both sharded and new parameters.
        """
        reshard(self.root)
        own = {*self.replaced.values(), *self.gradients.adopted}
        new = [name for name, parameter in own_parameters(root) if parameter not in own]
        if new and is_parallel(root):
            raise UnsupportedCodeError(
                f"{type(root).__name__} got {len(new)} parameters after it was sharded, the first is "
                f"{new[0]}. configure_model runs again for every stage: build each layer once, "
                "`if self.net is None: self.net = ...`."
            )
        return not new


def is_parallel(root: nn.Module) -> bool:
    """Return whether ``root`` is already sharded, in ``configure_model``."""
    return any(isinstance(p, DTensor) for p in root.parameters()) or any(True for _ in fsdp_modules(root))


def shard(
    root: nn.Module,
    meshes: Meshes,
    recipe: Recipe,
    *,
    device: torch.device,
    build: Build,
    copy_slice: CopySlice,
    loaded: Collection[str] = (),
    restores: Callable[[], bool] = lambda: False,
    is_called: bool = False,
) -> ShardedModule:
    """Shard ``root`` in place, unless ``configure_model`` already did, and give it its first values.

    Collective: every rank of the world must call it.

    Args:
        root: the whole module; tensors without memory are on the meta device.
        meshes: the device meshes of this process.
        recipe: how to shard.
        device: where the module runs.
        build: knows which tensors rank 0 alone has; it has compared ``root``.
        copy_slice: copies this rank's slice of a whole value into a parameter.
        loaded: clean FQNs of parameters and buffers that the caller will fill; no value is computed for them.
        restores: returns whether a checkpoint will fill the whole state dict; called only if something has no first
            value, on all ranks.
        is_called: whether ``root`` itself will be called, and not only modules inside it.

    Raises:
        UnsupportedCodeError: if ``root`` cannot be sharded or pipelined; names the remedy.
    """
    topology = meshes.topology
    refuse_stages(root)
    if topology.world_size > 1 or is_parallel(root):
        refuse_node_hooks(root)
        replace_functions()
    names = parameter_names(root)
    ties = [tie for tie in names if len(tie) > 1]
    before = dict(root.named_parameters(remove_duplicate=False))
    state = frozenset(clean_fqn(name) for name in root.state_dict()), tuple(tied_state(root))
    share_tensors(root, device, build.only_first)
    values = build.take(root, loaded)
    initialization = Initialization(root, build, loaded)
    built = dict(root.named_parameters(remove_duplicate=False))
    if topology.pipeline > 1 and is_parallel(root):
        raise UnsupportedCodeError(
            f"{type(root).__name__} shards itself in configure_model; ShardedStrategy must do that to pipeline it. "
            "Give a tensor_parallel_plan and FSDP(units=…) instead."
        )
    stages = split_into_stages(root, meshes, recipe.pipeline, device)
    partial_names, engine = list[str](), None
    home = torch.device("cpu") if recipe.fsdp.cpu_offload else device
    if not is_parallel(root):
        partial_names, engine = _parallelize(root, meshes, recipe, ties, stages, device, home, is_called=is_called)
    _materialize(root, ties, home, device)
    send_values(values, root, copy_slice, device)
    initialization.run(copy_slice, device, restores)
    after = dict(root.named_parameters(remove_duplicate=False))
    replaced = {old: after[name] for name, old in before.items() if name in after}
    elsewhere = dict[nn.Parameter, Tensor]()
    shared = list[tuple[nn.Parameter, dist.ProcessGroup]]()
    if stages is not None:
        elsewhere |= {old: stages.placeholders[id(built[n])] for n, old in before.items() if old not in replaced}
        shared = stages.shared_parameters(after, names)
    follow_parameters(root, {**replaced, **elsewhere})
    for old in dict.fromkeys(before.values()):
        retire_parameter(old, replaced.get(old))
    reduce_dtype = recipe.reduce_dtype
    gradients = GradientSync(root, meshes, device, partial=partial_names, reduce_dtype=reduce_dtype, shared=shared)
    holders: dict[Tensor, int] = dict.fromkeys(after.values(), topology.world_size // topology.pipeline)
    holders |= {p: holders[p] * dist.get_world_size(group) for p, group in shared}
    pipeline = None
    if stages is not None:
        absent = stages.register_absent(built, {built[name]: new for name, new in after.items() if name in built})
        pipeline = stages.build_pipeline(root, gradients, absent, device)
    canonical = tuple(clean_fqn(tie[0]) for tie in names)
    return ShardedModule(meshes, root, gradients, pipeline, canonical, *state, replaced, elsewhere, holders, engine)


def _parallelize(
    root: nn.Module,
    meshes: Meshes,
    recipe: Recipe,
    ties: list[list[str]],
    stages: StagedModule | None,
    device: torch.device,
    home: torch.device,
    *,
    is_called: bool,
) -> tuple[list[str], Engine | None]:
    """Shard the parameters of this rank's stages, and make FSDP units of their modules.

    Returns:
        The names of plain parameters whose gradients are partial sums over the tensor axis, and torch's engine, which
        is None if rows are not sharded.
    """
    topology, fsdp, plan = meshes.topology, recipe.fsdp, TensorPlan()
    if topology.tensor > 1:
        plan = resolve_plan(root, recipe.tensor_parallel_plan, ties, topology.tensor)
        apply_plan(root, plan, meshes.tensor)
        _retie(root, ties)
    elif recipe.tensor_parallel_plan != "auto":  # a mistake must not wait for the run on more ranks
        resolve_plan(root, recipe.tensor_parallel_plan, ties, 1)
    modules, chosen = named_modules(root), choose_units(root, fsdp.units)
    recomputed = [modules[name] for name in _checkpointed(root, chosen, fsdp.activation_checkpointing)]
    units, ignored = [modules[name] for name in chosen], set[nn.Parameter]()
    for name in select_modules(root, fsdp.ignored, "FSDP(ignored=…)"):
        ignored.update(modules[name].parameters())
        if any(isinstance(parameter, DTensor) for parameter in modules[name].parameters()):
            raise TopologyError(f"FSDP(ignored=…): tensor_parallel_plan shards {name}. Leave it out of one of them.")
    if stages is not None:
        stages.drop_other_stages(root)
    registered = [name for name, _ in root.named_parameters(remove_duplicate=False)]
    partial_names = [name for name in registered if clean_fqn(name).rpartition(".")[0] in plan.partial]
    engine = None
    if topology.shard > 1:
        around = units_around(root, units, is_called=is_called).values()
        inside = {parameter for unit in (*units, *around) for parameter in unit.parameters()}
        # fully_shard can't gather parameters in no module that is called, nor complex ones
        ignored |= {p for p in root.parameters() if not isinstance(p, DTensor) and (p not in inside or p.is_complex())}
        has_data_axes_alone = topology.pipeline == topology.tensor == 1
        engine = Engine(
            root,
            meshes.fsdp,
            device,
            [peers_of(meshes.root[axis]) for axis in ("shard", "replicate") if getattr(topology, axis) > 1],
            offload=fsdp.cpu_offload,
            reduce_dtype=recipe.reduce_dtype,
            autocast_dtype=recipe.autocast_dtype if has_data_axes_alone else None,
        )
    if topology.tensor > 1 or topology.shard > 1:  # else all stay plain
        over = meshes.fsdp if topology.data_parallel > 1 else None
        group = meshes.tensor_group if topology.tensor > 1 else None
        shard_parameters(root, over, meshes.root, home, ignored=ignored, partial=partial_names, partial_group=group)
    names = module_names(root)
    compiled = {original: m for m in names if (original := compiled_from(m)) is not None}
    kinds = dict[nn.Module, str]()
    if any(isinstance(p, DTensor) for p in root.parameters()):
        kinds = {module: "reshard" for module in units if module in names}
        kinds |= dict.fromkeys(units_around(root, list(kinds), is_called=is_called).values(), "keep")
    kinds |= {module: kinds.get(module, "inner") for module in recomputed if module in names}
    for module, kind in kinds.items():
        unit = Unit(
            names[module],
            device,
            reshard=kind == "reshard" and fsdp.reshard_after_forward is not False and topology.pipeline == 1,
            is_rest=kind == "keep" and topology.pipeline == 1,
            recompute=module in recomputed,
            inner=kind == "inner",
            engine=engine,
        )
        make_unit(compiled.get(module, module), unit)
    refuse_nested_tensors(root)
    return partial_names, engine


def _checkpointed(root: nn.Module, units: list[str], wanted: bool | list[str]) -> list[str]:
    """Return the FQNs of the modules whose activations are recomputed."""
    if not isinstance(wanted, bool):
        return select_modules(root, wanted, "FSDP(activation_checkpointing=…)")
    if wanted and not units:
        raise TopologyError(
            f"FSDP(activation_checkpointing=True): {type(root).__name__} has no FSDP units to checkpoint. Name the "
            "modules by pattern or class."
        )
    return units if wanted else []


@torch.no_grad()
def _materialize(root: nn.Module, ties: list[list[str]], device: torch.device, rest: torch.device) -> None:
    """Allocate tensors on the meta device, parameters on ``device``; move buffers and plain parameters to ``rest``."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    if any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers())):
        convert_tensors(root, real)
        _retie(root, ties)
    for module in root.modules():
        buffers = buffer_slots(module)
        for name, buffer in buffers.items():
            if buffer is not None:
                buffers[name] = buffer.to(rest)
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(rest)


def _retie(root: nn.Module, ties: Iterable[list[str]]) -> None:
    """Register one parameter under all names of each tie that the module has.

    Raises:
        TopologyError: if tied parameters are sharded differently.
    """
    present = dict(root.named_parameters(remove_duplicate=False))
    for tie in ties:
        first, *others = [name for name in tie if name in present] or tie[:1]
        shared = present.get(first)
        for name in others:
            assert shared is not None
            if _layout(present[name]) != _layout(shared):
                raise TopologyError(
                    f"tied parameters are sharded differently: {first} {_layout(shared)}, {name} "
                    f"{_layout(present[name])}. Give their modules tensor-parallel styles that shard the same dim."
                )
            owner, _, attribute = name.rpartition(".")
            parameter_slots(root.get_submodule(owner))[attribute] = shared


def _layout(parameter: Tensor) -> object:
    if not isinstance(parameter, DTensor):
        return "whole"
    return parameter.device_mesh.mesh_dim_names, parameter.placements
