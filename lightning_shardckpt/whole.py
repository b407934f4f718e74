"""How do shards become whole tensors again, a window of memory at a time? Each stored byte is read once, and verified.

A box that lies in one piece in its tensor is read in spans of whole checksum blocks, in any order. Of a tensor with
other boxes, windows that are contiguous in the tensor ascend, so that they also ascend in every stored box: its bytes
come by in order, and its checksums are compared on the way. No torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Protocol

import numpy
import xxhash

from lightning_shardckpt.box import Box, Shape, corners
from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.header import DTYPE_BYTES
from lightning_shardckpt.index import MAX_BLOCK_BYTES, ShardEntry, TensorSpec
from lightning_shardckpt.layout import Part
from lightning_shardckpt.plan import Overlap, plan_load
from lightning_shardckpt.read import Checkpoint
from lightning_shardckpt.storage.protocol import Reader

_SPAN_BYTES = 1 << 20  # at most so much is read at a time: it is hashed, and written, while the caches still have it
_DIRECT_BYTES = 64 << 10  # boxes at least this long are read where they belong, shorter ones together with others
_GAP_BYTES = 16 << 10  # between two short boxes: rather read than skipped
_PLANS, _PLANNED_BOXES = 1024, 64  # plans that are kept, and how many boxes one may have
_NUMPY_TYPES = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}  # only their size matters; numpy copies these fastest


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


class Blocks:
    """Compares the bytes of a stored box with its checksums as they come by, in order, in pieces of any size.

    A box without checksums, of another format, is taken as it is.
    """

    def __init__(self, entry: ShardEntry) -> None:
        self.at = 0
        self._entry, self._digest, self._nbytes = entry, xxhash.xxh3_64(), entry.nbytes

    def feed(self, data: memoryview) -> Iterator[tuple[int, int]]:
        """Ranges in the file, ``[first, last)``, of the blocks that ended in ``data`` and are not what was saved."""
        entry, block, done = self._entry, self._entry.block, 0
        while done < len(data):
            count = min(block - self.at % block, len(data) - done)
            piece = data[done : done + count]
            done, self.at = done + count, self.at + count
            if self.at % block and self.at != self._nbytes:
                self._digest.update(piece)
                continue
            number = (self.at - 1) // block
            if count == self.at - number * block:
                found = xxhash.xxh3_64_hexdigest(piece)
            else:
                self._digest.update(piece)
                found = self._digest.hexdigest()
                self._digest.reset()
            if entry.checksums and found != entry.checksums[number]:
                yield entry.begin + number * block, entry.begin + self.at


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored box lies in the row-major bytes of its tensor: from ``begin`` on, in one piece or in several."""

    overlap: Overlap
    begin: int
    nbytes: int
    in_one_piece: bool


@dataclass(frozen=True, slots=True)
class Stored:
    """A box of the tensor ``key``, and its bytes in a shard file."""

    key: str
    place: Place
    entry: ShardEntry

    @property
    def box(self) -> Box:
        """Its region of the tensor."""
        return self.place.overlap.stored


class Tensors(Protocol):
    """Stored tensors of any format, each as boxes of bytes in files. For one thread at a time."""

    path: str
    reader: Reader

    def spec(self, component: str, key: str) -> TensorSpec:
        """What is known of a tensor."""

    def boxes(self, component: str, key: str) -> list[Stored]:
        """Its boxes, which tile it, in the order in which they begin in it; without checksums where there are none.

        Raises:
            ShardCkptError: naming file and tensor, if they cannot be there.
        """


