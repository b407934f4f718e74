"""Sharding of an ordinary module over the mesh: all steps, in call order."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, new_dtensor, spec_of
from lightning_shardckpt.compat.torch_modules import (
    buffer_slots,
    compiled_from,
    convert_tensors,
    parameter_slots,
    refresh_flat_weights,
)
from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    mark_as_parameter,
    set_accumulation_hooks,
    set_gradient_hooks,
)
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
from lightning_shardckpt.parallel.tensors.operations import keep_gathered, name_of, wrap_hook
from lightning_shardckpt.parallel.tensors.placement import NAME, own_rows, peers_of, sharding_of, spec_over
from lightning_shardckpt.parallel.tensors.sharded import ShardedTensor, as_sharded, map_nested
from lightning_shardckpt.parallel.tensors.values import PARTIAL


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
        current: for each parameter before sharding, the one that replaced it, or its placeholder if only other stages
            have it.
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
    current: dict[Tensor, Tensor]
    holders: dict[Tensor, int]
    engine: Engine | None

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
        own = {*self.current.values(), *self.gradients.adopted}
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
    loaded: Set[str] = frozenset(),
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
    current: dict[Tensor, Tensor] = {old: after[name] for name, old in before.items() if name in after}
    for old in dict.fromkeys(before.values()):
        _retire_parameter(old, current.get(old))
    shared = list[tuple[nn.Parameter, dist.ProcessGroup]]()
    if stages is not None:
        current |= {old: stages.placeholders[id(built[n])] for n, old in before.items() if old not in current}
        shared = stages.shared_parameters(after, names)
    _follow_parameters(root, current)
    reduce_dtype = recipe.reduce_dtype
    gradients = GradientSync(
        root, meshes, device, partial_names=partial_names, reduce_dtype=reduce_dtype, shared=shared
    )
    holders: dict[Tensor, int] = dict.fromkeys(after.values(), topology.world_size // topology.pipeline)
    holders |= {p: holders[p] * dist.get_world_size(group) for p, group in shared}
    pipeline = None
    if stages is not None:
        absent = stages.register_absent(built, {built[name]: new for name, new in after.items() if name in built})
        pipeline = stages.build_pipeline(root, gradients, absent, device)
    canonical = tuple(clean_fqn(tie[0]) for tie in names)
    return ShardedModule(meshes, root, gradients, pipeline, canonical, *state, current, holders, engine)


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

    Returns the names of plain parameters whose gradients are partial sums over the tensor axis, and torch's engine,
    which is None if rows are not sharded.
    """
    topology, fsdp, plan = meshes.topology, recipe.fsdp, TensorPlan()
    if topology.tensor > 1:
        plan = resolve_plan(root, recipe.tensor_parallel_plan, ties, topology.tensor)
        apply_plan(root, plan, meshes.root["tensor"])
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
        _shard_parameters(root, over, meshes, home, ignored, frozenset(partial_names))
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
    """Register one parameter under all names of each tie that the module has, unless they are sharded differently."""
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


# ── parameters ──────────────────────────────────────────────────────────────────────────────────────────────────────

# A replaced parameter still behaves like the new one, but a set, a dict or ``is`` would not find the new one. So the
# new ones are put into attributes of modules, and into containers there, in place.


class ReplacedParameter(nn.Parameter):
    """A parameter from before sharding: functions of it run on the sharded one in its place."""

    _replacement: Tensor | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_nested((tuple(args), kwargs or {}), _current)
        accessor = getattr(func, "__name__", "")
        if accessor == "__get__":  # of a property, which the sharded one's class may have replaced
            return getattr(args[0], name_of(func))
        if accessor == "__set__":
            return setattr(args[0], name_of(func), args[1])
        return func(*args, **kwargs)


def _current(value: Tensor) -> Any:
    if not isinstance(value, ReplacedParameter):
        return value
    if value._replacement is None:
        raise UnsupportedCodeError(
            "this parameter is on another pipeline stage. Access parameters through the module, not through "
            "references from before it was sharded, and only the parameters of this stage."
        )
    return value._replacement


