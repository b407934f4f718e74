"""From an ordinary module to one that is cut over the mesh: the whole story in call order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.fsdp import (
    StepModule,
    checkpoint_activations,
    choose_units,
    fsdp_modules,
    reshard,
    shard_module,
)
from lightning_shardckpt.parallel.gradients import GradientSync
from lightning_shardckpt.parallel.materialize import (
    CopySlice,
    Value,
    allocate,
    broadcast_weights,
    fill,
    meta_slots,
    retie,
)
from lightning_shardckpt.parallel.mesh import Meshes
from lightning_shardckpt.parallel.names import clean_fqn, parameter_names, select_modules
from lightning_shardckpt.parallel.tensor import Plan, TensorPlan, apply_plan, resolve_plan


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a module is to be cut; the arguments of ``ShardedStrategy`` that say so."""

    tensor_parallel_plan: Plan = "auto"
    fsdp_units: Sequence[str] | None = None
    reshard_after_forward: bool = True
    activation_checkpointing: bool | Sequence[str] = False
    cpu_offload: bool = False


@dataclass(frozen=True, slots=True)
class ShardedModule:
    """A module that was cut, and what its users need to know.

    Attributes:
        step: runs steps of the module under the hooks of FSDP.
        ties: the names of each tied parameter, canonical first.
        canonical_names: every parameter name as registered → its clean canonical FQN.
        replaced: parameters that the module had before → those that it has now.
    """

    meshes: Meshes
    step: StepModule
    gradients: GradientSync
    ties: list[list[str]]
    canonical_names: dict[str, str]
    replaced: dict[nn.Parameter, nn.Parameter] = field(default_factory=dict)

    def holds(self, root: nn.Module) -> bool:
        """Whether ``root`` has the parameters that were cut; False if it was built anew since.

        Raises:
            TopologyError: if it has some of them and others.
        """
        reshard(self.step)
        mine = set(self.replaced.values())
        strangers = [name for name, parameter in root.named_parameters() if parameter not in mine]
        if strangers and is_parallel(root):
            raise TopologyError(
                f"{type(root).__name__} got {len(strangers)} parameters after it was sharded, the first is "
                f"{strangers[0]}. configure_model runs again for every stage: build each layer once, "
                "`if self.net is None: self.net = ...`."
            )
        return not strangers


def is_parallel(root: nn.Module) -> bool:
    """Whether somebody (the user, in ``configure_model``) already cut ``root``."""
    return any(isinstance(p, DTensor) for p in root.parameters()) or any(True for _ in fsdp_modules(root))


def shard(
    root: nn.Module,
    meshes: Meshes,
    recipe: Recipe,
    *,
    device: torch.device,
    values: Iterable[Value] = (),
    copy_slice: CopySlice,
) -> ShardedModule:
    """Cut ``root`` in place, unless the user already did, and give it its first values.

    ``values`` are the full first values of parameters on the meta device, read once, one at a time.
    Collective: every rank of the world must call it.
    """
    names = parameter_names(root)
    ties = [tie for tie in names if len(tie) > 1]
    before = dict(root.named_parameters(remove_duplicate=False))
    step = StepModule(root)
    broadcast_weights(root, device)
    plan = TensorPlan()
    if not is_parallel(root):
        plan = _cut(step, meshes, recipe, ties)
    _materialize(step, ties, torch.device("cpu") if recipe.cpu_offload else device, values, copy_slice)
    _move_rest(root, device)
    after = dict(root.named_parameters(remove_duplicate=False))
    for name, old in before.items():
        if old is not after[name] and not old.is_meta:
            old.data = old.data.new_empty(0)  # an optimizer may hold it until `rebind_optimizer`
    return ShardedModule(
        meshes,
        step,
        GradientSync(step, meshes, _partial_names(root, plan), device),
        [[clean_fqn(name) for name in tie] for tie in ties],
        {name: clean_fqn(tie[0]) for tie in names for name in tie},
        {old: after[name] for name, old in before.items()},
    )


def rebind_optimizer(optimizer: Optimizer, module: ShardedModule) -> None:
    """Make an optimizer that was built before the module was cut hold the parameters that the module has now.

    Raises:
        TopologyError: if it holds a parameter that the module never had.
    """
    live = set(module.replaced.values())
    for index, group in enumerate(optimizer.param_groups):
        strangers = [p for p in group["params"] if p not in live and p not in module.replaced]
        if strangers:
            raise TopologyError(
                f"param group {index} of {type(optimizer).__name__} holds {len(strangers)} parameters that are not in "
                f"the LightningModule (first shape: {tuple(strangers[0].shape)}). Build the optimizer from "
                "self.parameters() in configure_optimizers."
            )
        group["params"][:] = [module.replaced.get(p, p) for p in group["params"]]
    for old, new in module.replaced.items():
        if new is not old and old in optimizer.state:
            optimizer.state[new] = optimizer.state.pop(old)


def _cut(step: StepModule, meshes: Meshes, recipe: Recipe, ties: list[list[str]]) -> TensorPlan:
    root = step.module
    plan = TensorPlan()
    if meshes.topology.tensor > 1:
        plan = resolve_plan(root, recipe.tensor_parallel_plan, ties, meshes.topology.tensor)
        apply_plan(root, plan, meshes.tensor)
        retie(root, ties)
    units = choose_units(root, recipe.fsdp_units)
    checkpointed = recipe.activation_checkpointing
    if checkpointed:
        checkpoint_activations(root, _checkpointed(root, units, checkpointed))
    if any(True for _ in root.parameters()):
        shard_module(
            step,
            units,
            meshes.fsdp,
            reshard_after_forward=recipe.reshard_after_forward,
            cpu_offload=recipe.cpu_offload,
        )
    return plan


def _checkpointed(root: nn.Module, units: list[str], wanted: bool | Sequence[str]) -> list[str]:
    if not isinstance(wanted, bool):
        return select_modules(root, wanted, "activation_checkpointing")
    if not units:
        raise TopologyError(
            f"activation_checkpointing=True: {type(root).__name__} has no FSDP units to checkpoint. Name the modules "
            "by pattern or class."
        )
    return units


def _materialize(
    step: StepModule, ties: list[list[str]], device: torch.device, values: Iterable[Value], copy_slice: CopySlice
) -> None:
    slots = meta_slots(step.module)
    if slots:
        allocate(step, device)
        retie(step.module, ties)
    fill(slots, values, copy_slice)


def _move_rest(root: nn.Module, device: torch.device) -> None:
    """Move buffers and plain parameters; FSDP and TP placed the others where they belong."""
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    for parameter in root.parameters():
        if not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(device)


def _partial_names(root: nn.Module, plan: TensorPlan) -> list[str]:
    names = [name for name, _ in root.named_parameters(remove_duplicate=False)]
    return [name for name in names if clean_fqn(name).rpartition(".")[0] in plan.partial]
