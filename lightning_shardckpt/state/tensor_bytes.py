"""Tensor memory as host bytes, and the stored names of dtypes.

A contiguous CPU tensor is used in place. Any other tensor is copied to the host piece by piece, so that the extra
memory is bounded by the largest piece. CUDA tensors are copied by ``Tensor.to``.
"""

from __future__ import annotations

import ctypes

import torch

from lightning_shardckpt.compat.torch_tensors import local_part
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.value_checks import TORCH_NAMES
from lightning_shardckpt.system.memory import prefer_huge_pages

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, of_torch) for name, of_torch in TORCH_NAMES.items()}
DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def dtype_name(tensor: torch.Tensor, name: str) -> str:
    """Return the stored name of a tensor's dtype; ``name`` names the tensor in errors.

    Raises:
        StateError: for a dtype or a tensor layout that cannot be stored.
    """
    refuse_compound(tensor, name)
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = f"{'nested' if tensor.is_nested else tensor.layout} tensor of {tensor.dtype}"
        raw = "; return tensor.view(torch.uint8) from the state_dict that holds it" if dtype is None else ""
        raise StateError(f"{name}: a {kind} cannot be stored; only dense ones of {sorted(DTYPES.values())}{raw}")
    if tensor.is_meta:
        raise StateError(f"{name}: the tensor is on the meta device, it has no values to store")
    return dtype


def refuse_compound(tensor: torch.Tensor, name: str) -> None:
    """Refuse a wrapper subclass, such as a weight that torchao quantized: it has no memory of its own."""
    kind = type(local_part(tensor))
    if hasattr(kind, "__tensor_flatten__"):
        raise StateError(
            f"{name}: a {kind.__module__}.{kind.__qualname__} is made of other tensors and can't be stored. Keep it in "
            "full precision, or store the tensors inside or tensor.dequantize() in its place."
        )


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
