"""Boxes of tensors, and layouts: the sharding of a tensor over a mesh.

A box is a half-open, axis-aligned region of a tensor in global coordinates. A layout maps a shape and a rank to boxes,
and shards to their holders, for all ranks of the world, so ranks need not exchange their boxes. No function enumerates
the world: cost grows with the size of the result. ``state.local_tensors`` translates torch's placements.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, pairwise, product
from math import prod
from operator import add, gt, lt, sub
from typing import NamedTuple

from lightning_shardckpt.errors import FormatError

Shape = tuple[int, ...]


def iterate_indices(shape: Shape) -> Iterator[Shape]:
    """Yield every index of an array in row-major order; ``itertools.product`` would first build a list of each dim."""
    if not shape:
        yield ()
    for i in range(shape[0] if shape else 0):
        for rest in iterate_indices(shape[1:]):
            yield (i, *rest)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region ``start[d] <= i[d] < stop[d]`` of a tensor."""

    start: Shape
    stop: Shape

    def __post_init__(self) -> None:
        if len(self.start) != len(self.stop) or any(map(gt, self.start, self.stop)):
            raise FormatError(f"not a box: start={self.start}, stop={self.stop}")

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """Return the box that covers a tensor of ``shape``."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        """Length along each dim."""
        return tuple(map(sub, self.stop, self.start))

    @property
    def numel(self) -> int:
        """Number of elements; 1 for a 0-dim tensor."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of the two boxes, or None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def within(self, outer: Box) -> Box:
        """Return this box in the coordinates of ``outer``, whose start becomes the origin."""
        return Box(tuple(map(sub, self.start, outer.start)), tuple(map(sub, self.stop, outer.start)))

    def shift(self, by: Shape) -> Box:
        """Return this box moved by ``by`` elements per dim."""
        return Box(tuple(map(add, self.start, by)), tuple(map(add, self.stop, by)))


def find_cover_error(shape: Shape, boxes: Iterable[Box]) -> str | None:
    """Return None if the boxes cover a tensor of ``shape`` exactly once, else a sentence that states the error."""
    whole, filled = Box.whole(shape), [b for b in boxes if b.numel]
    for box in filled:
        if len(box.start) != len(shape) or whole.intersect(box) != box:
            return f"box {box.start}..{box.stop} lies outside shape {shape}"
    # sweep along the dim with the most distinct starts: the usual sharding along one dim costs one sort
    dim = max(range(len(shape)), key=lambda d: len({b.start[d] for b in filled}), default=0)
    active: list[Box] = []
    for box in sorted(filled, key=lambda b: b.start[dim : dim + 1]):
        active = [b for b in active if not shape or b.stop[dim] > box.start[dim]]
        for other in active:
            if box.intersect(other) is not None or not shape:
                return f"boxes {other.start}..{other.stop} and {box.start}..{box.stop} overlap"
        active.append(box)
    total = sum(box.numel for box in filled)
    return None if total == whole.numel else f"{total} of {whole.numel} elements are covered"


# ── layouts ──────────────────────────────────────────────────────────────────────────────────────────────────────────

Holders = tuple[tuple[int, int], ...]
"""The ranks that hold a tensor, as ascending, disjoint ranges ``[start, stop)``."""

MAX_RANKS = 1 << 16  # of a mesh, and of a world
MAX_BLOCKS = 1 << 16  # of a layout: the maximum number of parts of a shard
_MAX_AXES = 64


class Axis(NamedTuple):
    """A mesh axis, on which rank r has the coordinate ``(position(r) // stride) % size``."""

    name: str
    size: int
    stride: int


class DimShard(NamedTuple):
    """The sharding of a tensor dim over a mesh axis as in ``torch.chunk``: parts of ceil size, the last short or empty.

    With ``blocks`` > 1, a rank holds its part of every block, one after the other (a fused projection, by heads).
    """

    axis: int
    dim: int
    blocks: int = 1


