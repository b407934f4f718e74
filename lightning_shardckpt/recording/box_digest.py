"""A digest of a box of a tensor that adds up over boxes, keyed by the place of each element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MASK = (1 << 64) - 1
_SEEDS = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """Two 64-bit sums."""

    low: int
    high: int

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.low + other.low) & _MASK, (self.high + other.high) & _MASK)

    def __str__(self) -> str:
        return f"{self.low:016x}{self.high:016x}"


def element_keys(start: Sequence[int], lengths: Sequence[int], seed: int) -> NDArray[np.uint64]:
    """Return a pseudo-random odd number for each element of a box, by its place in the whole tensor."""
    keys = np.full((1,) * len(lengths), seed, np.uint64)
    for dim, (first, length) in enumerate(zip(start, lengths, strict=True)):
        places = np.arange(first, first + length, dtype=np.uint64).reshape([-1] + [1] * (len(lengths) - dim - 1))
        keys = _mixed(keys ^ (places + np.uint64(dim + 1)) * np.uint64(_SEEDS[1]))
    return (keys | np.uint64(1)).reshape(-1)


def _mixed(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finalizer of splitmix64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def digest_of_box(
    data: NDArray[np.uint8], itemsize: int, start: tuple[int, ...], lengths: tuple[int, ...]
) -> TensorDigest:
    """Return the digest of a box's elements.

    Args:
        data: their bytes, row-major.
        itemsize: bytes per element.
        start: the box's corner in the whole tensor.
        lengths: its lengths per dim.
    """
    padded = np.zeros((len(data) // itemsize, -(-itemsize // 8) * 8), np.uint8)
    padded[:, :itemsize] = data.reshape(-1, itemsize)
    words = padded.view(np.uint64)  # a row for each element
    sums = []
    for seed in _SEEDS:
        keys = element_keys(start, lengths, seed)
        column = [int((words[:, i] * (keys + np.uint64(2 * i))).sum(dtype=np.uint64)) for i in range(words.shape[1])]
        sums.append(sum(column) & _MASK)
    return TensorDigest(*sums)
