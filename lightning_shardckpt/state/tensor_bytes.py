"""Tensor memory as host bytes, copies of tensors in host memory, and the stored names of dtypes.

A contiguous CPU tensor is used in place. Any other tensor is copied to the host piece by piece, so that the extra
memory is bounded by the largest piece. An asynchronous save copies all tensors into memory that later saves reuse, so
that training can go on. A synchronous save copies only tensors on a GPU, a window at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence

import torch

from lightning_shardckpt.compat.torch_tensors import local_part
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.value_checks import TORCH_NAMES
from lightning_shardckpt.system.host import allocate_pages, prefer_huge_pages

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in TORCH_NAMES.items()}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ALIGN = 64  # a cache line; also a multiple of every item size
_WINDOW_BYTES = 64 << 20  # copied from a GPU at a time; torch pins powers of two


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
    local = local_part(tensor)
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
    if is_host_memory(tensor):
        return bytes_of(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(tensor.to("cpu").contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable memory of a contiguous CPU tensor."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view refers to `memory`, which must keep the tensor
    return memoryview(memory).cast("B")


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
    """Pinned memory of exactly the requested size, to which a GPU copies asynchronously.

    torch's own allocator of pinned memory rounds up to a power of two, and does not return freed memory to the system.
    """

    _address = 0

    @classmethod
    def of(cls, nbytes: int) -> _PinnedPages | None:
        """Return pinned memory of ``nbytes``; None if the driver refuses to pin it."""
        pages = cls(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages._address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(pages._address, len(pages), 0))  # type: ignore[no-untyped-call]  # torch's
        if not error:
            return pages
        pages._address = 0
        return None

    def __del__(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]  # torch's


class HostMemory:
    """Reusable host memory, which grows to the largest size needed and does not shrink.

    Args:
        is_temporary: True for small memory that is soon freed, which comes from torch's caching allocator.
    """

    def __init__(self, *, is_temporary: bool = False) -> None:
        self._is_temporary = is_temporary
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._specs: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._parts: list[torch.Tensor] = []

    def empty_like(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return uninitialized contiguous tensors with the dtypes and shapes of ``tensors``, valid until the next call.

        Returns the same tensors as the last call if dtypes, shapes and devices are equal. Pinned if any tensor is on a
        GPU.
        """
        specs = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        if specs != self._specs:
            self._specs, self._parts = [], []  # drop views, so that the old memory can be freed
            with torch.inference_mode(False):
                self._parts = self._divide(tensors)
            self._specs = specs
        return list(self._parts)

    def _divide(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._grow(end, pinned=any(tensor.is_cuda for tensor in tensors))
        parts = (self._memory[begin : begin + t.nbytes] for t, begin in zip(tensors, begins, strict=True))
        return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _grow(self, nbytes: int, *, pinned: bool) -> None:
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old memory before the new is allocated
            registered = _PinnedPages.of(nbytes) if pinned and not self._is_temporary else None
            if registered is not None:
                self._memory = torch.frombuffer(registered, dtype=torch.uint8)
            elif pinned:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.frombuffer(allocate_pages(nbytes), dtype=torch.uint8)


class HostWindows:
    """Bytes of tensors in host memory; tensors on a GPU are copied a window at a time.

    The host waits for the device once per window instead of once per tensor. A window's memory stays valid while its
    bytes are in use; then torch's allocator of pinned memory reuses it.

    Args:
        tensors: by an id, roughly in the order in which their bytes are requested.
        window_bytes: the largest size of a window of more than one tensor.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor], window_bytes: int = _WINDOW_BYTES) -> None:
        self._tensors, self._window_bytes = tensors, window_bytes
        self._order = [tensor_id for tensor_id, tensor in tensors.items() if tensor.is_cuda]
        self._positions = {tensor_id: position for position, tensor_id in enumerate(self._order)}
        self._copies: dict[int, torch.Tensor] = {}

    def bytes_of(self, tensor_id: int) -> memoryview:
        """Return the bytes of a tensor, row-major."""
        if tensor_id in self._positions and tensor_id not in self._copies:
            self._copies = {}  # lets the next window reuse the memory
            self._copies = self._copy_window(self._positions[tensor_id])
        return host_bytes(self._copies.get(tensor_id, self._tensors[tensor_id]))

    def _copy_window(self, first: int) -> dict[int, torch.Tensor]:
        window, nbytes = [self._order[first]], self._tensors[self._order[first]].nbytes
        for tensor_id in self._order[first + 1 :]:
            nbytes += -(-self._tensors[tensor_id].nbytes // _ALIGN) * _ALIGN
            if nbytes > self._window_bytes:
                break
            window.append(tensor_id)
        tensors = [self._tensors[tensor_id] for tensor_id in window]
        copies = HostMemory(is_temporary=nbytes <= self._window_bytes or len(window) > 1).empty_like(tensors)
        copy_all(tensors, copies)
        return dict(zip(window, copies, strict=True))


def copy_all(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Copy ``tensors`` to ``copies``; returns when all copies are complete. GPU copies run on the current stream."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor, non_blocking=bool(devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
