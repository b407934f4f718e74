"""Compute what a box of a tensor adds to the tensor's digest. No torch.

The bytes of a row, which is all that has one index in the tensor's first dim, are 64-bit words. These are multiplied by
keys and summed, in two lanes: as they are, and their upper halves, since a product modulo 2^64 hardly tells upper bits
apart. The sums of rows are multiplied by keys again. FORMAT.md has the definition.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.tensor_digest import TensorDigest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words: TypeAlias = NDArray[numpy.uint64]

_SEGMENT = 2048  # words: as many keys, and those of the segments, give the keys of a row of any length
_BLOCK_BYTES = 1 << 20  # of a box at a time, so that it is read from memory once
_HALF = numpy.uint64(32)  # bits
_WORD, _SEGMENT_KEYS, _ROW = 0, 1, 2  # streams of keys; each lane has its own


def box_digest(data: memoryview, itemsize: int, box: Box, shape: Shape) -> TensorDigest:
    """Return what a box adds to the digest of its tensor.

    Args:
        data: the bytes of the box, row-major.
        itemsize: bytes of an element.
        box: the box, in the coordinates of the tensor.
        shape: of the whole tensor.
    """
    if not len(data):
        return TensorDigest()
    first, stop, runs = _rows_of(box, shape, itemsize)
    nbytes, found = len(data) // (stop - first), TensorDigest()
    step = max(_BLOCK_BYTES // (nbytes + 16), 1)  # 16: of words that a row has in part
    scratch = numpy.empty(min(len(data) // 8 + 2 * (stop - first), _BLOCK_BYTES // 8 + 2), numpy.uint64)
    for row in range(first, stop, step):
        rows = _Rows(data, (row - first) * nbytes, nbytes, min(step, stop - row))
        low, high = (_row_sums(rows, runs, scratch) * _row_keys(row, rows.number)).sum(axis=1)
        found += TensorDigest(int(low), int(high))
    return found


def alike_digests(data: memoryview, count: int, itemsize: int, box: Box, shape: Shape) -> list[TensorDigest]:
    """Return what a box adds to the digest of its tensor, for each of ``count`` tensors, in little time for each.

    Args:
        data: the bytes of the boxes, one after the other; at most a few MiB.
        count: how many they are.
        itemsize: bytes of an element.
        box: the box of each of them.
        shape: of each of the tensors.
    """
    if not len(data):
        return [TensorDigest()] * count
    first, stop, runs = _rows_of(box, shape, itemsize)
    number = (stop - first) * count
    rows, scratch = _Rows(data, 0, len(data) // number, number), numpy.empty(len(data) // 8 + 2 * number, numpy.uint64)
    sums = _row_sums(rows, runs, scratch).reshape(2, count, stop - first)
    found = (sums * _row_keys(first, stop - first)[:, None, :]).sum(axis=2)
    return [TensorDigest(low, high) for low, high in zip(*found.tolist(), strict=True)]


def range_digest(data: memoryview, begin: int, nbytes: int, shape: Shape) -> TensorDigest:
    """Return what consecutive bytes of a tensor add to its digest.

    Args:
        data: the bytes, from ``begin`` on in the tensor's row-major bytes.
        begin: where they begin, in bytes.
        nbytes: of the whole tensor.
        shape: of the whole tensor.
    """
    rows = shape[0] if len(shape) > 1 else 1
    row, found = nbytes // rows, TensorDigest()
    first, lead = divmod(begin, row)
    at = 0
    while at < len(data):
        count = (len(data) - at) // row if lead == 0 else 0
        stop = min(lead + len(data) - at, row) if count == 0 else row
        box = Box((first, lead), (first + max(count, 1), stop))
        part = data[at : at + box.numel]
        found += box_digest(part, 1, box, (rows, row))
        at, first, lead = at + len(part), box.stop[0], 0
    return found


def _rows_of(box: Box, shape: Shape, itemsize: int) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the first row that a box has a part of, the one after the last, and the bytes that it has of each."""
    if len(shape) < 2:  # one row
        box, shape = Box((0, *(box.start or (0,))), (1, *(box.stop or (1,)))), (1, *(shape or (1,)))
    runs = Box(box.start[1:], box.stop[1:]).runs(shape[1:])
    return box.start[0], box.stop[0], [(begin * itemsize, end * itemsize) for begin, end in runs]


