"""Copy elements between row-major arrays that are bytes in memory."""

from __future__ import annotations

from typing import TypeAlias

from lightning_shardckpt.format.box import Box, Shape

_NUMPY_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # only their size matters; numpy copies these fastest

Strided: TypeAlias = tuple[memoryview, int, Shape]
"""Memory, the offset of the first element in it, and the pitch of each dim; in bytes."""


def pitches_of(shape: Shape, size: int) -> Shape:
    """Return the bytes between neighbours along each dim of a row-major array, whose elements have ``size`` bytes.

    >>> pitches_of((2, 3), 4), pitches_of((), 4)
    ((12, 4), ())
    """
    pitches = [size]
    for n in shape[:0:-1]:
        pitches.append(pitches[-1] * n)
    return tuple(pitches[::-1]) if shape else ()


def copy_strided(shape: Shape, size: int, source: Strided, target: Strided) -> None:
    """Copy an array of ``shape``, whose elements have ``size`` bytes; the GIL is released meanwhile."""
    import numpy  # here: where tensors lie in one piece, nothing else needs it

    kind = _NUMPY_TYPES[size]
    numpy.ndarray(shape, kind, *target)[...] = numpy.ndarray(shape, kind, *source)


def scatter(data: memoryview, target: memoryview, outer: Shape, where: Box, size: int) -> None:
    """Copy the row-major elements in ``data`` to the box ``where`` of a row-major array of shape ``outer``."""
    pitches = pitches_of(outer, size)
    at = sum(a * pitch for a, pitch in zip(where.start, pitches, strict=True))
    copy_strided(where.shape, size, (data, 0, pitches_of(where.shape, size)), (target, at, pitches))


def gather(data: memoryview, outer: Shape, where: Box, size: int) -> memoryview:
    """Return the row-major elements of the box ``where`` of a row-major array of shape ``outer``."""
    pitches = pitches_of(outer, size)
    at = sum(a * pitch for a, pitch in zip(where.start, pitches, strict=True))
    found = memoryview(bytearray(where.numel * size))
    copy_strided(where.shape, size, (data, at, pitches), (found, 0, pitches_of(where.shape, size)))
    return found
