"""The places of whole tensors' boxes: in their tensors, and in the shard files. No tensor is read; no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import prod
from typing import Protocol

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.index import ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.read_plan import Request
from lightning_shardckpt.transfer.reader import Checkpoint

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

    def part(self, at: int, nbytes: int, target: memoryview) -> Request:
        """Put ``nbytes`` of the box, from ``at`` on, at the beginning of ``target``."""
        return Request(self.key, self.place.overlap, self.entry, (nbytes,), (at, 0, nbytes), target)


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
