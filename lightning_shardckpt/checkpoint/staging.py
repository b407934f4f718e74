"""Copy the tensors of a save to host memory.

An asynchronous save copies all tensors into memory that later saves reuse, so that training can go on. A synchronous
save copies only tensors on a GPU, a window at a time.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import torch

from lightning_shardckpt.state.tensor_bytes import host_bytes
from lightning_shardckpt.system.memory import allocate_pages

_ALIGN = 64  # a cache line; also a multiple of every item size
_WINDOW_BYTES = 64 << 20  # copied from a GPU at a time; torch pins powers of two


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