class Wholes:
    """The tensors of a checkpoint as a whole: where their boxes lie, and whether the files are those that were saved.

    For one thread at a time, as the checkpoint is.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.path, self.reader = checkpoint.path, checkpoint.reader
        self._plans: dict[tuple[TensorSpec, int | None], list[Place]] = {}

    def spec(self, component: str, key: str) -> TensorSpec:
        """What is known of a tensor."""
        return self.checkpoint.root.components[component].tensors[key]

    def boxes(self, component: str, key: str) -> list[Stored]:
        """The stored boxes of a tensor, in the order in which they begin in it.

        Raises:
            CorruptionError: if a file is not the one that was saved.
            FormatError: naming the tensor, if the boxes are not what the root index says.
        """
        checkpoint, found = self.checkpoint, list[Stored]()
        spec, replica = self.spec(component, key), checkpoint.replicas(component)[key]
        known = self._plans.get((spec, replica))
        for place in known if known is not None else _places(spec, replica):
            entry = checkpoint.entry(component, key, place.overlap)
            checkpoint.check_file(component, place.overlap.writer, entry.file)
            found.append(Stored(key, place, entry))
        found.sort(key=lambda stored: stored.place.begin)
        nbytes, expected = sum(stored.place.nbytes for stored in found), prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        if nbytes != expected:
            raise FormatError(f"checkpoint {checkpoint.path!r}: {nbytes} of {expected} bytes of {key!r} are stored")
        if known is None and len(self._plans) < _PLANS and len(found) <= _PLANNED_BOXES:
            self._plans[spec, replica] = [stored.place for stored in found]
        return found


def _places(spec: TensorSpec, replica: int | None) -> Iterator[Place]:
    """One at a time: who looks each up as it comes does no more work than there are stored boxes."""
    whole, size = Box.whole(spec.shape), DTYPE_BYTES[spec.dtype]
    for overlap in plan_load(spec, replica, (Part(whole, whole.start),)):
        runs = list(islice(overlap.stored.runs(spec.shape), 2))
        yield Place(overlap, runs[0][0] * size, overlap.stored.numel * size, len(runs) == 1)


@dataclass(frozen=True, slots=True)
class Span:
    """Whole checksum blocks of a box that lies in one piece: ``nbytes`` from ``at`` on in the box."""

    stored: Stored
    at: int
    nbytes: int

    @property
    def begin(self) -> int:
        """Where they begin in the tensor."""
        return self.stored.place.begin + self.at


def spans(stored: Stored) -> Iterator[Span]:
    """What can be read, and verified, on its own of a box that lies in one piece."""
    block, nbytes = stored.entry.block, stored.place.nbytes
    step = max(_SPAN_BYTES // block, 1) * block
    return (Span(stored, at, min(step, nbytes - at)) for at in range(0, nbytes, step))


class Source:
    """Reads the shard files of a checkpoint, on one thread.

    Args:
        window_bytes: how much memory one call of ``span``, ``many`` or ``Windows.fill`` may fill; as much again is
            needed for what must be scattered.
    """

    def __init__(self, path: str, reader: Reader, window_bytes: int) -> None:
        self.path, self.reader = path, reader
        nbytes = max(window_bytes, MAX_BLOCK_BYTES)
        self.target, self.scratch = (memoryview(numpy.empty(nbytes, "u1")) for _ in range(2))  # type: ignore[arg-type]

    def span(self, span: Span) -> memoryview:
        """The bytes of a span, verified; valid until the next call of any method."""
        target = self.target[: span.nbytes]
        self.read(span.stored, span.at, target)
        self._verify(span.stored, span.at, target)
        return target

    def many(self, boxes: Iterable[tuple[Stored, Shape, memoryview]]) -> None:
        """Read and verify whole boxes, each with the shape and the memory of its tensor; short ones by common reads."""
        waiting: list[tuple[Stored, Shape, memoryview]] = []
        end = 0
        for one in sorted(boxes, key=lambda one: (one[0].entry.file, one[0].entry.begin)):
            stored, _, target = one
            place, entry = stored.place, stored.entry
            if place.in_one_piece and place.nbytes >= _DIRECT_BYTES:
                data = target[place.begin : place.begin + place.nbytes]
                self.read(stored, 0, data)
                self._verify(stored, 0, data)
                continue
            first = waiting[0][0].entry if waiting else entry
            reach = entry.begin + place.nbytes - first.begin
            if first.file != entry.file or entry.begin - end > _GAP_BYTES or reach > len(self.scratch):
                self._together(waiting)
                waiting = []
            waiting.append(one)
            end = entry.begin + place.nbytes
        self._together(waiting)

    def _together(self, boxes: list[tuple[Stored, Shape, memoryview]]) -> None:
        if not boxes:
            return
        first, last = boxes[0][0], boxes[-1][0]
        begin = first.entry.begin
        span = self.scratch[: last.entry.begin + last.place.nbytes - begin]
        self.read(first, 0, span)
        for stored, shape, target in boxes:
            place, at = stored.place, stored.entry.begin - begin
            data = span[at : at + place.nbytes]
            self._verify(stored, 0, data)
            if place.in_one_piece:
                target[place.begin : place.begin + place.nbytes] = data
            else:
                scatter(data, stored.box.shape, target, shape, stored.box, DTYPE_BYTES[stored.entry.dtype])

    def read(self, stored: Stored, at: int, target: memoryview) -> None:
        """Fill ``target`` from ``at`` on in a box, and from what follows it in the file; not verified."""
        try:
            self.reader.read_into(stored.entry.file, stored.entry.begin + at, target)
        except (EOFError, FileNotFoundError) as error:
            raise CorruptionError(f"checkpoint {self.path!r}, file {stored.entry.file}: {error}") from None

    def _verify(self, stored: Stored, at: int, data: memoryview) -> None:
        """Compare whole blocks, which begin ``at`` in a box, with what was saved."""
        block, checksums = stored.entry.block, stored.entry.checksums
        if not checksums:
            return
        for number, begin in enumerate(range(0, len(data), block), at // block):
            if xxhash.xxh3_64_hexdigest(data[begin : begin + block]) != checksums[number]:
                first = stored.entry.begin + at + begin
                raise self.corrupted(stored, first, min(first + block, stored.entry.begin + at + len(data)))

    def corrupted(self, stored: Stored, first: int, last: int) -> CorruptionError:
        """What to raise of bytes ``[first, last)`` of a file."""
        return CorruptionError(
            f"checkpoint {self.path!r}: corrupted data of {stored.key!r} in {stored.entry.file}, written by "
            f"rank {stored.place.overlap.writer}, bytes {first} to {last}"
        )


class Windows:
    """A tensor whose boxes do not lie in one piece, window after window; any thread may ask for the next one.

    A block that a window ends in the middle of is verified with the next window. So a window may be used before all of
    it is verified, but once all were filled, everything is.
    """

    def __init__(self, shape: Shape, boxes: list[Stored], window_bytes: int) -> None:
        self._size = DTYPE_BYTES[boxes[0].entry.dtype]
        self._windows = windows(shape, window_bytes // self._size)
        self._boxes = [(stored, Blocks(stored.entry)) for stored in sorted(boxes, key=lambda s: s.box)]
        self._first = self._begin = 0
        self._order = threading.Lock()
        self.is_exhausted = False

    def fill(self, source: Source) -> tuple[int, memoryview] | None:
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

    def _fill(self, window: Box, source: Source, target: memoryview) -> None:
        while self._first < len(self._boxes) and self._boxes[self._first][0].box.stop[0] <= window.start[0]:
            self._first += 1  # boxes are sorted: the ones before are behind all windows to come
        filled = 0
        for stored, blocks in self._boxes[self._first :]:
            if stored.box.start[0] >= window.stop[0]:
                break
            filled += self._read(stored, blocks, window, source, target)
        assert filled == len(target), f"{self._boxes[0][0].key}: boxes tile a tensor"

    def _read(self, stored: Stored, blocks: Blocks, window: Box, source: Source, target: memoryview) -> int:
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
        data = target[runs[0][0] * size : runs[0][1] * size] if in_one_piece else source.scratch[: (end - begin) * size]
        source.read(stored, begin * size, data)
        for first, last in blocks.feed(data):
            raise source.corrupted(stored, first, last)
        if not in_one_piece:
            scatter(data, common.shape, target, window.shape, where, size)
        return len(data)


def scatter(data: memoryview, shape: Shape, target: memoryview, outer: Shape, where: Box, size: int) -> None:
    """Copy row-major elements of ``shape`` to where they belong in the row-major memory of ``outer``."""
    kind = _NUMPY_TYPES[size]
    window = numpy.frombuffer(target, kind).reshape(outer)
    region = tuple(slice(a, b) for a, b in zip(where.start, where.stop, strict=True))
    window[region] = numpy.frombuffer(data, kind).reshape(shape)
