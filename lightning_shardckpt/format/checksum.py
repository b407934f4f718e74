"""Checksums of the format: xxh3-64 as 16 hexadecimal digits; the checksums of many blocks are one string.

A large checkpoint has millions of blocks, so a string of their checksums is read, compared and written without being
split.
"""

from __future__ import annotations

from functools import lru_cache

import xxhash

DIGITS = 16
_MAX_CACHED_BLOCKS = 256  # per tensor; checkpoints of other writers may have more and smaller blocks


def checksum(*parts: bytes | memoryview) -> str:
    """Return the xxh3-64 of the concatenated parts as 16 hex digits.

    >>> checksum(b"abc") == checksum(b"a", b"bc")
    True
    """
    if len(parts) == 1:
        return xxhash.xxh3_64_hexdigest(parts[0])
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def checksum_blocks(data: memoryview, block: int) -> str:
    """Return the checksums of all blocks of ``block`` bytes as one string; the last block may be shorter.

    >>> checksum_blocks(memoryview(b"abc"), 2) == checksum(b"ab") + checksum(b"c")
    True
    """
    digest = xxhash.xxh3_64_hexdigest  # called directly, since there are many blocks
    if 0 < len(data) <= block:  # a fast path for small tensors, which are many
        return digest(data)
    return "".join([digest(data[part]) for part in _block_slices(len(data), block)])


def slice_checksums(checksums: str, first: int, count: int) -> str:
    """Return ``count`` of the checksums, from block number ``first`` on.

    >>> slice_checksums("a" * 16 + "b" * 16 + "c" * 16, 1, 1)
    'bbbbbbbbbbbbbbbb'
    """
    return checksums[first * DIGITS : (first + count) * DIGITS]


def _block_slices(nbytes: int, block: int) -> tuple[slice, ...]:
    slices = _cached_slices if nbytes <= _MAX_CACHED_BLOCKS * block else _cached_slices.__wrapped__
    return slices(nbytes, block)


@lru_cache(maxsize=1024)
def _cached_slices(nbytes: int, block: int) -> tuple[slice, ...]:
    """Return the slices of all blocks of ``nbytes`` bytes; building them takes as long as hashing a block of 4 KB."""
    return tuple([slice(at, at + block) for at in range(0, nbytes, block)])
