"""Layouts of DTensors: the boxes of a live tensor on this rank, and their offsets in local memory.

A DTensor's mesh and placements become a ``Layout``. Axes may split a dim in another order than the placements: FSDP
over tensor parallelism (``StridedShard``) splits the tensor-parallel slice last although its mesh axis comes first.
torch's ``compute_local_shape_and_global_offset`` is wrong there for uneven dims (torch 2.13), so the boxes come from
``layout.py``, and are checked against the real local shape.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.compat.dtensor import StridedShard, new_dtensor, sibling_ranks, spec_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.layout import REPLICATED, Axis, Box, DimShard, Layout, Part, Shape, parts_of_rank
from lightning_shardckpt.state import tensor_bytes


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor over the world; a plain tensor is replicated.

    Raises:
        StateError: for a ``Partial`` placement, and for placements that no layout describes.
    """
    return _layout(*_sharding(tensor), len(dtensor.shape_of(tensor))) if isinstance(tensor, DTensor) else REPLICATED


def _sharding(tensor: DTensor) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements, which are quicker to hash and compare than a DTensorSpec."""
    spec = spec_of(tensor)
    return spec.device_mesh, tuple(spec.placements)


def acts_as_whole(tensor: torch.Tensor) -> bool:
    """Return whether code that uses the tensor sees the whole tensor; with torch's DTensor, it may see local rows."""
    return type(tensor) is not DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a tensor without autograd history. It shares the tensor's storage, and may be it."""
    local = dtensor.local_tensor(tensor)
    return local.detach() if local.requires_grad else local


def this_rank() -> int:
    """Return this process's rank in the default process group; 0 without one."""
    return dist.get_rank() if dist.is_initialized() else 0


def parts_of(tensor: torch.Tensor, rank: int) -> tuple[Part, ...]:
    """Return the boxes of a tensor on this rank, ``rank``, checked against its local shape.

    Raises:
        StateError: if the local shape contradicts the placements, or this rank is not in the mesh.
    """
    if not isinstance(tensor, DTensor):
        return _whole(tuple(tensor.shape))
    return _parts(*_sharding(tensor), dtensor.shape_of(tensor), dtensor.local_tensor(tensor).shape, rank)


@lru_cache(maxsize=65536)
def _whole(shape: Shape) -> tuple[Part, ...]:
    return (Part(Box.whole(shape), (0,) * len(shape)),)


@lru_cache(maxsize=65536)
def _parts(
    mesh: DeviceMesh, placements: tuple[Placement, ...], size: torch.Size, local_size: torch.Size, rank: int
) -> tuple[Part, ...]:
    shape, local_shape = tuple(size), tuple(local_size)
    if mesh.get_coordinate() is None:
        raise StateError(f"rank {rank} has a DTensor of shape {shape}, but is not in its {mesh}")
    parts = parts_of_rank(_layout(mesh, placements, len(shape)), shape, rank)
    extent = tuple(max(ends) for ends in zip(*(p.local.stop for p in parts), strict=True))
    if (extent != local_shape) if parts else prod(local_shape):
        raise StateError(
            f"a DTensor of shape {shape} with placements {placements} on mesh {mesh} has a local tensor of shape "
            f"{local_shape}, expected boxes {[(p.box.start, p.box.stop) for p in parts]}"
        )
    return parts


def new_like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor of the same class, shape, device and placements."""
    if not isinstance(tensor, DTensor):
        return tensor_bytes.new_like(tensor, dtype)
    spec = spec_of(tensor)
    meta = spec.tensor_meta
    assert meta is not None
    spec = spec if meta.dtype == dtype else replace(spec, tensor_meta=meta._replace(dtype=dtype))
    new: torch.Tensor = new_dtensor(tensor_bytes.new_like(dtensor.local_tensor(tensor), dtype), spec)
    new.__class__ = type(tensor)
    return new


def is_like(value: object, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``value`` has the class, dtype, shape, device and placements that ``new_like`` would give it."""
    kind = type(tensor) if isinstance(tensor, DTensor) else torch.Tensor
    if type(value) is not kind or not isinstance(value, torch.Tensor):
        return False
    if isinstance(value, DTensor) and isinstance(tensor, DTensor) and _sharding(value) != _sharding(tensor):
        return False
    local, like = dtensor.local_tensor(value), dtensor.local_tensor(tensor)  # quicker to ask than DTensors
    return (
        type(local) is torch.Tensor
        and (local.dtype, local.device, local.shape) == (dtype, like.device, like.shape)
        and dtensor.shape_of(value) == dtensor.shape_of(tensor)
        and (local.layout is torch.strided and local.is_contiguous())
        and not value.requires_grad
    )