class _Rows(NamedTuple):
    """Rows of a box, or what follows ``at`` of them: ``number``, ``stride`` bytes apart in ``data``."""

    data: memoryview
    at: int
    stride: int
    number: int


def _row_sums(rows: _Rows, runs: list[tuple[int, int]], scratch: Words) -> Words:
    """Return the sums of both lanes for each of the rows, 2 × ``rows.number``."""
    sums, at = numpy.zeros((2, rows.number), numpy.uint64), rows.at
    for begin, end in runs:
        _add_run(sums, rows._replace(at=at), begin, end, scratch)
        at += end - begin
    return sums


def _add_run(sums: Words, rows: _Rows, begin: int, end: int, scratch: Words) -> None:
    """Add bytes ``begin`` to ``end`` of the tensor's rows; they are the next in ``rows``."""
    most = _SEGMENT * 8 * max(_BLOCK_BYTES // (_SEGMENT * 8 * rows.number), 1)
    at = rows.at
    while begin < end:
        stop = min(begin // most * most + most, end)
        words, first = _words(rows._replace(at=at), begin, stop), begin // 8
        while words.shape[1]:
            lead, count = first % _SEGMENT, words.shape[1]
            length = count // _SEGMENT * _SEGMENT if lead == 0 and count >= _SEGMENT else min(_SEGMENT - lead, count)
            _add_words(sums, words[:, :length], first, scratch)
            words, first = words[:, length:], first + length
        at, begin = at + stop - begin, stop


def _words(rows: _Rows, begin: int, end: int) -> Words:
    """Return the words of rows that have bytes ``begin`` to ``end``, with zeros where they have others."""
    nbytes, lead = end - begin, begin % 8
    count = -(-end // 8) - begin // 8
    if lead == 0 and nbytes % 8 == 0 and rows.stride % 8 == 0:
        words: Words = numpy.ndarray((rows.number, count), "<u8", rows.data, rows.at, (rows.stride, 8))
        if words.flags.aligned:
            return words
    padded = numpy.zeros((rows.number, count * 8), numpy.uint8)
    unpadded: Any = numpy.ndarray((rows.number, nbytes), numpy.uint8, rows.data, rows.at, (rows.stride, 1))
    padded[:, lead : lead + nbytes] = unpadded
    return padded.view("<u8")


def _add_words(sums: Words, words: Words, first: int, scratch: Words) -> None:
    """Add words that lie in one segment, or are whole segments; ``first`` is the number in the row of the first."""
    segment, lead = divmod(first, _SEGMENT)
    rows, count = words.shape
    keys, of_segments = _word_keys(), _segment_keys(segment, max(count // _SEGMENT, 1))
    upper = scratch[: rows * count].reshape(rows, count)
    numpy.right_shift(words, _HALF, out=upper)
    for lane, values in enumerate((words, upper)):
        found: Words
        if count <= _SEGMENT:
            found = numpy.einsum("rw,w->r", values, keys[lane, lead : lead + count])
            found *= of_segments[lane]
        else:
            found = numpy.einsum("rsw,w->rs", values.reshape(rows, -1, _SEGMENT), keys[lane]) @ of_segments[lane]
        sums[lane] += found


@lru_cache(maxsize=1)
def _word_keys() -> Words:
    return _keys(_WORD, 0, _SEGMENT)


@lru_cache(maxsize=64)
def _segment_keys(first: int, count: int) -> Words:
    return _keys(_SEGMENT_KEYS, first, count)


@lru_cache(maxsize=64)
def _row_keys(first: int, count: int) -> Words:
    return _keys(_ROW, first, count)


def _keys(stream: int, first: int, count: int) -> Words:
    """Return odd keys of both lanes, 2 × ``count``: splitmix64 of a number that stream, lane and place make up."""
    start = numpy.array([[(stream * 2 + lane) << 56] for lane in (0, 1)], numpy.uint64)
    places: Words = numpy.arange(first + 1, first + count + 1, dtype=numpy.uint64)
    found: Words = numpy.add(start, places, dtype=numpy.uint64)
    found *= numpy.uint64(0x9E3779B97F4A7C15)
    found ^= found >> numpy.uint64(30)
    found *= numpy.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> numpy.uint64(27)
    found *= numpy.uint64(0x94D049BB133111EB)
    found ^= found >> numpy.uint64(31)
    return found | numpy.uint64(1)
