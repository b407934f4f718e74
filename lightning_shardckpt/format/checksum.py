"""The checksum of the format: xxh3-64, as 16 hexadecimal digits; and those of many blocks, as one text.

A large checkpoint has millions of blocks. So what is between two of their checksums in memory is what JSON has there:
they are read, compared and written without being taken apart.
"""

from __future__ import annotations

from functools import lru_cache

import xxhash

BETWEEN = '","'
_DIGITS = 16
_PITCH = _DIGITS + len(BETWEEN)
_FEW = 256  # blocks whose places are remembered; a writer that we don't know may have had more, and smaller ones


def checksum(*parts: bytes | memoryview) -> str:
    """xxh3-64 of the concatenation, as 16 hex digits.

    >>> checksum(b"abc") == checksum(b"a", b"bc")
    True
    """
    if len(parts) == 1:
        return xxhash.xxh3_64_hexdigest(parts[0])
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def block_checksums(data: memoryview, block: int) -> str:
    """The checksum of every ``block`` bytes, of which the last may be fewer, as one text; empty for no bytes.

    >>> block_checksums(memoryview(b"abc"), 2) == checksum(b"ab") + BETWEEN + checksum(b"c")
    True
    """
    digest = xxhash.xxh3_64_hexdigest  # not ``checksum``: there are many blocks
    if 0 < len(data) <= block:  # of a small tensor: there are many of them, too
        return digest(data)
    return BETWEEN.join([digest(data[part]) for part in _parts(len(data), block)])


def count_of(checksums: str) -> int:
    """Return how many checksums a text has."""
    return (len(checksums) + len(BETWEEN)) // _PITCH


def from_number(checksums: str, first: int, count: int) -> str:
    """Return the checksums of some blocks, by the number of the first one.

    >>> from_number(BETWEEN.join(["a" * 16, "b" * 16, "c" * 16]), 1, 1)
    'bbbbbbbbbbbbbbbb'
    """
    begin = first * _PITCH
    return checksums[begin : begin + max(count * _PITCH - len(BETWEEN), 0)]


def _parts(nbytes: int, block: int) -> tuple[slice, ...]:
    return _known_parts(nbytes, block) if nbytes <= _FEW * block else _known_parts.__wrapped__(nbytes, block)


@lru_cache(maxsize=1024)
def _known_parts(nbytes: int, block: int) -> tuple[slice, ...]:
    """Return the blocks of so many bytes; to make slices anew takes as long as to hash a block of 4 KB."""
    return tuple([slice(at, at + block) for at in range(0, nbytes, block)])
