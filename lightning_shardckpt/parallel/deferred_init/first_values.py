"""Initial values of parameters, equal on every topology.

Real weights are broadcast from rank 0. Deferred ones are replayed in full, one tensor at a time on the CPU, and each
rank keeps its slices. Tensors that models of transformers have on the meta device are filled by ``initialize_weights``,
as in ``from_pretrained`` for missing tensors, on stand-ins whose operations `DeferredInit` logs; others must be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import buffer_slots, convert_tensors, parameter_slots
from lightning_shardckpt.compat.transformers import initialize, is_model, mark_initialized
from lightning_shardckpt.errors import TopologyError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.sharding.references import REGISTRIES
from lightning_shardckpt.system.tensor_digest import byte_view

CopySlice = Callable[[Tensor, Tensor], None]
"""Copies this rank's slices of the second, full tensor into the first."""
Value = tuple[nn.Module, str, Tensor]
"""The owning module, the name of its parameter, and the full parameter."""
Slot = tuple[nn.Module, str]
"""A module and the name of its parameter."""
_LISTED = 20
_LARGEST = 10_000  # items of a container that is searched for tensors


@torch.no_grad()
def broadcast_weights(root: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and buffers, one tensor at a time, except DTensors and meta tensors.

    Collective: every rank of the world must call it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    seen: set[int] = set()
    for tensor in [*root.parameters(), *root.buffers()]:
        if id(tensor) in seen or tensor.is_meta or isinstance(tensor, DTensor) or not tensor.numel():
            continue
        seen.add(id(tensor))
        buffer = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()
        dist.broadcast(byte_view(buffer), src=0)  # as bytes: gloo supports neither bool nor fp8
        if buffer.data_ptr() != tensor.data_ptr():
            tensor.copy_(buffer)


def meta_slots(root: nn.Module) -> list[Slot]:
    """Return the modules and names of the parameters on the meta device."""
    return [
        (module, name)
        for module in root.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_meta
    ]


@torch.no_grad()
def allocate(root: nn.Module, device: torch.device) -> None:
    """Allocate uninitialized memory for meta parameters and buffers. This breaks ties: call `retie` afterwards."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    convert_tensors(root, real)


def retie(root: nn.Module, ties: Iterable[list[str]]) -> None:
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


@torch.no_grad()
def fill(values: Iterable[Value], copy_slice: CopySlice) -> None:
    """Copy this rank's slices of every value.

    Raises:
        TopologyError: if sharding has changed the global shape of a parameter.
    """
    for module, name, full in values:
        parameter = parameter_slots(module)[name]
        if parameter is None:
            continue
        if parameter.shape != full.shape:
            raise TopologyError(
                f"parameter {name} of {type(module).__name__} has shape {tuple(parameter.shape)} after it was sharded, "
                f"{tuple(full.shape)} as built; a tensor-parallel plan must keep global shapes"
            )
        copy_slice(parameter, full)


def _layout(parameter: Tensor) -> object:
    if not isinstance(parameter, DTensor):
        return "whole"
    return parameter.device_mesh.mesh_dim_names, parameter.placements


# ── tensors on the meta device ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor of a module.

    Attributes:
        slots: the module's parameters, its buffers, or its other attributes.
        wanted: True if the tensor has no value, and must be filled here.
    """

    fqn: str
    module: nn.Module
    slots: MutableMapping[str, Any]
    name: str
    tensor: Tensor
    wanted: bool

    def __str__(self) -> str:
        kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
        return f"{self.fqn}  {'attribute' if self.slots is vars(self.module) else kind} of {type(self.module).__name__}"


def initialize_meta(
    root: nn.Module, deferred: DeferredInit, loaded: Collection[str], restores: Callable[[], bool] = lambda: False
) -> None:
    """Fill meta tensors of transformers' models: buffers now, parameters when ``deferred`` replays them.

    Args:
        root: the module, which only the user may have sharded.
        deferred: replays the parameters that were made in it; afterwards all others, too.
        loaded: clean FQNs of tensors that the caller fills.
        restores: called if tensors are left unfilled; returns True if a checkpoint will fill the state dict.

    Raises:
        UnsupportedCodeError: naming the tensors that are not filled.
    """
    models = list(_outermost_models(root))
    inside = {sub for model in models for sub in model.modules()}
    places = list(_places(root, deferred, loaded, inside))
    wanting = {place.module for place in places if place.wanted}
    running = {module for module in inside if not wanting.isdisjoint(module.modules())}
    own = [place for place in places if place.wanted or place.module in inside]
    with deferred, torch.no_grad():
        stand_ins = _put_stand_ins(own)
        try:
            for model in models:
                if model in running:
                    initialize(model, running)
        finally:
            filled = _take_back(own, stand_ins, deferred)
    adapters = _adapters(root)
    problems = [
        (place.fqn, f"{place}{', which PEFT fills only when it makes it' if place.module in adapters else ''}")
        for place in places
        if place.wanted and (id(place.tensor) not in filled or place.module in adapters)
    ]
    problems += _in_containers(root)
    state = {clean_fqn(name) for name in root.state_dict()} if problems else set()
    if any(fqn in state for fqn, _ in problems) and restores():
        problems = [(fqn, text) for fqn, text in problems if fqn not in state]
    if problems:
        listed = "\n  ".join([text for _, text in problems[:_LISTED]] + ["…"] * (len(problems) > _LISTED))
        raise UnsupportedCodeError(
            f"{len(problems)} of the tensors that were built on the meta device have no first values:\n  {listed}\n"
            "Build them in configure_model, which takes no memory for them, without "
            "torch.device('meta') or trainer.init_module(empty_init=True); in Fabric, in init_module(empty_init=True). "
            "Or load them: pretrained=…, or a ckpt_path."
        )
    deferred.materialize_buffers(root)


def _places(
    root: nn.Module, deferred: DeferredInit, loaded: Collection[str], in_models: Collection[nn.Module]
) -> Iterator[_Place]:
    tensors, seen = list(_tensors(root)), set[int]()
    filled = {id(tensor) for fqn, _, _, _, tensor in tensors if fqn in loaded}
    for fqn, module, slots, name, tensor in tensors:
        known = isinstance(tensor, nn.Parameter) and deferred.knows(module, name)
        is_tied = id(tensor) in seen and module in in_models  # from_pretrained fills the first one alone
        seen.add(id(tensor))
        wanted = tensor.is_meta and id(tensor) not in filled and not known and not is_tied
        yield _Place(fqn, module, slots, name, tensor, wanted)


def _tensors(root: nn.Module) -> Iterator[tuple[str, nn.Module, MutableMapping[str, Any], str, Tensor]]:
    """Yield all parameters and buffers, and attributes on the meta device, once per module."""
    for prefix, module in root.named_modules():
        attributes = {n: t for n, t in vars(module).items() if isinstance(t, Tensor) and t.is_meta}
        kinds: list[tuple[MutableMapping[str, Any], dict[str, Any]]] = [(vars(module), attributes)]
        kinds += [(slots, dict(slots)) for slots in (parameter_slots(module), buffer_slots(module))]
        for slots, tensors in kinds:
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield clean_fqn(f"{prefix}.{name}" if prefix else name), module, slots, name, tensor


def _outermost_models(module: nn.Module) -> Iterator[nn.Module]:
    if is_model(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_models(child)


def _adapters(root: nn.Module) -> set[nn.Module]:
    """Return the modules that PEFT fills only when it creates them, as listed by its classes."""
    found = set[nn.Module]()
    for module in root.modules():
        for name in getattr(type(module), "adapter_layer_names", ()):
            child = getattr(module, name, None)
            found.update(child.modules() if isinstance(child, nn.Module) else ())
    return found


def _put_stand_ins(places: Sequence[_Place]) -> dict[int, Tensor]:
    """Replace tensors by uninitialized stand-ins; return the stand-ins of wanted tensors, by id."""
    made: dict[tuple[int, bool], Tensor] = {}
    for place in places:
        key = (id(place.tensor), place.wanted)
        if key not in made:
            made[key] = _stand_in(place.tensor)
            if not place.wanted:
                mark_initialized(made[key])
        place.slots[place.name] = made[key]
    return {number: stand_in for (number, wanted), stand_in in made.items() if wanted}


def _stand_in(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    else:
        new = torch.empty_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().clone()
    if isinstance(tensor, nn.Parameter):
        new = nn.Parameter(new, requires_grad=tensor.requires_grad)
    new.__dict__.update(vars(tensor))
    return new


def _take_back(places: Sequence[_Place], stand_ins: dict[int, Tensor], deferred: DeferredInit) -> set[int]:
    """Restore the tensors, except wanted buffers and attributes; return the ids of wanted tensors that were filled."""
    found = {id(place.tensor): place.slots.get(place.name) for place in places if place.wanted}
    for place in places:
        new = found.get(id(place.tensor))
        is_parameter = isinstance(place.tensor, nn.Parameter)
        place.slots[place.name] = place.tensor if new is None or is_parameter else new
        if new is not None and is_parameter:
            deferred.take(place.module, place.name, new)
    return {n for n, new in found.items() if new is not None and (new is not stand_ins[n] or deferred.is_written(new))}


def _in_containers(root: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the FQN and description of containers in attributes that have tensors on the meta device."""
    for prefix, module in root.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTRIES and type(value) in (list, tuple, dict) and len(value) <= _LARGEST:
                items = value.values() if type(value) is dict else value
                if any(type(item) is Tensor and item.is_meta for item in items):
                    fqn = clean_fqn(f"{prefix}.{name}" if prefix else name)
                    yield fqn, f"{fqn}  {type(value).__name__} of {type(module).__name__}, which no method fills"
