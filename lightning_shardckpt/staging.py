"""How does tensor memory become host bytes, and back?

A contiguous CPU tensor is its own host memory. Everything else passes through one host copy of the piece at hand,
so that the extra memory is bounded by the largest piece. The CUDA path is plain ``Tensor.to`` and ``copy_``.
Where writing goes on while training does, everything is copied first, into memory that one save leaves to the next.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from lightning_shardckpt.errors import StateError

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


def dtype_name(tensor: torch.Tensor, what: str) -> str:
    """The stored name of a tensor's dtype; ``what`` names the tensor in the error.

    Raises:
        StateError: for a dtype or a tensor layout that the format does not hold.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in DTYPES:
        known = sorted(DTYPES.values())
        found = f"{tensor.layout} tensor of {tensor.dtype}"
        raise StateError(f"{what}: a {found} cannot be stored; only dense ones of {known}")
    if tensor.is_meta:
        raise StateError(f"{what}: the tensor is on the meta device, it has no values to store")
    return DTYPES[tensor.dtype]


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Row-major bytes of a tensor, without a copy where its memory already is that. Keeps the memory alive."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return bytes_of(tensor.to("cpu").contiguous())


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The writable memory of a contiguous CPU tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    if nbytes == 0:
        return memoryview(bytearray())
    memory = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    memory.owner = tensor  # type: ignore[attr-defined]  # the view refers to `memory`, which must keep the tensor
    return memoryview(memory).cast("B")


def is_host_memory(tensor: torch.Tensor) -> bool:
    """Whether ``bytes_of`` can give the tensor's own memory."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


class HostMemory:
    """Host memory that is used again and again; it grows to what was needed most and stays so large."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Contiguous copies of tensors as they are now; valid until the next call.

        Returns when the copies are done. For tensors on a GPU the memory is pinned and the copies run in the order of
        the current stream; that path has not been run by the tests.
        """
        begins, end = [], 0
        for tensor in tensors:
            begins.append(end)
            end += -(-tensor.numel() * tensor.element_size() // _ALIGN) * _ALIGN
        devices = {tensor.device for tensor in tensors if tensor.is_cuda}
        with torch.no_grad():
            self._grow(end, pinned=bool(devices))
            copies = []
            for tensor, begin in zip(tensors, begins, strict=True):
                part = self._memory[begin : begin + tensor.numel() * tensor.element_size()]
                copy = part.view(tensor.dtype).view(tensor.shape)
                copies.append(copy.copy_(tensor, non_blocking=tensor.is_cuda))
            for device in devices:
                torch.cuda.synchronize(device)
        return copies

    def _grow(self, nbytes: int, *, pinned: bool) -> None:
        if self._memory.numel() < nbytes or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old before there is the new
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
