"""How does tensor memory become host bytes, and back?

A contiguous CPU tensor is its own host memory. Everything else passes through one host copy of the piece at hand,
so that the extra memory is bounded by the largest piece. The CUDA path is plain ``Tensor.to`` and ``copy_``.
Where writing goes on while training does, everything is copied first, into memory that one save leaves to the next.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from contextlib import ExitStack

import torch

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.pages import pages, prefer_huge_pages
from lightning_shardckpt.threads import Done, NoThreadError, start

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
_ALIGN = 64  # a cache line; also a multiple of every item size
_LISTED = 5


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The stored name of a tensor's dtype; ``what`` names the tensor in the error.

    Raises:
        StateError: for a dtype or a tensor layout that the format does not hold.
    """
    local = getattr(tensor, "_local_tensor", tensor)
    if hasattr(type(local), "__tensor_flatten__"):  # its values are in other tensors; it has no memory to read
        kind = f"{type(local).__module__}.{type(local).__qualname__}"
        raise StateError(
            f"{what}: a {kind} is made of other tensors, and can be stored as a parameter, a buffer or in the state of "
            "an optimizer only. Return the tensors inside, or tensor.dequantize(), from the state_dict that holds it."
        )
    name = DTYPES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        known = sorted(DTYPES.values())
        found = f"{'nested' if tensor.is_nested else tensor.layout} tensor of {tensor.dtype}"
        raise StateError(f"{what}: a {found} cannot be stored; only dense ones of {known}")
    if tensor.is_meta:
        raise StateError(f"{what}: the tensor is on the meta device, it has no values to store")
    return name


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major bytes of a tensor, without a copy where its memory already is that. Keeps the memory alive."""
    if is_host_memory(tensor):
        return bytes_of(tensor)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(tensor.to("cpu").contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The writable memory of a contiguous CPU tensor."""
    nbytes = tensor.nbytes
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view refers to `memory`, which must keep the tensor
    return memoryview(memory).cast("B")


def new_like(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A tensor like a local one, without values; for much memory of the host, of huge pages where there are some."""
    found = torch.empty_like(local, dtype=dtype, requires_grad=False)
    if found.is_cpu:
        prefer_huge_pages(found.data_ptr(), found.nbytes)
    return found


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether ``bytes_of`` can give the tensor's own memory."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class HostMemory:
    """Host memory that is used again and again; it grows to what was needed most and stays so large."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def room(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous tensors like these, without their values, to copy them to; valid until the next call.

        For tensors on a GPU the memory is pinned; that path has not been run by the tests.
        """
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
            if pinned:
                self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            else:
                self._memory = torch.frombuffer(pages(nbytes), dtype=torch.uint8)


def copy_all(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    """Fill ``copies``; returns when they are there.

    From a GPU they run in the order of the current stream; that path has not been run by the tests.
    """
    with torch.no_grad():
        for tensor, copy in zip(tensors, copies, strict=True):
            copy.copy_(tensor, non_blocking=tensor.is_cuda)
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.current_stream(device).synchronize()


class CopiesBehind:
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
        self._versions = [tensor._version for _, tensor in watched]
        self._ready = {device: _event(device) for device in {t.device for t in tensors if t.is_cuda}}
        self._failure: BaseException | None = None
        self._lock, self._may_change = threading.Lock(), False
        self._changed: list[str] = []
        self._done = Done()  # Thread.join takes a thread for ended when it is interrupted (Python 3.11)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to copy. To be called once, before anybody waits; or never, then nobody may."""
        thread = threading.Thread(target=self._run, name="shardckpt-copy")
        try:
            start(thread)
            self._thread = thread
        except NoThreadError:  # then here
            self._run()

    def wait(self) -> None:
        """Until the copies are made; from then on the tensors may change. Raises nothing."""
        self._done.wait()
        if self._thread is not None:
            self._thread.join()
        with self._lock:
            if not self._may_change:
                self._changed, self._may_change = self._find_changed(), True

    def check(self) -> None:
        """Wait, then make sure that no tensor was changed before the copies were made.

        To be called from any thread, and again later on: an operation that is under way counts only at its end.

        Raises:
            StateError: naming those that were.
        """
        self._done.wait()
        if self._failure is not None:
            raise self._failure
        with self._lock:
            changed = self._changed if self._may_change else self._find_changed()
        if changed:
            more = f" and {len(changed) - _LISTED} more" if len(changed) > _LISTED else ""
            raise StateError(
                f"{changed[:_LISTED]}{more} changed while being copied: with overlap_copy=True nothing but an "
                "optimizer's step may change parameters and optimizer state behind a save. Leave it out, or call "
                "ShardCkptIO.wait_for_copies() before you change them."
            )

    def forget(self) -> None:
        """Let go of the tensors."""
        with self._lock:
            self._tensors, self._copies, self._watched = (), (), ()

    def _find_changed(self) -> list[str]:
        pairs = zip(self._watched, self._versions, strict=False)  # none, once they are forgotten
        return list(dict.fromkeys(name for (name, tensor), version in pairs if tensor._version != version))

    def _run(self) -> None:
        try:
            with ExitStack() as streams:
                for device, ready in self._ready.items():
                    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
                    stream.wait_event(ready)
                    streams.enter_context(torch.cuda.stream(stream))
                copy_all(self._tensors, self._copies)
        except BaseException as error:
            self._failure = error
        finally:
            self._done.set()


def _event(device: torch.device) -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
    event.record(torch.cuda.current_stream(device))
    return event
