"""A tensor's part on this rank: its boxes, its memory as host bytes, and copies in host memory.

A DTensor's mesh and placements become a ``Layout``. Axes may split a dim in another order than the placements: FSDP
over tensor parallelism (``StridedShard``) splits the tensor-parallel slice last although its mesh axis comes first.
torch's ``compute_local_shape_and_global_offset`` is wrong there for uneven dims (torch 2.13), so the boxes come from
``layout.py``, and are checked against the real local shape.

The bytes of a contiguous CPU tensor are used in place; others are copied to the host piece by piece, which bounds the
extra memory. An asynchronous save copies all tensors, into memory that later saves reuse, so that training can go on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, dropwhile
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.compat.dtensor import StridedShard, new_dtensor, sibling_ranks, spec_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.layout import REPLICATED, Axis, Box, DimShard, Layout, Part, parts_of_rank
from lightning_shardckpt.format.value_checks import TORCH_NAMES
from lightning_shardckpt.system.host import allocate_pages, prefer_huge_pages

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in TORCH_NAMES.items()}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ALIGN = 64  # a cache line; also a multiple of every item size
_WINDOW_BYTES = 64 << 20  # copied from a GPU at a time
_AT_ONCE = 1 << 20  # bytes: as doubles they still fit into a cache


def is_elsewhere(value: object) -> bool:
    """Return whether a value is a placeholder for a tensor of another pipeline stage."""
    return getattr(type(value), "is_elsewhere", False)


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Return the stored name of a tensor's dtype; ``name`` names the tensor in errors.

    Raises:
        StateError: for a dtype or a tensor layout that cannot be stored, and a tensor of another pipeline stage.
    """
    refuse_compound(tensor, name)
    if is_elsewhere(tensor):
        raise StateError(
            f"{name}: the value of this tensor is on another pipeline stage. Keep what is computed from parameters in "
            "a dict by their names: each stage saves the entries of its own parameters."
        )
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise StateError(
            f"{name}: a tensor of {tensor.dtype} cannot be stored; only {sorted(DTYPES.values())}: return "
            "tensor.view(torch.uint8) from the state_dict that holds it"
        )
    if tensor.is_meta:
        raise StateError(f"{name}: the tensor is on the meta device, it has no values to store")
    return dtype


def refuse_compound(tensor: torch.Tensor, name: str) -> None:
    """Refuse a tensor without dense memory of its own: sparse, nested, or a wrapper subclass such as torchao's."""
    local = tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else dtensor.local_tensor(tensor)
    kind = type(local)
    if hasattr(kind, "__tensor_flatten__"):
        raise StateError(
            f"{name}: a {kind.__module__}.{kind.__qualname__} is made of other tensors and can't be stored. Keep it in "
            "full precision, or store the tensors inside or tensor.dequantize() in its place."
        )
    if local.layout is not torch.strided or local.is_nested:
        described = "nested" if local.is_nested else local.layout
        raise StateError(f"{name}: a {described} tensor cannot be stored; only dense tensors can")


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the row-major bytes of a tensor, without a copy if possible."""
    plain = tensor if is_host_memory(tensor) else tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return bytes_of(plain)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor; it keeps the memory alive."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())  # four calls of torch less than by numpy
    memory.owner = tensor  # type: ignore[attr-defined]  # the view refers to `memory`, which must keep the tensor
    return memoryview(memory).cast("B")


def largest_difference(a: memoryview, b: memoryview, dtype: str) -> tuple[float, float]:
    """Return the largest difference of the elements of two tensors, and the largest finite element of the first.

    The difference is infinite where an element is infinite or NaN in one alone.
    """
    distance = size = 0.0
    kind = torch.complex128 if dtype.startswith("C") else torch.float64
    for at in range(0, a.nbytes, _AT_ONCE):
        parts = (torch.frombuffer(data[at : at + _AT_ONCE], dtype=TORCH_DTYPES[dtype]) for data in (a, b))
        first, second = (part.to(kind) for part in parts)
        apart = (second - first).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        apart[(first == second) | (first.isnan() & second.isnan())] = 0.0
        distance = max(distance, float(apart.max()))
        size = max(size, float(first.abs().where(first.isfinite(), 0.0).max()))
    return distance, size


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``bytes_of`` accepts the tensor."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# ── layouts and boxes ─────────────────────────────────────────────────────────────────────────────────────────────────


def layout_of(tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor over the world; a plain tensor is replicated.

    Raises:
        StateError: for a ``Partial`` placement, and for placements that no layout describes.
    """
    sharding = _sharding(tensor)
    return REPLICATED if sharding is None else _layout(*sharding, len(dtensor.shape_of(tensor)))


