"""Convert tensors to another dtype a window at a time, as torch's ``Tensor.to`` does it."""

from __future__ import annotations

from functools import cache

import torch

from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, host_bytes
from lightning_shardckpt.transfer.regions import DtypeConversion


@cache
def conversion(stored: str, written: str) -> DtypeConversion:
    """Return how bytes of one dtype become those of another, rounded to nearest even; by names in safetensors."""
    before, after = TORCH_DTYPES[stored], TORCH_DTYPES[written]

    def convert(data: memoryview) -> memoryview:
        return host_bytes(torch.frombuffer(data, dtype=before).to(after))

    return DtypeConversion(convert, DTYPE_BYTES[stored], DTYPE_BYTES[written])