@dataclass(frozen=True, slots=True)
class Layout:
    """The axes of a mesh and the shardings of dims over them, in order of application.

    An axis that shards no dim holds replicas. ``order`` lists the ranks by their position in the mesh, if the mesh does
    not number them consecutively. Raises a FormatError for what is no mesh, or an axis that shards twice.
    """

    axes: tuple[Axis, ...] = ()
    cuts: tuple[DimShard, ...] = ()
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if (error := self._find_error()) is not None:
            raise FormatError(f"not a layout: {error}; axes {str(self.axes)[:200]}, cuts {str(self.cuts)[:200]}")

    def _find_error(self) -> str | None:
        if len(self.axes) > _MAX_AXES or len(self.cuts) > _MAX_AXES:
            return f"more than {_MAX_AXES} axes or cuts"
        if any(a.size < 1 or a.stride < 1 for a in self.axes):
            return "an axis without size or stride"
        if prod(a.size for a in self.axes) > MAX_RANKS:
            return f"a mesh of more than {MAX_RANKS} ranks"
        digits = sorted((a.stride, a.size) for a in self.axes if a.size > 1)
        if any(stride % (finer * size) for (finer, size), (stride, _) in pairwise(digits)):
            return "its axes overlap"
        if any(not 0 <= c.axis < len(self.axes) or c.dim < 0 or c.blocks < 1 for c in self.cuts):
            return "a cut along no axis, of no dim or into no blocks"
        if len({c.axis for c in self.cuts}) != len(self.cuts):
            return "two cuts along one axis"
        if prod(c.blocks for c in self.cuts) > MAX_BLOCKS:
            return f"more than {MAX_BLOCKS} blocks"
        if self.order is not None and len(set(self.order)) != len(self.order):
            return "a rank at two positions"
        return None

    def shard(self, rank: int) -> Shape:
        """Return the shard of ``rank``: its coordinates along the axes of ``cuts``, which determine its boxes."""
        if self.order is not None and rank not in self.order:
            raise FormatError(f"rank {rank} is not in the mesh of the layout with axes {self.axes}")
        position, axes = rank if self.order is None else self.order.index(rank), self.axes
        return tuple(position // axes[cut.axis].stride % axes[cut.axis].size for cut in self.cuts)

    @property
    def shards(self) -> Shape:
        """Number of parts along each entry of ``cuts``."""
        return tuple(self.axes[cut.axis].size for cut in self.cuts)


REPLICATED = Layout()
"""Every holder has the whole tensor."""


# ── boxes of a shard ──────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, its start ``at`` in the local tensor, and ``local``, the box in coordinates of that."""

    box: Box
    at: Shape
    local: Box = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", self.box.within(self.box).shift(self.at))


_Segment = tuple[int, int]


def _chunk(segments: list[_Segment], parts: int, index: int) -> list[_Segment]:
    """Return part ``index`` of ``parts`` of the indices that the segments enumerate, divided as by torch.chunk."""
    total = sum(b - a for a, b in segments)
    size = -(-total // parts)
    ends = [(a + index * size - at, a + (index + 1) * size - at) for a, _, at in _add_offsets(segments)]
    slices = [(max(a, low), min(b, high)) for (a, b), (low, high) in zip(segments, ends, strict=True)]
    return [(a, b) for a, b in slices if a < b]


def _blocks(segments: list[_Segment], count: int) -> list[list[_Segment]]:
    return [_chunk(segments, count, i) for i in range(count)] if count > 1 else [segments]


def _cut(segments: list[_Segment], blocks: int, parts: int, index: int) -> list[_Segment]:
    """Return part ``index`` of ``parts`` of every block."""
    return [*join_holders(s for block in _blocks(segments, blocks) for s in _chunk(block, parts, index))]


@lru_cache(maxsize=65536)
def parts_of_shard(layout: Layout, shape: Shape, shard: Shape) -> tuple[Part, ...]:
    """Return the non-empty boxes of a shard of a tensor; one box, even if it is empty, if it is not sharded."""
    if not layout.cuts:
        return (Part(Box.whole(shape), (0,) * len(shape)),)
    segments: list[list[_Segment]] = [[(0, n)] for n in shape]
    for cut, index in zip(layout.cuts, shard, strict=True):
        segments[cut.dim] = _cut(segments[cut.dim], cut.blocks, layout.axes[cut.axis].size, index)
    return tuple(
        Part(Box(tuple(a for a, _, _ in choice), tuple(b for _, b, _ in choice)), tuple(o for _, _, o in choice))
        for choice in product(*map(_add_offsets, segments))
        if all(a < b for a, b, _ in choice)
    )


def _add_offsets(segments: list[_Segment]) -> list[tuple[int, int, int]]:
    """Return (start, stop, offset in the local tensor) of each segment."""
    out, offset = [], 0
    for a, b in segments:
        out.append((a, b, offset))
        offset += b - a
    return out


def parts_of_rank(layout: Layout, shape: Shape, rank: int) -> tuple[Part, ...]:
    """Return the boxes of a tensor of ``shape`` that ``rank`` holds."""
    return parts_of_shard(layout, shape, layout.shard(rank))


def shards_meeting(layout: Layout, shape: Shape, box: Box) -> Iterator[Shape]:
    """Yield the shards that hold an element of ``box``; by arithmetic, so that cost grows with their number."""
    return _meeting(layout, [[(0, n)] for n in shape], box, 0)


def _meeting(layout: Layout, segments: list[list[_Segment]], box: Box, number: int) -> Iterator[Shape]:
    """Yield coordinates along the cuts from ``number`` on, given the segments of each dim that earlier cuts leave."""
    if number == len(layout.cuts):
        yield ()
        return
    cut, parts, runs = layout.cuts[number], layout.shards[number], set[_Segment]()  # most blocks give the same run
    for block in _blocks(segments[cut.dim], cut.blocks):
        size = max(-(-sum(b - a for a, b in block) // parts), 1)
        for a, b, offset in _add_offsets(block):
            first, last = max(box.start[cut.dim], a) - a + offset, min(box.stop[cut.dim], b) - a + offset
            if first < last:
                runs.add((first // size, (last - 1) // size + 1))
    for index in chain.from_iterable(range(*run) for run in join_holders(runs)):
        inner = [*segments]
        inner[cut.dim] = _cut(segments[cut.dim], cut.blocks, parts, index)
        for rest in _meeting(layout, inner, box, number + 1):
            yield (index, *rest)


# ── holders of a shard ────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _ranks_by_shard(layout: Layout, holders: Holders) -> tuple[memoryview, memoryview]:
    """Return the ranks of ``holders`` sorted by shard, row-major, and where each shard begins and the last one ends."""
    import numpy  # thousands of ranks in microseconds

    ranks = numpy.concatenate([numpy.arange(first, last) for first, last in holders])
    positions = ranks
    if layout.order is not None:
        position_of = {rank: position for position, rank in enumerate(layout.order)}
        if missing := [rank for rank in ranks.tolist() if rank not in position_of]:
            raise FormatError(f"rank {missing[0]} holds a tensor of a mesh that it is not in")
        positions = numpy.array([position_of[rank] for rank in ranks.tolist()], numpy.int64)
    numbers = numpy.zeros(len(ranks), numpy.int64)
    for cut in layout.cuts:
        axis = layout.axes[cut.axis]
        numbers = numbers * axis.size + positions // axis.stride % axis.size
    by_shard = numbers.argsort(kind="stable")
    begins = numbers[by_shard].searchsorted(numpy.arange(prod(layout.shards) + 1))
    return ranks[by_shard].data, begins.data


@lru_cache(maxsize=65536)
def replicas(layout: Layout, holders: Holders, shard: Shape) -> Sequence[int]:
    """Return the ranks that hold a shard, ascending."""
    ranks, begins = _ranks_by_shard(layout, holders)
    number = 0
    for index, size in zip(shard, layout.shards, strict=True):
        number = number * size + index
    return ranks[begins[number] : begins[number + 1]]


def find_unheld_shards(layout: Layout, holders: Holders) -> Iterator[Shape]:
    """Yield the shards that no rank holds."""
    import numpy

    begins = numpy.asarray(_ranks_by_shard(layout, holders)[1])
    for number in numpy.flatnonzero(begins[:-1] == begins[1:]).tolist():
        yield tuple(int(index) for index in numpy.unravel_index(number, layout.shards or (1,)))


def as_holders(ranks: list[int]) -> Holders:
    """Return the ranges of a sorted list of ranks."""
    return join_holders((rank, rank + 1) for rank in ranks)


def join_holders(ranges: Iterable[tuple[int, int]]) -> Holders:
    """Return the fewest ranges that contain the same ranks as any given ranges.

    >>> join_holders([(6, 7), (0, 2), (1, 3), (2, 6), (9, 10)])
    ((0, 7), (9, 10))
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((start, stop))
    return tuple(joined)