def _sharding(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Return mesh and placements, which are quicker to hash and compare than a DTensorSpec; None for a plain tensor."""
    return (spec_of(tensor).device_mesh, tuple(spec_of(tensor).placements)) if isinstance(tensor, DTensor) else None


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
    if (sharding := _sharding(tensor)) is None:
        return _whole(tensor.shape)
    return _parts(*sharding, dtensor.shape_of(tensor), dtensor.local_tensor(tensor).shape, rank)


@lru_cache(maxsize=65536)
def _whole(size: torch.Size) -> tuple[Part, ...]:
    return parts_of_rank(REPLICATED, tuple(size), 0)


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
    """Return an uninitialized tensor of the same class, shape, device and placements, in huge pages if possible."""
    new = torch.empty_like(dtensor.local_tensor(tensor), dtype=dtype, requires_grad=False)
    if new.is_cpu:
        prefer_huge_pages(new.data_ptr(), new.nbytes)
    if isinstance(tensor, DTensor):
        spec, meta = spec_of(tensor), spec_of(tensor).tensor_meta
        if meta is not None and meta.dtype != dtype:
            spec = replace(spec, tensor_meta=meta._replace(dtype=dtype))
        new = new_dtensor(new, spec)
        new.__class__ = type(tensor)
    return new


def is_like(value: Any, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether ``value`` has the class, dtype, shape, device and placements that ``new_like`` would give it."""
    if type(value) is not (type(tensor) if isinstance(tensor, DTensor) else torch.Tensor):
        return False
    local, like = dtensor.local_tensor(value), dtensor.local_tensor(tensor)  # quicker to ask than DTensors
    return (
        type(local) is torch.Tensor
        and (local.dtype, local.device, local.shape) == (dtype, like.device, like.shape)
        and (_sharding(value), dtensor.shape_of(value)) == (_sharding(tensor), dtensor.shape_of(tensor))
        and (local.layout is torch.strided and local.is_contiguous())
        and not value.requires_grad
    )


def copy_slice(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy the local part of a full tensor into a sharded parameter."""
    for part in parts_of(parameter, this_rank()):
        view_at(local_tensor(parameter), part.local).copy_(view_at(full, part.box))


@lru_cache(maxsize=65536)
def parts_within(parts: tuple[Part, ...], region: Box) -> tuple[Part, ...]:
    """Return the intersections of parts with a region of the local tensor, in the region's coordinates."""
    common = ((part, part.local.intersect(region)) for part in parts)
    return tuple(
        Part(box.within(part.local).shift(part.box.start), box.within(region).start)
        for part, box in common
        if box is not None
    )


def view_at(local: torch.Tensor, box: Box) -> torch.Tensor:
    """Return the view of ``local`` at a box in local coordinates. 0-dim tensors work; an empty box may lie anywhere."""
    if box.stop == tuple(local.shape) and not any(box.start):
        return local
    if not box.numel:
        return local.new_empty(box.shape)
    return local[tuple(map(slice, box.start, box.stop))]


@lru_cache(maxsize=4096)
def _layout(mesh: DeviceMesh, placements: tuple[Placement, ...], ndim: int) -> Layout:
    siblings = sibling_ranks(mesh)  # equal on every rank
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    axes, order = _lattice(siblings, names), None
    if axes is None:
        axes = _lattice(torch.arange(siblings.numel()).view_as(siblings), names)
        order = tuple(siblings.flatten().tolist())
    assert axes is not None
    return Layout(axes, _cuts(mesh, placements, ndim), order)


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
        rest = zip(placements[axis + 1 :], mesh.shape[axis + 1 :], strict=True)
        later = prod(n for other, n in rest if isinstance(other, Shard | StridedShard) and other.dim % ndim == dim)
        if factor > 1 and factor == later:
            deferred.append(DimShard(axis, dim))
        elif factor > 1 and later > 1:
            raise StateError(f"placements {placements} on mesh {mesh} cut dim {dim} in a way that no layout describes")
        else:
            direct.append(DimShard(axis, dim, factor))
    return tuple(direct + deferred[::-1])


# ── copies in host memory ────────────────────────────────────────────────────────────────────────────────────────────


class _PinnedPages(mmap.mmap):
    """Pages that stay pinned for as long as tensors use them."""

    address = 0  # of pinned ones

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]  # torch's


def _allocate(nbytes: int, *, pinned: bool) -> torch.Tensor:
    """Return memory of exactly ``nbytes``; a GPU copies to pinned memory asynchronously.

    torch's own pinned memory, for a driver that refuses to pin pages, has a power of two of bytes, and is never freed.
    """
    if not pinned:
        return torch.frombuffer(allocate_pages(nbytes), dtype=torch.uint8)
    pages = _PinnedPages(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), len(pages), 0)):  # type: ignore[no-untyped-call]
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    pages.address = memory.data_ptr()
    return memory


