"""Whole stored tensors: the positions of their boxes in the tensor and in files, and their bytes in order. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod
from typing import Protocol

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape, iterate_indices
from lightning_shardckpt.format.index import ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Request, ShardReader, single_run

_MAX_CACHED_PLANS, _MAX_CACHED_BOXES = 1024, 64  # plans, and boxes per plan


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """The position of a stored box in the row-major bytes of its tensor: it begins at byte ``begin``."""

    overlap: Overlap
    begin: int
    nbytes: int
    is_contiguous: bool


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of the tensor ``key``, and the position of its bytes in a shard file."""

    key: str
    place: BoxRuns
    entry: ShardEntry

    @property
    def box(self) -> Box:
        """The box in the coordinates of its tensor."""
        return self.place.overlap.stored

    def request(self, shape: Shape, target: memoryview) -> Request:
        """Return a request to read the box into ``target``, the memory of its whole tensor of ``shape``."""
        run = (0, self.place.begin, self.place.nbytes) if self.place.is_contiguous else None
        return Request(self.key, self.place.overlap, self.entry, shape, run, target)


class StoredTensors(Protocol):
    """Stored tensors of any format, as boxes of bytes in files. Not thread-safe."""

    path: str
    reader: Reader

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return the spec of a tensor."""

    def boxes(self, component: str, key: str) -> list[StoredBox]:
        """Return the boxes that tile a tensor, sorted by their start. Boxes of other formats may have no checksums.

        Raises:
            ShardCkptError: naming file and tensor, if the files cannot contain the boxes.
        """


class WholeTensors:
    """The tensors of a checkpoint, as boxes in files that were checked. Not thread-safe, like the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.path, self.reader = checkpoint.path, checkpoint.reader
        self._plans: dict[tuple[TensorSpec, int | None], list[BoxRuns]] = {}

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return the spec of a tensor."""
        return self.checkpoint.root.components[component].tensors[key]

    def boxes(self, component: str, key: str) -> list[StoredBox]:
        """Return the stored boxes of a tensor, sorted by their start in it.

        Raises:
            CorruptionError: if a file is missing or damaged, or of another save.
            FormatError: naming the tensor, if the boxes contradict the root index.
        """
        checkpoint, boxes = self.checkpoint, list[StoredBox]()
        spec, replica = self.spec(component, key), checkpoint.replicas(component)[key]
        cached = self._plans.get((spec, replica))
        for place in cached if cached is not None else _plan_boxes(spec, replica):
            entry = checkpoint.entry(component, key, place.overlap)
            checkpoint.check_file(component, place.overlap.writer, entry.file)
            boxes.append(StoredBox(key, place, entry))
        boxes.sort(key=lambda stored: stored.place.begin)
        nbytes, expected = sum(stored.place.nbytes for stored in boxes), prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        if nbytes != expected:
            raise FormatError(f"checkpoint {checkpoint.path!r}: {nbytes} of {expected} bytes of {key!r} are stored")
        if cached is None and len(self._plans) < _MAX_CACHED_PLANS and len(boxes) <= _MAX_CACHED_BOXES:
            self._plans[spec, replica] = [stored.place for stored in boxes]
        return boxes


def _plan_boxes(spec: TensorSpec, replica: int | None) -> Iterator[BoxRuns]:
    """Yield the boxes of a tensor lazily: a caller that looks up each never does more work than there are boxes."""
    whole, size = Box.whole(spec.shape), DTYPE_BYTES[spec.dtype]
    for overlap in plan_load(spec, replica, (Part(whole, whole.start),)):
        runs = list(islice(overlap.stored.runs(spec.shape), 2))
        yield BoxRuns(overlap, runs[0][0] * size, overlap.stored.numel * size, len(runs) == 1)


# ── windows ───────────────────────────────────────────────────────────────────────────────────────────────────────


def windows(shape: Shape, limit: int) -> Iterator[Box]:
    """Yield boxes of at most ``limit`` elements that are consecutive in row-major memory and cover ``shape``.

    >>> [(w.start, w.stop) for w in windows((3, 2), 4)]
    [((0, 0), (2, 2)), ((2, 0), (3, 2))]
    """
    if not shape:
        yield Box((), ())
    if not shape or 0 in shape:
        return
    dim = next((d for d in range(len(shape)) if prod(shape[d + 1 :]) <= limit), len(shape) - 1)
    step, inner = max(limit // prod(shape[dim + 1 :]), 1), shape[dim + 1 :]
    for index in iterate_indices(shape[:dim]):
        stop = tuple(i + 1 for i in index)
        for low in range(0, shape[dim], step):
            yield Box((*index, low, *(0 for _ in inner)), (*stop, min(low + step, shape[dim]), *inner))


def read_windows(source: ShardReader, part: Box, boxes: Sequence[StoredBox], window_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a part of a tensor in order, in ``windows``; each is valid until the next one.

    Each window reads and verifies the blocks that it touches, so a block that two windows share is read for both:
    windows should be much larger than blocks.

    Raises:
        CorruptionError: naming file, tensor and rank.
    """
    if not boxes:
        return
    size = DTYPE_BYTES[boxes[0].entry.dtype]
    for window in (inner.shift(part.start) for inner in windows(part.shape, window_bytes // size)):
        data, requests = source.target[: window.numel * size], list[Request]()
        for stored in boxes:
            if (common := stored.box.intersect(window)) is not None:
                overlap = replace(stored.place.overlap, common=common, local=common.within(window))
                run = single_run(overlap, window.shape, size)
                requests.append(Request(stored.key, overlap, stored.entry, window.shape, run, data))
        source.fetch(requests)
        yield data
