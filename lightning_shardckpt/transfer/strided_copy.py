"""Copies of elements between row-major arrays in memory."""

from __future__ import annotations

from typing import TypeAlias

from lightning_shardckpt.format.box import Box, Shape

_NUMPY_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # only the size matters; numpy copies these fastest

Strided: TypeAlias = tuple[memoryview, int, Shape]
"""(memory, offset of the first element, pitch of each dim), in bytes."""


def pitches_of(shape: Shape, size: int) -> Shape:
    """Return the distance in bytes of adjacent elements along each dim of a row-major array of ``size``-byte elements.

    >>> pitches_of((2, 3), 4), pitches_of((), 4)
    ((12, 4), ())
    """
    pitches = [size]
    for n in shape[:0:-1]:
        pitches.append(pitches[-1] * n)
    return tuple(pitches[::-1]) if shape else ()


def copy_strided(shape: Shape, size: int, source: Strided, target: Strided) -> None:
    """Copy an array of ``shape``, whose elements have ``size`` bytes. The GIL is released meanwhile."""
    import numpy  # imported here, since only non-contiguous copies need it

    dtype = _NUMPY_TYPES[size]
    numpy.ndarray(shape, dtype, *target)[...] = numpy.ndarray(shape, dtype, *source)


def scatter(data: memoryview, target: memoryview, outer: Shape, box: Box, size: int) -> None:
    """Copy the row-major elements in ``data`` to a box of a row-major array of shape ``outer``."""
    pitches = pitches_of(outer, size)
    at = sum(a * pitch for a, pitch in zip(box.start, pitches, strict=True))
    copy_strided(box.shape, size, (data, 0, pitches_of(box.shape, size)), (target, at, pitches))
