"""Copy what a save writes, so that training can go on.

An asynchronous save copies everything into host memory that one save leaves to the next. Parameters and optimizer
state, which only an optimizer's step changes, may be copied by a thread until then. Another save copies what is on a
GPU, a window at a time, and nothing else.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_shardckpt.checkpoint.plan_cache import SavePlan
from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.compat.torch_autograd import copy_each
from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.tensor_bytes import host_bytes
from lightning_shardckpt.system.page_memory import pages
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import Worker

_ALIGN = 64  # a cache line; also a multiple of every item size
_LISTED = 5


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
                self._memory = torch.frombuffer(pages(nbytes), dtype=torch.uint8)


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


class BackgroundCopies:
    """Copies of tensors that a thread makes while nobody changes them; that nobody does, from now on, is checked.

    An operation of torch that changes a tensor counts up its version. Not so, with torch 2.13, ``torch._foreach_…`` on
    DTensors, as optimizers use: ``wait`` before they step. What goes past torch's operations (``tensor.data``, memory
    shared with NumPy) is not seen either.

    Args:
        tensors: to copy.
        copies: where to.
        watched: tensors whose memory that is, and what an error calls them.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        copies: Sequence[torch.Tensor],
        watched: Sequence[tuple[str, torch.Tensor]],
    ) -> None:
        self._tensors, self._copies, self._watched = tensors, copies, watched
        self._versions = [version_of(tensor) for _, tensor in watched]
        self._ready = {device: _event(device) for device in {t.device for t in tensors if t.is_cuda}}
        self._lock, self._may_change = threading.Lock(), False
        self._changed: list[str] = []
        self._worker = Worker(self._copy, name="shardckpt-copy")
        self.held_s = 0.0
        """Seconds that training waited in ``hold``."""

    def start(self) -> None:
        """Begin to copy. To be called once, before anybody waits; or never, then nobody may."""
        self._worker.start_or_run()

    def hold(self) -> None:
        """Let training wait, as ``wait`` does, and count the seconds."""
        began = time.monotonic()
        self.wait()
        self.held_s += time.monotonic() - began

    def wait(self) -> None:
        """Wait until the copies are made; from then on the tensors may change. Raises nothing."""
        self._worker.wait()
        with self._lock:
            if not self._may_change:
                self._changed, self._may_change = self._find_changed(), True

    def check(self) -> None:
        """Wait, then make sure that no tensor was changed before the copies were made.

        To be called from any thread, and again later on: an operation that is under way counts only at its end.

        Raises:
            StateError: naming those that were.
        """
        self._worker.wait()
        if self._worker.error is not None:
            raise self._worker.error
        with self._lock:
            changed = self._changed if self._may_change else self._find_changed()
        if changed:
            more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
            raise StateError(
                f"{changed[:_LISTED]}{more} changed while being copied: with overlap_copy=True nothing but an "
                "optimizer's step may change parameters and optimizer state until a save has copied them. Leave it "
                "out, or call ShardCkptIO.wait_for_copies() before you change them."
            )

    def forget(self) -> None:
        """Let go of the tensors."""
        with self._lock:
            self._tensors, self._copies, self._watched = (), (), ()

    def _find_changed(self) -> list[str]:
        pairs = zip(self._watched, self._versions, strict=False)  # none, once they are forgotten
        return list(dict.fromkeys(name for (name, tensor), version in pairs if version_of(tensor) != version))

    def _copy(self) -> None:
        with ExitStack() as streams:
            for device, ready in self._ready.items():
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
                stream.wait_event(ready)
                streams.enter_context(torch.cuda.stream(stream))
            copy_all(self._tensors, self._copies)


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(device))
    return event


def parameters_of(optimizers: Mapping[str, Any]) -> set[str]:
    """The names of the parameters of optimizers, from their document."""
    groups = [group for one in optimizers.values() for group in one["groups"].values()]
    return {name for group in groups for name in group["params"]}


def unchanged_until_a_step(plan: SavePlan, leaves: dict[int, torch.Tensor], owned: set[str]) -> dict[int, str]:
    """The pieces that only an optimizer's step changes, by id, with their names.

    Not buffers, state of callbacks, nor parameters that no optimizer has, such as averages.
    """
    pieces = [piece for file in plan.files.get("model", ()) for piece in file.pieces if piece.key in owned]
    pieces += [piece for file in plan.files.get("optimizer", ()) for piece in file.pieces]
    return {id(piece): piece.key for piece in pieces if not leaves[id(piece)].is_inference()}


def versioned(leaf: torch.Tensor) -> list[torch.Tensor]:
    """A tensor and, for a DTensor, its local one: each has a version of its own."""
    return [leaf, dtensor.local_tensor(leaf)] if isinstance(leaf, DTensor) else [leaf]
