"""Boxes: half-open, axis-aligned regions of tensors in global coordinates.

Pure integers. Nothing here knows about ranks, files or dtypes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from operator import add, gt, lt, sub

from lightning_shardckpt.errors import FormatError

Shape = tuple[int, ...]


def iterate_indices(shape: Shape) -> Iterator[Shape]:
    """Yield every index of an array of ``shape`` in row-major order.

    ``itertools.product`` would first build a list of each dim.

    >>> list(iterate_indices((2, 2)))
    [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    if not shape:
        yield ()
    for i in range(shape[0] if shape else 0):
        for rest in iterate_indices(shape[1:]):
            yield (i, *rest)


@dataclass(frozen=True, slots=True, order=True)
class Box:
    """The region ``start[d] <= i[d] < stop[d]`` of a tensor.

    >>> Box((2, 0), (4, 3)).shape
    (2, 3)
    """

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
        """Return the intersection of the two boxes, or None if it is empty.

        >>> Box((0,), (4,)).intersect(Box((3,), (9,)))
        Box(start=(3,), stop=(4,))
        """
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
    """Return None if the boxes cover a tensor of ``shape`` exactly once, else a sentence that states the error.

    Sweeps along the dim with the most distinct starts and compares only boxes that overlap along it, so the usual
    sharding along one dim costs one sort.
    """
    whole, filled, total = Box.whole(shape), [b for b in boxes if b.numel], 0
    for box in filled:
        if len(box.start) != len(shape) or any(
            a < 0 or b > n for a, b, n in zip(box.start, box.stop, shape, strict=True)
        ):
            return f"box {box.start}..{box.stop} lies outside shape {shape}"
    dim = max(range(len(shape)), key=lambda d: len({b.start[d] for b in filled}), default=0)
    active: list[Box] = []
    for box in sorted(filled, key=lambda b: b.start[dim : dim + 1]):
        active = [b for b in active if not shape or b.stop[dim] > box.start[dim]]
        for other in active:
            if box.intersect(other) is not None or not shape:
                return f"boxes {other.start}..{other.stop} and {box.start}..{box.stop} overlap"
        active.append(box)
        total += box.numel
    if total != whole.numel:
        return f"{total} of {whole.numel} elements are covered"
    return None
