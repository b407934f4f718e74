"""Checksums of the format: xxh3-64 as 16 hexadecimal digits; the checksums of many blocks are one string.

A large checkpoint has millions of blocks. In memory, checksums are separated exactly as in JSON, so that a string of
them is read, compared and written without being split.
"""

from __future__ import annotations

from functools import lru_cache

import xxhash

SEPARATOR = '","'
_DIGITS = 16
_PITCH = _DIGITS + len(SEPARATOR)
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

    >>> checksum_blocks(memoryview(b"abc"), 2) == checksum(b"ab") + SEPARATOR + checksum(b"c")
    True
    """
    digest = xxhash.xxh3_64_hexdigest  # called directly, since there are many blocks
    if 0 < len(data) <= block:  # a fast path for small tensors, which are many
        return digest(data)
    return SEPARATOR.join([digest(data[part]) for part in _block_slices(len(data), block)])


def count_checksums(checksums: str) -> int:
    """Return the number of checksums in a string of checksums."""
    return (len(checksums) + len(SEPARATOR)) // _PITCH


def slice_checksums(checksums: str, first: int, count: int) -> str:
    """Return ``count`` of the checksums, from block number ``first`` on.

    >>> slice_checksums(SEPARATOR.join(["a" * 16, "b" * 16, "c" * 16]), 1, 1)
    'bbbbbbbbbbbbbbbb'
    """
    begin = first * _PITCH
    return checksums[begin : begin + max(count * _PITCH - len(SEPARATOR), 0)]


def _block_slices(nbytes: int, block: int) -> tuple[slice, ...]:
    slices = _cached_slices if nbytes <= _MAX_CACHED_BLOCKS * block else _cached_slices.__wrapped__
    return slices(nbytes, block)


@lru_cache(maxsize=1024)
def _cached_slices(nbytes: int, block: int) -> tuple[slice, ...]:
    """Return the slices of all blocks of ``nbytes`` bytes; building them takes as long as hashing a block of 4 KB."""
    return tuple([slice(at, at + block) for at in range(0, nbytes, block)])
