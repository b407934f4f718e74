"""Parts of thousands of pieces in a CRC-64 at once, in numpy. Pure.

That zeros follow a piece is a linear function of the 64 bits of its part: the XOR of what its 8 bytes become, each
looked up in a table of 256 entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import numpy
from awscrt.checksums import crc64nvme  # type: ignore[import-untyped]  # it has no py.typed
from numpy.typing import NDArray

from lightning_shardckpt.format.crc64 import ONES, joined, part

Parts: TypeAlias = NDArray[numpy.uint64]
Steps: TypeAlias = list[tuple[int, NDArray[numpy.intp]]]
"""How many bytes follow, and which pieces they follow."""

_FEW = 32  # parts: a call to join each of them costs less than a pass of numpy over all
_WORD = 8  # bytes
_SHORT_PITCH = 4096  # bytes: the CRC of what lies between pieces takes less time than to join their parts
_ROWS_BYTES = 1 << 18  # at a time, for the CPU's cache
_SHORT_BYTES = 192  # of a piece: lookups for all of them take less time than a call for each


def part_of_pieces(data: memoryview, nbytes: int, pitch: int) -> int:
    """Return the part of pieces of ``nbytes`` each, the next ones in ``data``, each ``pitch`` bytes after another."""
    pieces = numpy.frombuffer(data, numpy.uint8).reshape(-1, nbytes)
    if pitch <= _SHORT_PITCH:
        return _part_of_rows(pieces, pitch)
    if nbytes <= _SHORT_BYTES:
        parts = _parts_of_short(pieces)
    else:
        parts = ~parts_of([crc64nvme(piece, ONES) for piece in pieces])
    found = 0
    for one in _folded(parts, pitch, _FEW).tolist():
        found = joined(found, one, pitch)
    return found


def steps_of(nbytes: Sequence[int]) -> Steps:
    """Return the steps in which pieces are followed by so many bytes each, for ``followed``.

    Where many pieces have as many as others, those of each number at once; else the powers of two that add up to it.
    """
    after = numpy.array(nbytes, "<u8")
    powers = numpy.array([1 << bit for bit in range(int(after.max(initial=0)).bit_length())], "<u8")
    values = numpy.unique(after[after > 0])
    if len(values) <= len(powers):
        return [(int(value), numpy.flatnonzero(after == value)) for value in values]
    return [(int(power), numpy.flatnonzero(after & power)) for power in powers]


def followed(parts: Parts, steps: Steps) -> Parts:
    """Return the parts of pieces if as many bytes more follow each of them as ``steps`` were made of."""
    found = parts.copy()
    for nbytes, chosen in steps:
        found[chosen] = _followed(found[chosen], nbytes)
    return found


def parts_of(values: Sequence[int]) -> Parts:
    """Return parts as an array."""
    return numpy.array(values, "<u8")


def _part_of_rows(pieces: NDArray[numpy.uint8], pitch: int) -> int:
    """Return the part of pieces that are the ends of rows of ``pitch`` bytes, whose other bytes are zeros."""
    count, nbytes = pieces.shape
    step, found = max(_ROWS_BYTES // pitch, 1), 0
    rows = numpy.zeros((min(step, count), pitch), numpy.uint8)
    for at in range(0, count, step):
        some = pieces[at : at + step]
        rows[: len(some), pitch - nbytes :] = some
        found = part(rows[: len(some)].reshape(-1).data, found)
    return found


def _parts_of_short(pieces: NDArray[numpy.uint8]) -> Parts:
    """Return the parts of short pieces: words, the first of them with zeros in front, which add nothing."""
    count, nbytes = pieces.shape
    padded = numpy.zeros((count, -(-nbytes // _WORD) * _WORD), numpy.uint8)
    padded[:, -nbytes:] = pieces
    return _followed(_folded(padded.view("<u8").T.copy(), _WORD, 1)[0], _WORD)


def _folded(parts: Parts, pitch: int, few: int) -> Parts:
    """Join the first half of the parts with the second one until few are left, each still a pitch after another."""
    while (count := len(parts)) > few:
        half = count // 2
        rest = parts[half:].copy()
        rest[-half:] ^= _followed(parts[:half], (count - half) * pitch)
        parts = rest
    return parts


def _followed(parts: Parts, nbytes: int) -> Parts:
    """Return the parts of the same pieces if so many bytes more follow each of them."""
    found, octets = numpy.zeros_like(parts), parts.view(numpy.uint8).reshape(*parts.shape, _WORD)
    for place, table in enumerate(_tables(nbytes)):
        found ^= table.take(octets[..., place])
    return found


@lru_cache(maxsize=256)
def _tables(nbytes: int) -> Parts:
    """Return what each value of each byte of a part becomes: 8 × 256."""
    bits = parts_of([joined(1 << bit, 0, nbytes) for bit in range(64)]).reshape(_WORD, 8)
    tables = numpy.zeros((_WORD, 256), "<u8")
    for bit in range(8):
        tables[:, 1 << bit : 2 << bit] = tables[:, : 1 << bit] ^ bits[:, bit, None]
    return tables
