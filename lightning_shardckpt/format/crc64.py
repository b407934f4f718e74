"""CRC-64/NVME, the digest of the format, and the CRC of data from those of its pieces. Pure.

Data is a polynomial over GF(2), and its CRC the rest of a division, so a CRC is linear: what some of the bytes add to
it, their *part*, depends on nothing but these bytes and how many follow them. The CRC of data is the XOR of the parts
of its bytes and of the CRC of as many zeros, in whatever order and by whomever the parts are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, reduce
from operator import xor

try:
    from awscrt.checksums import combine_crc64nvme, crc64nvme  # type: ignore[import-untyped]  # it has no py.typed
except ImportError as error:
    raise ImportError(
        f'digests need awscrt 0.31 or later, which can\'t be imported: {error}. Run `pip install "awscrt>=0.31"`, or '
        "save without digests, by digest=False"
    ) from error

ONES = (1 << 64) - 1
"""The CRC begins with these bits, and is inverted by them at the end. With them as ``before``, it begins with zeros."""
_PERIOD = (1 << 64) - 1  # of the powers of x, as the polynomial is primitive


def crc64(data: bytes | memoryview, before: int = 0) -> int:
    """Return the CRC-64/NVME of data that follows what has the CRC ``before``. The GIL is released for more than 5 KB.

    >>> f"{crc64(b'123456789'):016x}", crc64(b"light" + b"ning") == crc64(b"ning", crc64(b"light"))
    ('ae8b14860a799888', True)
    """
    found: int = crc64nvme(data, before)
    return found


rest: Callable[[bytes | memoryview, int], int] = crc64nvme
"""``crc64`` with both arguments, without a call in between, which thousands of small pieces would pay for. With
``ONES`` it is what is left of a division that began with ones, which is the part of the data, inverted."""


def joined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC of two pieces, one after the other, or the part of both.

    Args:
        first: CRC or part of the first piece.
        second: of the second one.
        nbytes: of the second one.
    """
    found: int = combine_crc64nvme(first, 0, nbytes % _PERIOD) ^ second  # given both, it ignores one of no bytes
    return found


def part(data: bytes | memoryview, before: int = 0) -> int:
    """Return what the last bytes of some data add to its CRC; together with those before them, which have a part, too.

    >>> part(b"ning") ^ joined(part(b"light"), 0, 4) ^ zeros(9) == crc64(b"lightning")
    True
    >>> part(b"ning", part(b"light")) == part(b"lightning")
    True
    """
    found: int = crc64nvme(data, before ^ ONES) ^ ONES
    return found


@lru_cache(maxsize=4096)
def zeros(nbytes: int) -> int:
    """Return the CRC of so many zeros."""
    return joined(ONES, 0, nbytes) ^ ONES


def total(parts: Iterable[int]) -> int:
    """Return the part of several pieces, of which each has its own place in the data."""
    return reduce(xor, parts, 0)


def crc64_text(crc: int) -> str:
    """Return a CRC as it is written: 16 lower-case hex digits."""
    return f"{crc:016x}"
