"""How does a tensor change its dtype on its way, a window at a time? As torch's ``Tensor.to`` does it."""

from __future__ import annotations

from functools import cache

import torch

from lightning_shardckpt.header import DTYPE_BYTES
from lightning_shardckpt.regions import Conversion
from lightning_shardckpt.staging import TORCH_DTYPES, host_bytes


@cache
def conversion(stored: str, written: str) -> Conversion:
    """How bytes of one dtype become those of another, rounded to nearest even; by names in safetensors."""
    before, after = TORCH_DTYPES[stored], TORCH_DTYPES[written]

    def convert(data: memoryview) -> memoryview:
        return host_bytes(torch.frombuffer(data, dtype=before).to(after))

    return Conversion(convert, DTYPE_BYTES[stored], DTYPE_BYTES[written])
