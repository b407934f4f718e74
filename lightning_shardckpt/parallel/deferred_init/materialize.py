"""Initial values of parameters, equal on every topology.

Real weights are broadcast from rank 0. Deferred ones are replayed in full, one tensor at a time on the CPU, and each
rank keeps its slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_modules import convert_tensors, parameter_slots
from lightning_shardckpt.errors import TopologyError

CopySlice = Callable[[Tensor, Tensor], None]
"""Copies this rank's slices of the second, full tensor into the first."""
Value = tuple[nn.Module, str, Tensor]
"""The owning module, the name of its parameter, and the full parameter."""
Slot = tuple[nn.Module, str]
"""A module and the name of its parameter."""


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
        dist.broadcast(buffer.view(-1).view(torch.uint8), src=0)  # as bytes: gloo supports neither bool nor fp8
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