def local_views(tensor: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
    """Return the boxes of a tensor on this rank, each with the view of local memory that holds it."""
    local = local_tensor(tensor)
    return [(part.box, view_at(local, part.local)) for part in parts_of(tensor, this_rank())]


def copy_slice(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy the local part of a full tensor into a sharded parameter."""
    for box, view in local_views(parameter):
        view.copy_(view_at(full, box))


@lru_cache(maxsize=65536)
def parts_within(parts: tuple[Part, ...], region: Box) -> tuple[Part, ...]:
    """Return the intersections of parts with a region of the local tensor, in the region's coordinates."""
    cut = []
    for part in parts:
        common = part.local.intersect(region)
        if common is not None:
            box = common.within(part.local).shift(part.box.start)
            cut.append(Part(box, common.within(region).start))
    return tuple(cut)


def view_at(local: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of ``local`` at a box in local coordinates. 0-dim tensors work; an empty box may lie anywhere."""
    if box.stop == tuple(local.shape) and not any(box.start):
        return local
    if not box.numel:
        return local.new_empty(box.shape)
    for dim, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        if (start, stop) != (0, local.shape[dim]):
            local = local.narrow(dim, start, stop - start)
    return local


@lru_cache(maxsize=4096)
def _layout(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> Layout:
    axes, order = _axes(mesh)
    return Layout(axes, _cuts(mesh, placements, ndim), order)


def _axes(mesh: DeviceMesh) -> tuple[tuple[Axis, ...], tuple[int, ...] | None]:
    """Return the axes of a mesh and all its siblings in the root mesh, equal on every rank, and the order of ranks."""
    siblings = sibling_ranks(mesh)
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    axes = _lattice(siblings, names)
    if axes is not None:
        return axes, None
    order = siblings.flatten()
    by_position = _lattice(torch.arange(order.numel()).view_as(siblings), names)
    assert by_position is not None
    return by_position, tuple(order.tolist())


def _lattice(siblings: torch.Tensor, names: tuple[str, ...]) -> tuple[Axis, ...] | None:
    """Return axes such that ``(rank // stride) % size`` is each rank's coordinate; None if there are none."""
    axes = []
    for dim, (name, size) in enumerate(zip(names, siblings.shape[1:], strict=True), start=1):
        moved = siblings.movedim(dim, 0)
        stride = int((moved[1] - moved[0]).flatten()[0]) if size > 1 else 1
        coordinate = torch.arange(size).view(-1, *([1] * (siblings.ndim - 1)))
        if stride <= 0 or not bool((moved // stride % size == coordinate).all()):
            return None
        axes.append(Axis(name, size, stride))
    return tuple(axes)


def _cuts(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> tuple[DimShard, ...]:
    """Return cuts in order: plain shards left to right, then strided shards of a dim that a later axis splits, too,
    right to left."""
    direct: list[DimShard] = []
    deferred: list[DimShard] = []
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            continue
        if not isinstance(placement, Shard | StridedShard):
            raise StateError(f"a tensor with placement {placement} holds partial sums, which no box describes")
        if mesh.shape[axis] == 1:
            continue
        dim = placement.dim % ndim
        factor = getattr(placement, "split_factor", 1)
        later = 1
        for other, size in zip(placements[axis + 1 :], mesh.shape[axis + 1 :], strict=True):
            if isinstance(other, Shard | StridedShard) and other.dim % ndim == dim:
                later *= size
        if factor > 1 and factor == later:
            deferred.append(DimShard(axis, dim))
        elif factor > 1 and later > 1:
            raise StateError(f"placements {placements} on mesh {mesh} cut dim {dim} in a way that no layout describes")
        else:
            direct.append(DimShard(axis, dim, factor))
    return tuple(direct + deferred[::-1])
