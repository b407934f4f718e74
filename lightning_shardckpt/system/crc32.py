"""The CRC-32 of data from those of its pieces: arithmetic with polynomials over GF(2), as in zlib.

``crc32_combine`` of zlib 1.2.12 (crc32.c), which Python's zlib module does not offer. Pure.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320  # that of zip, lowest power in the highest bit
_ONE, _X = 1 << 31, 1 << 30


def _times(a: int, b: int) -> int:
    """The product of two polynomials, modulo that of the CRC."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(maxsize=1024)
def _zeros(nbytes: int) -> int:
    """Return the factor of a CRC after which so many zero bytes follow: x to the power of 8 times their number."""
    power, square, bits = _ONE, _X, 8 * nbytes
    while bits:
        if bits & 1:
            power = _times(square, power)
        square, bits = _times(square, square), bits >> 1
    return power


def combine_crc32(first: int, second: int, second_nbytes: int) -> int:
    """The CRC-32 of two pieces of data, one after the other, from those of each and the length of the second.

    >>> from zlib import crc32
    >>> combine_crc32(crc32(b"light"), crc32(b"ning"), 4) == crc32(b"lightning")
    True
    """
    return _times(_zeros(second_nbytes), first) ^ second


class PiecewiseCRC:
    """The CRC-32 of ``nbytes`` from those of their pieces, in whatever order these come."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes, self._at, self._crc = nbytes, 0, 0
        self._waiting: dict[int, tuple[int, int]] = {}

    def add(self, at: int, nbytes: int, crc: int) -> int | None:
        """Take in the piece that begins ``at``; returns the CRC of everything with the last piece, else None."""
        self._waiting[at] = nbytes, crc
        while (piece := self._waiting.pop(self._at, None)) is not None:
            self._crc = combine_crc32(self._crc, piece[1], piece[0])
            self._at += piece[0]
        return self._crc if self._at == self._nbytes else None
