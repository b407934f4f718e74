"""Whole tensors: the places of their boxes in them and in the shard files, and their bytes in order. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from lightning_shardckpt.transfer.read_plan import Request
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import BlockChecksums, ShardReader, corruption_error, read_verbatim
from lightning_shardckpt.transfer.strided_copy import scatter

_PLANS, _PLANNED_BOXES = 1024, 64  # plans that are kept, and how many boxes one may have


@dataclass(frozen=True, slots=True)
class BoxRuns:
    """The place of a stored box in the row-major bytes of its tensor: from ``begin`` on, in one piece or in several."""

    overlap: Overlap
    begin: int
    nbytes: int
    in_one_piece: bool


@dataclass(frozen=True, slots=True)
class StoredBox:
    """A box of the tensor ``key``, and its bytes in a shard file."""

    key: str
    place: BoxRuns
    entry: ShardEntry

    @property
    def box(self) -> Box:
        """The region of its tensor where the box lies."""
        return self.place.overlap.stored

    def request(self, shape: Shape, target: memoryview) -> Request:
        """Put the box into ``target``, the memory of its tensor, whose shape is ``shape``."""
        run = (0, self.place.begin, self.place.nbytes) if self.place.in_one_piece else None
        return Request(self.key, self.place.overlap, self.entry, shape, run, target)


class StoredTensors(Protocol):
    """Stored tensors of any format, each as boxes of bytes in files. For one thread at a time."""

    path: str
    reader: Reader

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return what is known of a tensor."""

    def boxes(self, component: str, key: str) -> list[StoredBox]:
        """Return a tensor's boxes, which tile it, in the order in which they begin; some sources have no checksums.

        Raises:
            ShardCkptError: naming file and tensor, if they cannot be there.
        """


class WholeTensors:
    """The tensors of a checkpoint as a whole: where their boxes lie, and whether the files are those that were saved.

    For one thread at a time, as the checkpoint is.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.path, self.reader = checkpoint.path, checkpoint.reader
        self._plans: dict[tuple[TensorSpec, int | None], list[BoxRuns]] = {}

    def spec(self, component: str, key: str) -> TensorSpec:
        """Return what is known of a tensor."""
        return self.checkpoint.root.components[component].tensors[key]

    def boxes(self, component: str, key: str) -> list[StoredBox]:
        """The stored boxes of a tensor, in the order in which they begin in it.

        Raises:
            CorruptionError: if a file is not the one that was saved.
            FormatError: naming the tensor, if the boxes are not what the root index says.
        """
        checkpoint, found = self.checkpoint, list[StoredBox]()
        spec, replica = self.spec(component, key), checkpoint.replicas(component)[key]
        known = self._plans.get((spec, replica))
        for place in known if known is not None else _places(spec, replica):
            entry = checkpoint.entry(component, key, place.overlap)
            checkpoint.check_file(component, place.overlap.writer, entry.file)
            found.append(StoredBox(key, place, entry))
        found.sort(key=lambda stored: stored.place.begin)
        nbytes, expected = sum(stored.place.nbytes for stored in found), prod(spec.shape) * DTYPE_BYTES[spec.dtype]
        if nbytes != expected:
            raise FormatError(f"checkpoint {checkpoint.path!r}: {nbytes} of {expected} bytes of {key!r} are stored")
        if known is None and len(self._plans) < _PLANS and len(found) <= _PLANNED_BOXES:
            self._plans[spec, replica] = [stored.place for stored in found]
        return found


def _places(spec: TensorSpec, replica: int | None) -> Iterator[BoxRuns]:
    """One at a time: who looks each up as it comes does no more work than there are stored boxes."""
    whole, size = Box.whole(spec.shape), DTYPE_BYTES[spec.dtype]
    for overlap in plan_load(spec, replica, (Part(whole, whole.start),)):
        runs = list(islice(overlap.stored.runs(spec.shape), 2))
        yield BoxRuns(overlap, runs[0][0] * size, overlap.stored.numel * size, len(runs) == 1)


# ── whole tensors, window after window ────────────────────────────────────────────────────────────────────────────


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
    for corner in iterate_indices(shape[:dim]):
        above = tuple(i + 1 for i in corner)
        for low in range(0, shape[dim], step):
            yield Box((*corner, low, *(0 for _ in inner)), (*above, min(low + step, shape[dim]), *inner))


def read_windows(
    source: ShardReader, shape: Shape, boxes: Sequence[StoredBox], window_bytes: int
) -> Iterator[memoryview]:
    """Yield the bytes of a tensor of any boxes in order, in ``windows``; each stored byte is read once.

    Windows ascend in the tensor, so they also ascend in every stored box: its bytes come by in order, and its checksums
    are compared on the way. Reads of whole blocks would read a block that two windows share twice.

    A block that a window ends in the middle of is verified with the next window. So a window may be used before all of
    it is verified, but at the end everything is. A window is valid until the next one.

    Raises:
        CorruptionError: naming file, tensor and rank.
    """
    if not boxes:
        return
    size = DTYPE_BYTES[boxes[0].entry.dtype]
    left = [(stored, BlockChecksums(stored.entry)) for stored in sorted(boxes, key=lambda s: s.box)]
    for window in windows(shape, window_bytes // size):
        target, filled = source.target[: window.numel * size], 0
        begin, end = _along_dim_0(window)
        left = [one for one in left if _along_dim_0(one[0].box)[1] > begin]
        for stored, blocks in left:
            if _along_dim_0(stored.box)[0] >= end:
                break  # boxes are sorted
            filled += _read_common(source, stored, blocks, window, target)
        assert filled == len(target), f"{boxes[0].key}: boxes tile a tensor"
        yield target


def _read_common(
    source: ShardReader, stored: StoredBox, blocks: BlockChecksums, window: Box, target: memoryview
) -> int:
    """Put into ``target``, the bytes of the window, those that a box has of it; returns how many."""
    box, size = stored.box, DTYPE_BYTES[stored.entry.dtype]
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
        raise corruption_error(source.path, stored.key, stored.place.overlap.writer, stored.entry, first, last)
    if not in_one_piece:
        scatter(data, target, window.shape, where, size)
    return len(data)


def _along_dim_0(box: Box) -> tuple[int, int]:
    return (box.start[0], box.stop[0]) if box.start else (0, 1)
