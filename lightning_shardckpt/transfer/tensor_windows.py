"""Read a tensor of any boxes in windows that are contiguous in it, each stored byte once.

Windows ascend in the tensor, so they also ascend in every stored box: its bytes come by in order, and its checksums are
compared on the way. Reads of whole blocks, as ``read_plan`` makes them, would read a block that two windows share
twice. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice
from math import prod

from lightning_shardckpt.format.box import Box, Shape, corners
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.transfer.shard_reader import ShardReader
from lightning_shardckpt.transfer.strided_copy import scatter
from lightning_shardckpt.transfer.verified_reads import BlockChecksums, corrupted, read_verbatim
from lightning_shardckpt.transfer.whole_tensors import StoredBox


def windows(shape: Shape, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements that follow one another in row-major memory and cover a tensor of ``shape``.

    >>> [(w.start, w.stop) for w in windows((3, 2), 4)]
    [((0, 0), (2, 2)), ((2, 0), (3, 2))]
    """
    if not shape:
        yield Box((), ())
    if not shape or 0 in shape:
        return
    dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit), len(shape) - 1)
    step, inner = max(limit // prod(shape[dim + 1 :]), 1), shape[dim + 1 :]
    for corner in corners(shape[:dim]):
        above = tuple(i + 1 for i in corner)
        for low in range(0, shape[dim], step):
            yield Box((*corner, low, *(0 for _ in inner)), (*above, min(low + step, shape[dim]), *inner))


class TensorWindows:
    """A tensor, window after window; any thread may ask for the next one.

    A block that a window ends in the middle of is verified with the next window. So a window may be used before all of
    it is verified, but once all were filled, everything is.
    """

    def __init__(self, shape: Shape, boxes: list[StoredBox], window_bytes: int) -> None:
        self._size = DTYPE_BYTES[boxes[0].entry.dtype]
        self._windows = windows(shape, window_bytes // self._size)
        self._boxes = [(stored, BlockChecksums(stored.entry)) for stored in sorted(boxes, key=lambda s: s.box)]
        self._first = self._begin = 0
        self._order = threading.Lock()
        self.is_exhausted = False

    def fill(self, source: ShardReader) -> tuple[int, memoryview] | None:
        """The next window, and where it begins in the tensor, in bytes; valid until the source is used again."""
        with self._order:
            window = next(self._windows, None)
            if window is None:
                self.is_exhausted = True
                return None
            begin, target = self._begin, source.target[: window.numel * self._size]
            self._begin += len(target)
            try:
                self._fill(window, source, target)
            except BaseException:
                self._windows = iter(())  # what follows cannot be verified
                raise
            return begin, target

    def _fill(self, window: Box, source: ShardReader, target: memoryview) -> None:
        begin, end = _along_dim_0(window)
        while self._first < len(self._boxes) and _along_dim_0(self._boxes[self._first][0].box)[1] <= begin:
            self._first += 1  # boxes are sorted: no window to come meets the ones before
        filled = 0
        for stored, blocks in self._boxes[self._first :]:
            if _along_dim_0(stored.box)[0] >= end:
                break
            filled += self._read(stored, blocks, window, source, target)
        assert filled == len(target), f"{self._boxes[0][0].key}: boxes tile a tensor"

    def _read(
        self, stored: StoredBox, blocks: BlockChecksums, window: Box, source: ShardReader, target: memoryview
    ) -> int:
        """Put what the window needs of a box into ``target``, the bytes of the window; returns how many bytes."""
        box, size = stored.box, self._size
        common = box.intersect(window)
        if common is None:
            return 0
        ((begin, end),) = common.within(box).runs(box.shape)  # a window spans all trailing dims
        assert begin * size == blocks.at, f"{stored.key}: windows must ascend"
        where = common.within(window)
        runs = list(islice(where.runs(window.shape), 2))
        in_one_piece = len(runs) == 1
        data = target[runs[0][0] * size : runs[0][1] * size] if in_one_piece else source.window[: (end - begin) * size]
        read_verbatim(source, stored.entry.file, stored.entry.begin + begin * size, data)
        for first, last in blocks.feed(data):
            raise corrupted(source.path, stored.key, stored.place.overlap.writer, stored.entry, first, last)
        if not in_one_piece:
            scatter(data, target, window.shape, where, size)
        return len(data)


def _along_dim_0(box: Box) -> tuple[int, int]:
    return (box.start[0], box.stop[0]) if box.start else (0, 1)
