"""How do shards become a whole tensor again, without holding it? Window by window, each stored byte read once.

Windows are contiguous in the whole tensor and ascend, so they also ascend in every stored box: its bytes come by in
order, and its checksums are compared on the way. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from itertools import islice, product
from math import prod

import numpy
import xxhash

from lightning_shardckpt.box import Box, Shape
from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.header import DTYPE_BYTES
from lightning_shardckpt.index import ShardEntry
from lightning_shardckpt.layout import Part
from lightning_shardckpt.plan import Overlap, plan_load
from lightning_shardckpt.read import Checkpoint

WINDOW_BYTES = 16 << 20
"""Three buffers of this size are in use at a time: one is consumed, one is filled, one takes what must be scattered."""

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
    for corner in product(*(range(n) for n in shape[:dim])):
        above = tuple(i + 1 for i in corner)
        for low in range(0, shape[dim], step):
            yield Box((*corner, low, *(0 for _ in inner)), (*above, min(low + step, shape[dim]), *inner))


class Blocks:
    """Compares the bytes of a stored box with its checksums as they come by, in order, in pieces of any size."""

    def __init__(self, entry: ShardEntry) -> None:
        self.at = 0
        self._entry, self._digest = entry, xxhash.xxh3_64()

    def feed(self, data: memoryview) -> Iterator[tuple[int, int]]:
        """Ranges in the file, ``[first, last)``, of the blocks that ended in ``data`` and are not what was saved."""
        entry, done = self._entry, 0
        while done < len(data):
            count = min(entry.block - self.at % entry.block, len(data) - done)
            self._digest.update(data[done : done + count])
            done, self.at = done + count, self.at + count
            if self.at % entry.block == 0 or self.at == entry.nbytes:
                number = (self.at - 1) // entry.block
                if self._digest.hexdigest() != entry.checksums[number]:
                    yield entry.begin + number * entry.block, entry.begin + self.at
                self._digest.reset()


class Stored:
    """One stored box, read from front to back and verified on the way."""

    def __init__(self, checkpoint: Checkpoint, component: str, key: str, overlap: Overlap) -> None:
        self.box, self._checkpoint, self._key, self._writer = overlap.stored, checkpoint, key, overlap.writer
        self._entry: ShardEntry = checkpoint.entry(component, key, overlap)
        self._blocks = Blocks(self._entry)
        checkpoint.check_file(component, overlap.writer, self._entry.file)

    def read(self, window: Box, target: memoryview, scratch: memoryview) -> int:
        """Put what the window needs of this box into ``target``, the bytes of the window; returns how many elements.

        Raises:
            CorruptionError: naming file, tensor and rank.
        """
        common = self.box.intersect(window)
        if common is None:
            return 0
        size = DTYPE_BYTES[self._entry.dtype]
        ((begin, end),) = common.within(self.box).runs(self.box.shape)  # a window spans all trailing dims
        runs = list(islice(common.within(window).runs(window.shape), 2))
        if len(runs) == 1:
            self._next(begin * size, target[runs[0][0] * size : runs[0][1] * size])
        else:
            data = scratch[: (end - begin) * size]
            self._next(begin * size, data)
            _scatter(data, common.shape, target, window.shape, common.within(window), size)
        return common.numel

    def _next(self, begin: int, target: memoryview) -> None:
        entry = self._entry
        assert begin == self._blocks.at, f"{self._key}: windows must ascend"
        try:
            self._checkpoint.reader.read_into(entry.file, entry.begin + begin, target)
        except (EOFError, FileNotFoundError) as error:
            raise CorruptionError(f"checkpoint {self._checkpoint.path!r}, file {entry.file}: {error}") from None
        for first, last in self._blocks.feed(target):
            raise CorruptionError(
                f"checkpoint {self._checkpoint.path!r}: corrupted data of {self._key!r} in {entry.file}, written by "
                f"rank {self._writer}, bytes {first} to {last}"
            )


def _scatter(data: memoryview, shape: Shape, target: memoryview, outer: Shape, where: Box, size: int) -> None:
    kind = _NUMPY_TYPES[size]
    window = numpy.frombuffer(target, kind).reshape(outer)
    region = tuple(slice(a, b) for a, b in zip(where.start, where.stop, strict=True))
    window[region] = numpy.frombuffer(data, kind).reshape(shape)


class Buffers:
    """Memory for the windows of one stream at a time."""

    def __init__(self, nbytes: int = WINDOW_BYTES) -> None:
        self.nbytes = nbytes
        self.windows = (memoryview(bytearray(nbytes)), memoryview(bytearray(nbytes)))
        self.scratch = memoryview(bytearray(nbytes))


def stream(checkpoint: Checkpoint, component: str, key: str, buffers: Buffers) -> Iterator[memoryview]:
    """The bytes of a whole tensor, row-major, in pieces of at most ``buffers.nbytes``, verified.

    A piece is valid until the piece after the next is asked for. A block that a piece ends in the middle of is
    verified with the next piece; the last one leaves nothing unverified.

    Raises:
        CorruptionError: naming file, tensor and rank.
        FormatError: naming the tensor and the region that no file holds.
    """
    spec = checkpoint.root.components[component].tensors[key]
    size = DTYPE_BYTES[spec.dtype]
    everything = (Part(Box.whole(spec.shape), (0,) * len(spec.shape)),)
    overlaps = plan_load(spec, checkpoint.replicas(component)[key], everything)
    stored = sorted((Stored(checkpoint, component, key, o) for o in overlaps), key=lambda s: s.box)
    first = 0
    for number, window in enumerate(windows(spec.shape, buffers.nbytes // size)):
        target = buffers.windows[number % 2][: window.numel * size]
        while first < len(stored) and stored[first].box.stop[:1] <= window.start[:1] and window.start:
            first += 1  # boxes are sorted: the ones before are behind all windows to come
        filled = 0
        for box in stored[first:]:
            if window.start and box.box.start[0] >= window.stop[0]:
                break
            filled += box.read(window, target, buffers.scratch)
        if filled != window.numel:
            raise FormatError(
                f"checkpoint {checkpoint.path!r}: {filled} of {window.numel} elements of {key!r} from {window.start} "
                f"to {window.stop} are stored"
            )
        yield target


def ahead(pieces: Iterator[memoryview], executor: Executor) -> Iterator[memoryview]:
    """The same pieces; each is made on the executor while the one before it is used."""
    future = executor.submit(next, pieces, None)
    while (piece := future.result()) is not None:
        future = executor.submit(next, pieces, None)
        yield piece
