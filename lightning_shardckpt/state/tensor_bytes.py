"""Tensor memory as host bytes, copies of tensors in host memory, and the stored names of dtypes.

A contiguous CPU tensor is used in place. Any other tensor is copied to the host piece by piece, which bounds the extra
memory. An asynchronous save copies all tensors into memory that later saves reuse, so that training can go on.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from lightning_shardckpt.compat.torch_tensors import local_part
from lightning_shardckpt.errors import StateError
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
    local = tensor if type(tensor) in (torch.Tensor, torch.nn.Parameter) else local_part(tensor)
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
    """Return the row-major bytes of a tensor, without a copy if possible. They keep the memory alive."""
    plain = tensor if is_host_memory(tensor) else tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    return bytes_of(plain)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
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


def new_like(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor like a local one; large host memory uses huge pages if available."""
    new = torch.empty_like(local, dtype=dtype, requires_grad=False)
    if new.is_cpu:
        prefer_huge_pages(new.data_ptr(), new.nbytes)
    return new


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Return whether ``bytes_of`` accepts the tensor."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# ── copies in host memory ────────────────────────────────────────────────────────────────────────────────────────────


class _PinnedPages(mmap.mmap):
    """Pages that stay pinned for as long as tensors use them."""

    address = 0  # of pinned ones

    def __del__(self) -> None:
        if self.address:
            torch.cuda.cudart().cudaHostUnregister(self.address)  # type: ignore[no-untyped-call]  # torch's


def _allocate(nbytes: int) -> torch.Tensor:
    return torch.frombuffer(allocate_pages(nbytes), dtype=torch.uint8)


def _allocate_pinned(nbytes: int) -> torch.Tensor:
    """Return pinned memory of exactly ``nbytes``, to which a GPU copies asynchronously.

    torch's own allocator, for a driver that refuses to pin pages, rounds up to a power of two, and does not return
    freed memory to the system.
    """
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
            with torch.inference_mode(False):
                self._copies = self._divide(tensors, pinned=bool(devices))
            self._specs = specs
        with torch.no_grad():
            for tensor, copy in zip(tensors, self._copies, strict=True):
                copy.copy_(tensor, non_blocking=bool(devices))
        for device in devices:
            torch.cuda.current_stream(device).synchronize()
        return list(self._copies)

    def _divide(self, tensors: Sequence[torch.Tensor], *, pinned: bool) -> list[torch.Tensor]:
        ends = list(accumulate((-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors), initial=0))
        if self._memory.numel() < ends[-1] or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before the new is allocated
            allocate = _allocate_pinned if pinned else _allocate
            self._memory = allocate(ends[-1])
        parts = (self._memory[begin : begin + tensor.nbytes] for tensor, begin in zip(tensors, ends, strict=False))
        return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


class HostWindows:
    """Bytes of tensors in host memory; tensors on a GPU are copied a window at a time, with one wait for each.

    A window's memory stays valid while its bytes are in use.

    Args:
        tensors: by an id, roughly in the order in which their bytes are requested.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self._tensors, self._copies = tensors, dict[int, torch.Tensor]()
        self._order = [tensor_id for tensor_id, tensor in tensors.items() if tensor.is_cuda]

    def bytes_of(self, tensor_id: int) -> memoryview:
        """Return the bytes of a tensor, row-major."""
        if self._tensors[tensor_id].is_cuda and tensor_id not in self._copies:
            self._copies, at = {}, self._order.index(tensor_id)
            window, nbytes = [tensor_id], self._tensors[tensor_id].nbytes
            for other in self._order[at + 1 :]:
                nbytes += self._tensors[other].nbytes
                if nbytes > _WINDOW_BYTES:
                    break
                window.append(other)
            copies = HostMemory().copy([self._tensors[each] for each in window])
            self._copies = dict(zip(window, copies, strict=True))
        return host_bytes(self._copies.get(tensor_id, self._tensors[tensor_id]))
