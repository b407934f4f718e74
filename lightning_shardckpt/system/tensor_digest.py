"""Digests of the bits of tensors, and of their order, for comparisons within one run, on one type of device."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

_STEP = 0x1E3779B97F4A7C15  # odd: the sum of a later chunk can't cancel that of an earlier one
_CHUNK = 1 << 20  # words; a chunk with its keys and products fits into the cache of a GPU


def byte_view(tensor: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, as a flat view of uint8."""
    # a tensor of one element is contiguous whatever its strides are, with which ``view`` refuses another dtype
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def bit_digest(tensor: Tensor) -> Tensor:
    """Return a digest of the values of a dense tensor in row-major order: int64, 0-dim, on its device.

    Runs at the speed of memory and waits for no device: xxh3-64 of bytes in host memory, ``keyed_sum`` on others.
    """
    content = byte_view(tensor.detach().resolve_conj().resolve_neg().contiguous())
    if not content.is_cpu:
        return keyed_sum(content)
    digest = xxhash.xxh3_64_intdigest(content.numpy().data)
    return torch.tensor(digest - (digest >> 63 << 64))  # as a signed number


def keyed_sum(content: Tensor) -> Tensor:
    """Return the sum of the 32-bit words of ``content``, each times a random key of its position, modulo 2^64.

    Two contents that were not made to collide have the same sum with a probability of at most 2^-32.
    """
    if content.numel() % 4 or content.storage_offset() % 4:
        content = torch.nn.functional.pad(content, (0, -content.numel() % 4)).clone()
    keys, total = _keys(content.device), torch.zeros((), dtype=torch.int64, device=content.device)
    words = content.view(torch.int32)
    for chunk in (words[at : at + _CHUNK] for at in range(0, len(words), _CHUNK)):
        total = torch.add((chunk * keys[: len(chunk)]).sum(), total, alpha=_STEP)
    return total


def digest_values(digests: Iterable[Tensor]) -> list[int]:
    """Return digests as Python integers, in order; waits once for a device."""
    every = [*digests]
    device = next((digest.device for digest in every if not digest.is_cpu), torch.device("cpu"))
    values: list[int] = torch.stack([digest.to(device) for digest in every]).tolist() if every else []
    return values


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    low, high = -(1 << 63), (1 << 63) - 1
    with torch.inference_mode(False):  # the cached keys are used outside of inference mode, too
        return torch.randint(low, high, (_CHUNK,), generator=generator, device="cpu").bitwise_or_(1).to(device)
