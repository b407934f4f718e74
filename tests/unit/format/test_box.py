"""The geometry of boxes. Oracle: arrays that are filled element by element."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod

import numpy
import pytest

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.layout import Box, Shape, find_cover_error

SHAPES: list[Shape] = [(), (1,), (5,), (0,), (3, 4), (4, 1), (1, 4), (2, 3, 2), (2, 1, 3), (2, 0, 3)]


def boxes(shape: Shape) -> Iterator[Box]:
    """Every box of a tensor of this shape, empty ones too."""
    ranges = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    for choice in product(*ranges):
        yield Box(tuple(a for a, _ in choice), tuple(b for _, b in choice))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


def elements(shape: Shape, box: Box) -> list[int]:
    """The row-major indices of a box's elements, by numpy."""
    return numpy.arange(prod(shape)).reshape(shape)[slices(box)].ravel().tolist()


@pytest.mark.parametrize("shape", [s for s in SHAPES if len(s) < 3], ids=str)
def test_the_intersection_holds_what_both_hold(shape: Shape) -> None:
    for a, b in product(boxes(shape), repeat=2):
        both = a.intersect(b)
        assert elements(shape, both) if both else True
        assert set(elements(shape, both) if both else ()) == set(elements(shape, a)) & set(elements(shape, b))


def test_within_and_shift_move_the_corner_only() -> None:
    box, outer = Box((5, 7), (6, 9)), Box((4, 2), (9, 9))
    assert box.within(outer) == Box((1, 5), (2, 7))
    assert box.within(outer).shift(outer.start) == box


@pytest.mark.parametrize(("start", "stop"), [((3,), (2,)), ((0, 0), (1,))])
def test_a_box_that_ends_before_it_starts_is_refused(start: Shape, stop: Shape) -> None:
    with pytest.raises(FormatError, match="not a box"):
        Box(start, stop)


def oracle(shape: Shape, found: list[Box]) -> str | None:
    counts = numpy.zeros(shape, int)
    for box in found:
        counts[slices(box)] += 1
    return "overlap" if counts.max(initial=0) > 1 else "are covered" if counts.min(initial=1) < 1 else None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_uncovered_finds_every_gap_and_overlap(shape: Shape) -> None:
    choose, every = random.Random(0), list(boxes(shape))
    for _ in range(300):
        found = [choose.choice(every) for _ in range(choose.randint(0, 4))]
        said, expected = find_cover_error(shape, found), oracle(shape, found)
        assert (said is None) == (expected is None)
        assert expected is None or expected in str(said)


def test_uncovered_accepts_every_guillotine_cut() -> None:
    choose = random.Random(1)
    for _ in range(200):
        found = [Box.whole((6, 5, 4))]
        for _ in range(choose.randint(0, 6)):
            box = found.pop(choose.randrange(len(found)))
            dim = choose.randrange(3)
            at = choose.randint(box.start[dim], box.stop[dim])
            stop, start = list(box.stop), list(box.start)
            stop[dim] = start[dim] = at
            found += [Box(box.start, tuple(stop)), Box(tuple(start), box.stop)]
        assert find_cover_error((6, 5, 4), found) is None
        assert "overlap" in str(find_cover_error((6, 5, 4), [*found, next(b for b in found if b.numel)]))
