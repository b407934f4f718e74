"""Digests that do not depend on how tensors are sharded: sums over elements, keyed by their positions. Pure.

As a digest is linear in the bytes, that of a tensor is the sum of those of its boxes, whoever has them, and that of a
component the sum of what its tensors add. ``box_digest`` computes them. FORMAT.md has the definition.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import xxhash

from lightning_shardckpt.format.box import Shape

WORD_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TensorDigest:
    """A digest, or the part of it that comes from some of the elements: two sums modulo 2^64.

    >>> str(TensorDigest(1, 2) + TensorDigest(3, 4))
    '00000000000000040000000000000006'
    """

    low: int = 0
    high: int = 0

    def __add__(self, other: TensorDigest) -> TensorDigest:
        return TensorDigest((self.low + other.low) & WORD_MASK, (self.high + other.high) & WORD_MASK)

    def __str__(self) -> str:
        return f"{self.low:016x}{self.high:016x}"

    @classmethod
    def parse(cls, text: str) -> TensorDigest:
        """Return the digest that ``str`` wrote as 32 hexadecimal digits."""
        return cls(int(text[:16], 16), int(text[16:], 16))

    def times(self, mark: TensorDigest) -> TensorDigest:
        """Return the product with the keys that a mark gives, so that parts of other names add otherwise."""
        return TensorDigest(self.low * (mark.low | 1) & WORD_MASK, self.high * (mark.high | 1) & WORD_MASK)


def mark_of(*words: object) -> TensorDigest:
    """Return what tells a name from others: xxh3-128 of its words, one on a line each."""
    found = xxhash.xxh3_128_intdigest("\n".join(map(str, words)).encode())
    return TensorDigest(found & WORD_MASK, found >> 64)


def tensor_mark(name: str, dtype: str, shape: Shape) -> TensorDigest:
    """Return what a tensor adds to its component's digest besides its digest times this, so that zeros count, too."""
    return mark_of(name, dtype, ",".join(map(str, shape)))


def total(digests: Iterable[TensorDigest]) -> TensorDigest:
    """Return the sum of digests."""
    return sum(digests, TensorDigest())