class HostMemory:
    """Reusable host memory for copies of tensors, which grows to the largest size needed and does not shrink."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._specs: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._copies: list[torch.Tensor] = []

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return contiguous copies of tensors when all are complete; they are valid until the next call.

        They are the same tensors as those of the last call if dtypes, shapes and devices are equal. Copies from a GPU
        run on the current stream.
        """
        specs = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        if specs != self._specs:
            self._specs, self._copies = [], []  # drop views, so that the old memory can be freed
            ends = list(accumulate((-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors), initial=0))
            with torch.inference_mode(False):
                if self._memory.numel() < ends[-1] or (devices and not self._memory.is_pinned()):
                    self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before the new is allocated
                    self._memory = _allocate(ends[-1], pinned=bool(devices))
                parts = (self._memory[at : at + one.nbytes] for one, at in zip(tensors, ends, strict=False))
                self._copies = [part.view(one.dtype).view(one.shape) for part, one in zip(parts, tensors, strict=True)]
            self._specs = specs
        with torch.no_grad():
            for tensor, copy in zip(tensors, self._copies, strict=True):
                copy.copy_(tensor, non_blocking=bool(devices))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return list(self._copies)


class HostWindows:
    """Bytes of tensors in host memory; tensors on a GPU are copied a window at a time, with one wait for each.

    A window's memory stays valid while its bytes are in use. ``tensors`` are by an id, roughly in the order in which
    their bytes are requested.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors, self._copies = tensors, dict[int, torch.Tensor]()

    def bytes_of(self, tensor_id: int) -> memoryview:
        """Return the bytes of a tensor, row-major."""
        if self._tensors[tensor_id].is_cuda and tensor_id not in self._copies:
            window, nbytes = dict[int, torch.Tensor](), 0
            for other in dropwhile(tensor_id.__ne__, self._tensors):
                tensor = self._tensors[other]
                nbytes += tensor.nbytes if tensor.is_cuda else 0
                if window and nbytes > _WINDOW_BYTES:
                    break
                window |= {other: tensor} if tensor.is_cuda else {}
            self._copies = {}  # so that the memory can be freed
            self._copies = dict(zip(window, HostMemory().copy([*window.values()]), strict=True))
        return host_bytes(self._copies.get(tensor_id, self._tensors[tensor_id]))
