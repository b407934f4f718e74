"""First values of parameters, the same on every topology.

Real weights come from rank 0. Deferred ones are replayed in full, one tensor at a time on the CPU, and each rank
keeps its slices. Modules built on the meta device by the user fill themselves through ``reset_parameters``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.module_class import convert_tensors
from lightning_shardckpt.compat.module_slots import buffer_slots, parameter_slots
from lightning_shardckpt.compat.transformers import can_initialize, initialize
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import clean_fqn

CopySlice = Callable[[Tensor, Tensor], None]
"""Copies this rank's slices of the second, full tensor into the first."""
Value = tuple[nn.Module, str, Tensor]
"""The owning module, the name of its parameter, and all of that parameter."""
Slot = tuple[nn.Module, str]
"""A module and the name of its parameter."""


class FirstValues(Protocol):
    """Knows the values of parameters that were built without memory, as ``DeferredInit`` does."""

    def knows(self, module: nn.Module, name: str) -> bool:
        """Return whether `replay` would give a value to that parameter."""

    def replay(
        self, root: nn.Module, *, skip_foreign: bool = False, skip: Collection[tuple[int, str]] = ()
    ) -> Iterable[Value]:
        """The values of the parameters of ``root``, read once, one at a time, but for those to ``skip``."""


@torch.no_grad()
def broadcast_weights(root: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, one tensor at a time; skips DTensors and the meta device.

    Collective: every rank of the world must call it.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    seen: set[int] = set()
    for tensor in [*root.parameters(), *root.buffers()]:
        if id(tensor) in seen or tensor.is_meta or isinstance(tensor, DTensor) or not tensor.numel():
            continue
        seen.add(id(tensor))
        sent = tensor.detach().to(device).resolve_conj().resolve_neg().contiguous()
        dist.broadcast(sent.view(-1).view(torch.uint8), src=0)  # as bytes: gloo knows neither bool nor fp8
        if sent.data_ptr() != tensor.data_ptr():
            tensor.copy_(sent)


def meta_slots(root: nn.Module) -> list[Slot]:
    """The (module, parameter name) pairs whose values don't exist yet."""
    return [
        (module, name)
        for module in root.modules()
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        if parameter.is_meta
    ]


def unfilled(root: nn.Module, loaded: Collection[str]) -> tuple[set[tuple[int, str]], list[Slot], list[Slot]]:
    """Return what somebody else fills, as (id of module, name), and the slots on the meta device that remain to be
    filled.

    Args:
        root: before it is sharded.
        loaded: clean FQNs of what somebody else fills.

    Returns:
        The first, and of the remaining ones parameters and buffers.
    """
    theirs: set[tuple[int, str]] = set()
    buffers: list[Slot] = []
    for prefix, module in root.named_modules(remove_duplicate=False):
        for name, tensor in [*parameter_slots(module).items(), *buffer_slots(module).items()]:
            if clean_fqn(f"{prefix}.{name}" if prefix else name) in loaded:
                theirs.add((id(module), name))
            elif name in buffer_slots(module) and tensor is not None and tensor.is_meta:
                buffers.append((module, name))
    return theirs, [(m, n) for m, n in meta_slots(root) if (id(m), n) not in theirs], buffers


def fill_buffers(root: nn.Module, slots: Iterable[Slot]) -> None:
    """Compute buffers that were built on the meta device and that nothing fills, such as those of rotary embeddings.

    By ``reset_parameters``, of which only what it does to buffers counts, or as Hugging Face's models do.

    Raises:
        TopologyError: naming the modules that cannot compute theirs.
    """
    here = set(root.modules())
    modules = list({id(module): module for module, _ in slots if module in here}.values())
    models = {sub: model for model in root.modules() if can_initialize(model) for sub in model.modules()}
    helpless = []
    for module in modules:
        if hasattr(module, "reset_parameters"):
            list(_reset([module]))
        elif module in models and not any(True for _ in module.parameters()):
            with torch.no_grad():
                initialize(models[module], module)
        else:
            helpless.append(type(module).__name__)
    if helpless:
        raise TopologyError(
            f"buffers of {', '.join(sorted(set(helpless)))} are on the meta device and nothing says what their values "
            "are. Give these modules a reset_parameters() method, or build them without torch.device('meta')."
        )


@torch.no_grad()
def allocate(root: nn.Module, device: torch.device) -> None:
    """Give every parameter and buffer on the meta device uninitialised memory; breaks ties: call `retie` after."""

    def real(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta else tensor

    convert_tensors(root, real)


def retie(root: nn.Module, ties: Iterable[list[str]]) -> None:
    """Register one parameter object again under all names of each tie that are there.

    Raises:
        TopologyError: if tied parameters were sharded in different ways.
    """
    present = dict(root.named_parameters(remove_duplicate=False))
    for tie in ties:
        first, *others = [name for name in tie if name in present] or tie[:1]
        kept = present.get(first)
        for name in others:
            assert kept is not None
            if _layout(present[name]) != _layout(kept):
                raise TopologyError(
                    f"tied parameters are sharded differently: {first} {_layout(kept)}, {name} {_layout(present[name])}"
                    ". Give their modules tensor-parallel styles that shard the same dim."
                )
            owner, _, attribute = name.rpartition(".")
            parameter_slots(root.get_submodule(owner))[attribute] = kept


def fill(slots: Iterable[Slot], values: Iterable[Value], copy_slice: CopySlice) -> None:
    """Copy this rank's slices of every value, then initialise the modules of ``slots`` that got none.

    Raises:
        TopologyError: naming the modules that cannot initialise themselves.
    """
    missing = {(id(module), name): module for module, name in slots}
    for module, name, full in values:
        _put(module, name, full, copy_slice)
        missing.pop((id(module), name), None)
    modules = list({id(module): module for module in missing.values()}.values())
    helpless = sorted({type(module).__name__ for module in modules if not hasattr(module, "reset_parameters")})
    if helpless:
        raise TopologyError(
            f"parameters of {', '.join(helpless)} are on the meta device and nothing says what their values are. "
            "Give these modules a reset_parameters() method, or build them without torch.device('meta'): "
            "ShardedStrategy(defer_init=True) defers configure_model by itself."
        )
    for module, name, full in _reset(modules):
        if (id(module), name) in missing:
            _put(module, name, full, copy_slice)


def _reset(modules: Iterable[nn.Module]) -> Iterator[Value]:
    """Run ``reset_parameters`` on a full CPU clone of each module; buffers that it assigns land in the module."""
    for module in modules:
        full = {
            name: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype), requires_grad=False)
            for name, p in parameter_slots(module).items()
        }
        clone = object.__new__(type(module))
        clone.__dict__.update(module.__dict__, _parameters=full)
        with torch.no_grad():
            clone.reset_parameters()  # type: ignore[operator]  # `fill` made sure that it is a method
        yield from ((module, name, value) for name, value in parameter_slots(clone).items() if value is not None)


def _put(module: nn.Module, name: str, full: Tensor, copy_slice: CopySlice) -> None:
    parameter = parameter_slots(module)[name]
    if parameter is None:
        return
    if parameter.shape != full.shape:
        raise TopologyError(
            f"parameter {name} of {type(module).__name__} has shape {tuple(parameter.shape)} after it was sharded, "
            f"{tuple(full.shape)} as built; a tensor-parallel plan must keep global shapes"
        )
    with torch.no_grad():
        copy_slice(parameter, full)


def _layout(parameter: Tensor) -> object:
    if not isinstance(parameter, DTensor):
        return "whole"
    return parameter.device_mesh.mesh_dim_names, parameter.placements
