"""The checksum of the format: xxh3-64, as 16 hexadecimal digits."""

from __future__ import annotations

import xxhash


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


def block_checksums(data: memoryview, block: int) -> tuple[str, ...]:
    """The checksum of every ``block`` bytes, of which the last may be fewer; an empty tuple for no bytes."""
    digest = xxhash.xxh3_64_hexdigest  # not ``checksum``: there are many blocks
    if 0 < len(data) <= block:  # of a small tensor: there are many of them, too
        return (digest(data),)
    return tuple([digest(data[at : at + block]) for at in range(0, len(data), block)])