def _shard_parameters(
    root: nn.Module,
    data_mesh: DeviceMesh | None,
    meshes: Meshes,
    device: torch.device,
    ignored: Collection[nn.Parameter],
    partial: Collection[str],
) -> None:
    """Replace the parameters of ``root``, plain ones or DTensors of a tensor-parallel plan, by sharded ones.

    The last axis of ``data_mesh`` shards the rows; if None, only DTensors are replaced, with their own placements.
    Parameters that are ``ignored`` stay plain; the gradients of those with ``partial`` names are partial sums over the
    tensor-parallel ranks.
    """
    new = dict[nn.Parameter, Any]()
    for prefix, module in root.named_modules():
        slots = parameter_slots(module)
        for name, old in list(slots.items()):
            if old is None or old in ignored or (not isinstance(old, DTensor) and (data_mesh is None or old.ndim == 0)):
                continue
            fqn = f"{prefix}.{name}" if prefix else name
            if type(old) is not nn.Parameter and not isinstance(old, DTensor):
                raise UnsupportedCodeError(
                    f"the parameter {fqn} is of the class {type(old).__name__}, which cannot be sharded: make it an "
                    "nn.Parameter, or train with data_parallel_shard_size=1"
                )
            if old not in new:
                new[old] = _shard(old, data_mesh, meshes.root, device)
                new[old].__dict__[NAME] = fqn
            if fqn in partial:
                new[old].__dict__[PARTIAL] = meshes.tensor_group
            slots[name] = new[old]
        refresh_flat_weights([module])


def _shard(old: Any, data_mesh: DeviceMesh | None, root_mesh: DeviceMesh, device: torch.device) -> ShardedTensor:
    spec = spec_of(old) if data_mesh is None else spec_over(old, data_mesh, root_mesh)
    with torch.no_grad():
        part = own_rows(local_tensor(old).detach(), sharding_of(spec))
        if part.is_meta:
            local = torch.empty(part.shape, dtype=part.dtype, device=device)
        else:
            local = part.to(device, copy=True, memory_format=torch.contiguous_format)
        leaf = as_sharded(new_dtensor(local, spec))
    mark_as_parameter(leaf)
    leaf.requires_grad_(old.requires_grad)
    return leaf


def _retire_parameter(old: nn.Parameter, leaf: Tensor | None) -> None:
    """Move a parameter's attributes and hooks to ``leaf``, if this rank has one, and make it a `ReplacedParameter`.

    Hooks move in the same dictionaries, since their handles refer to these.
    """
    if type(old) is not nn.Parameter or old is leaf:
        return
    if leaf is not None:
        leaf.__dict__.update({k: v for k, v in vars(old).items() if k not in vars(leaf)})
        for after, hooks in ((False, gradient_hooks(old)), (True, accumulation_hooks(old))):
            if hooks and isinstance(leaf, ShardedTensor):
                hooks.update({number: wrap_hook(hook, after=after) for number, hook in hooks.items()})
            if hooks:
                (set_accumulation_hooks if after else set_gradient_hooks)(leaf, hooks)
    old.grad = None
    if not old.is_meta:
        old.data = old.data.new_empty(0)
    old.__class__ = ReplacedParameter
    old.__dict__["_replacement"] = leaf


_DEPTH = 4  # of containers in containers
_REGISTRIES = frozenset(vars(nn.Module()))  # such as ``_parameters``


def _follow_parameters(root: nn.Module, current: Mapping[Tensor, Tensor]) -> None:
    """Replace old parameters by new ones, or by placeholders, in the attributes of modules inside ``root``.

    Also in lists, tuples, sets and dicts there, and the ids of parameters in them.
    """
    new_by_id: dict[int, Any] = {id(old): new for old, new in current.items() if old is not new}
    for module in root.modules() if new_by_id else ():
        for name, value in list(vars(module).items()):
            if name not in _REGISTRIES:
                module.__dict__[name] = _follow(value, new_by_id, _DEPTH)


def _follow(value: Any, new_by_id: Mapping[int, Any], depth: int) -> Any:
    """Return the new value; a list, set or dict is changed in place."""
    if isinstance(value, nn.Parameter):
        return new_by_id.get(id(value), value)
    if type(value) is int and value in new_by_id:
        return id(new_by_id[value])
    if type(value) not in (list, tuple, set, frozenset, dict) or not depth:
        return value
    if len(value) > len(new_by_id) + 100:  # longer containers hold data
        return value
    items = [*value.items()] if type(value) is dict else [*value]
    new_items = [_follow(item, new_by_id, depth - 1) for item in items]
    if all(new is old for new, old in zip(new_items, items, strict=True)):
        return value
    if type(value) in (tuple, frozenset):
        return type(value)(new_items)
    value.clear()
    value.extend(new_items) if type(value) is list else value.update(new_items)
    return value
