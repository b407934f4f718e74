"""Copy what a save writes, so that training can go on.

An asynchronous save copies everything into host memory that one save leaves to the next. Another save copies what is on
a GPU, a window at a time, and nothing else.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

import torch

from lightning_shardckpt.compat.torch_autograd import copy_each
from lightning_shardckpt.state.tensor_bytes import host_bytes
from lightning_shardckpt.system.memory import allocate_pages
from lightning_shardckpt.system.tuning import TUNING, Tuning

_ALIGN = 64  # a cache line; also a multiple of every item size


class _Registered(mmap.mmap):
    """Pages to which a GPU copies while the host goes on: pinned, and no more of them than asked for.

    torch's allocator of pinned memory rounds up to a power of two, and keeps what was freed.
    """

    _address = 0

    @classmethod
    def of(cls, nbytes: int) -> _Registered | None:
        """Return so many bytes; None if the driver does not pin them."""
        found = cls(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        found._address = torch.frombuffer(found, dtype=torch.uint8).data_ptr()
        refused = int(torch.cuda.cudart().cudaHostRegister(found._address, len(found), 0))  # type: ignore[no-untyped-call]  # torch's
        if not refused:
            return found
        found._address = 0
        return None

    def __del__(self) -> None:
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]  # torch's


class HostMemory:
    """Host memory that is used again and again; it grows to what was needed most and stays so large.

    Args:
        is_passing: whether it is small and soon freed, so that torch's allocator should have it.
    """

    def __init__(self, *, is_passing: bool = False) -> None:
        self._is_passing = is_passing
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._kinds: list[tuple[torch.dtype, torch.Size, torch.device]] = []
        self._parts: list[torch.Tensor] = []

    def room(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous tensors like these, without their values, to copy them to; valid until the next call.

        For as many tensors of the same kinds as the last time they are the same. For tensors on a GPU the memory is
        pinned.
        """
        kinds = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
        if kinds != self._kinds:
            self._kinds, self._parts = [], []  # which know the memory
            with torch.inference_mode(False):
                self._parts = self._divided(tensors)
            self._kinds = kinds
        return list(self._parts)

    def _divided(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.nbytes // _ALIGN) * _ALIGN
        self._grow(end, pinned=any(tensor.is_cuda for tensor in tensors))
        parts = (self._memory[begin : begin + t.nbytes] for t, begin in zip(tensors, begins, strict=True))
        return [part.view(tensor.dtype).view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def _grow(self, nbytes: int, *, pinned: bool) -> None:
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before there is the new
            registered = _Registered.of(nbytes) if pinned and not self._is_passing else None
            if registered is not None:
                self._memory = torch.frombuffer(registered, dtype=torch.uint8)
            elif pinned:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.frombuffer(allocate_pages(nbytes), dtype=torch.uint8)


class HostWindows:
    """Bytes of tensors in host memory, to which those on a GPU are copied a window at a time.

    So the host waits for the device once for each window, not for each tensor. A window is memory of its own as long as
    bytes of it are in use; then torch's allocator of pinned memory gives it to a later one.

    Args:
        tensors: by the id by which they are asked for, about in the order in which they are.
        tuning: how large a window of more than one tensor may be.
    """

    def __init__(self, tensors: Mapping[int, torch.Tensor], tuning: Tuning = TUNING) -> None:
        self._tensors, self._window_bytes = tensors, tuning.device_window_bytes
        self._order = [of for of, tensor in tensors.items() if tensor.is_cuda]
        self._places = {of: place for place, of in enumerate(self._order)}
        self._copies: dict[int, torch.Tensor] = {}

    def bytes_of(self, of: int) -> memoryview:
        """Return the bytes of a tensor, row-major."""
        if of in self._places and of not in self._copies:
            self._copies = {}  # its memory can be used again
            self._copies = self._copied(self._places[of])
        return host_bytes(self._copies.get(of, self._tensors[of]))

    def _copied(self, first: int) -> dict[int, torch.Tensor]:
        window, nbytes = [self._order[first]], self._tensors[self._order[first]].nbytes
        for of in self._order[first + 1 :]:
            nbytes += -(-self._tensors[of].nbytes // _ALIGN) * _ALIGN
            if nbytes > self._window_bytes:
                break
            window.append(of)
        tensors = [self._tensors[of] for of in window]
        copies = HostMemory(is_passing=nbytes <= self._window_bytes or len(window) > 1).room(tensors)
        copy_all(tensors, copies)
        return dict(zip(window, copies, strict=True))


def copy_all(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Fill ``copies``; returns when they are there. From a GPU they run in the order of the current stream."""
    devices = {tensor.device for tensor in tensors if tensor.is_cuda}
    with torch.no_grad():
        copy_each(tensors, copies, non_blocking=bool(devices))
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
