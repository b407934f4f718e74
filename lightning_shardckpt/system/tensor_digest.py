"""Digests of the bits of tensors, by which ranks see that they have the same, and one rank that values have changed.

They depend on where each bit is, so another order of equal values has another digest. Only digests that were taken in
one run can be compared, of tensors on devices of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch
import xxhash
from torch import Tensor

_STEP = 0x1E3779B97F4A7C15  # odd: what a later chunk has can't cancel what an earlier one has
_CHUNK = 1 << 20  # words; with their keys and products they fit into the cache of a GPU


@torch.no_grad()
def bit_digest(tensor: Tensor) -> Tensor:
    """Return a digest of the values of a dense tensor, in row-major order, whatever its shape, dtype and strides.

    As fast as memory is read; waits for no device.

    Returns:
        Int64, 0-dim, on the tensor's device: xxh3-64 of bytes in host memory, else ``keyed_sum``.
    """
    content = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if not content.is_cpu:
        return keyed_sum(content)
    found = xxhash.xxh3_64_intdigest(content.numpy().data)
    return torch.tensor(found - (found >> 63 << 64))


def keyed_sum(content: Tensor) -> Tensor:
    """Return the sum of 32-bit words of bytes, each times a random number of its place; wraps around at 64 bits.

    So two contents that were not made to collide have the same sum with a chance of 2^-32 at most.
    """
    if content.numel() % 4 or content.storage_offset() % 4:
        content = torch.nn.functional.pad(content, (0, -content.numel() % 4)).clone()
    keys, total = _keys(content.device), torch.zeros((), dtype=torch.int64, device=content.device)
    words = content.view(torch.int32)
    for chunk in (words[at : at + _CHUNK] for at in range(0, len(words), _CHUNK)):
        total = torch.add((chunk * keys[: len(chunk)]).sum(), total, alpha=_STEP)
    return total


def numbers(digests: Iterable[Tensor]) -> list[int]:
    """Return the values of digests; waits once for each device."""
    places: dict[torch.device, dict[int, Tensor]] = {}
    for place, digest in enumerate(digests):
        places.setdefault(digest.device, {})[place] = digest
    found: dict[int, int] = {}
    for of_device in places.values():
        found |= zip(of_device, torch.stack([*of_device.values()]).tolist(), strict=True)
    return [found[place] for place in sorted(found)]


@lru_cache(maxsize=16)
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    low, high = -(1 << 63), (1 << 63) - 1
    with torch.inference_mode(False):  # they are kept
        return torch.randint(low, high, (_CHUNK,), generator=generator, device="cpu").bitwise_or_(1).to(device)
