"""A layout shards as torch does. Oracle: ``torch.chunk`` on tensors that hold their own indices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import product
from math import prod

import numpy
import pytest
import torch

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.layout import (
    MAX_BLOCKS,
    MAX_RANKS,
    REPLICATED,
    Axis,
    Box,
    DimShard,
    Holders,
    Layout,
    Shape,
    as_holders,
    find_cover_error,
    find_unheld_shards,
    join_holders,
    parts_of_rank,
    parts_of_shard,
    replicas,
    shards_meeting,
)


def mesh(*sizes: int, cuts: list[DimShard], order: tuple[int, ...] | None = None) -> Layout:
    """A row-major mesh."""
    axes = tuple(Axis(f"axis{i}", n, prod(sizes[i + 1 :])) for i, n in enumerate(sizes))
    return Layout(axes, tuple(cuts), order)


LAYOUTS: dict[str, tuple[Layout, int]] = {
    "replicated": (REPLICATED, 3),
    "fsdp4": (mesh(4, cuts=[DimShard(0, 0)]), 4),
    "dim 1": (mesh(4, cuts=[DimShard(0, 1)]), 4),
    "hsdp 2x2": (mesh(2, 2, cuts=[DimShard(1, 0)]), 4),
    "fsdp x tp, other dims": (mesh(2, 3, cuts=[DimShard(0, 0), DimShard(1, 1)]), 6),
    "fsdp3 over tp2": (mesh(3, 2, cuts=[DimShard(1, 0), DimShard(0, 0)]), 6),
    "three cuts of a dim": (mesh(2, 2, 2, cuts=[DimShard(2, 0), DimShard(1, 0), DimShard(0, 0)]), 8),
    "packed, fsdp": (mesh(2, 2, cuts=[DimShard(1, 0, 3), DimShard(0, 0)]), 4),
    "packed twice": (mesh(2, 2, cuts=[DimShard(0, 0, 2), DimShard(1, 1, 3)]), 4),
    "permuted": (mesh(2, 2, cuts=[DimShard(1, 0), DimShard(0, 1)], order=(3, 1, 0, 2)), 4),
    "permuted replicas": (mesh(2, 2, cuts=[DimShard(1, 0)], order=(3, 1, 0, 2)), 4),
    "axis of size one": (mesh(1, 2, 1, cuts=[DimShard(0, 0), DimShard(1, 0), DimShard(2, 1)]), 2),
}
SHAPES: list[Shape] = [(12, 6), (7, 5), (1, 3), (3, 1), (13, 2, 2), (0, 4), (5, 0)]


def everything(world: int) -> Holders:
    return ((0, world),)


def chunk(tensor: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    found = tensor.chunk(parts, dim)  # torch gives fewer where the dim is short
    return found[index] if index < len(found) else tensor.narrow(dim, 0, 0)


def local(layout: Layout, shape: Shape, rank: int) -> torch.Tensor:
    """What ``rank`` holds of a tensor of its own indices: cut by cut, with torch.chunk."""
    tensor = torch.arange(prod(shape)).view(shape)
    at = layout.coordinate(rank)
    for cut in layout.cuts:
        pieces = [chunk(tensor, cut.blocks, i, cut.dim) for i in range(cut.blocks)]
        taken = [chunk(p, layout.axes[cut.axis].size, at[cut.axis], cut.dim) for p in pieces]
        tensor = torch.cat(taken, cut.dim)
    return tensor


def box_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_a_rank_hold_what_torch_would_give_it(name: str) -> None:
    layout, world = LAYOUTS[name]
    for shape, rank in product(SHAPES, range(world)):
        expected, whole = local(layout, shape, rank), torch.arange(prod(shape)).view(shape)
        found = torch.full_like(expected, -1)
        for part in parts_of_rank(layout, shape, rank):
            assert part.local.shape == part.box.shape
            box_of(found, part.local).copy_(box_of(whole, part.box))
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shards_of_a_layout_tile_every_tensor(name: str) -> None:
    layout, _ = LAYOUTS[name]
    for shape in SHAPES:
        counts = torch.zeros(shape, dtype=torch.int64)
        for shard in product(*map(range, layout.shards)):
            for part in parts_of_shard(layout, shape, shard):
                box_of(counts, part.box).add_(1)
        assert torch.equal(counts, torch.ones_like(counts))


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_shards_that_meet_a_box_are_found_without_trying_all(name: str) -> None:
    layout, _ = LAYOUTS[name]
    choose = random.Random(name)
    for shape in SHAPES:
        for _ in range(20):
            ends = [sorted((choose.randint(0, n), choose.randint(0, n))) for n in shape]
            box = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
            found = list(shards_meeting(layout, shape, box))
            assert len(set(found)) == len(found)

            def meets(shard: Shape, shape: Shape = shape, box: Box = box) -> bool:
                return any(part.box.intersect(box) for part in parts_of_shard(layout, shape, shard))

            if box.numel:
                assert set(found) == {s for s in product(*map(range, layout.shards)) if meets(s)}


HOLDERS: dict[str, Callable[[int], Holders]] = {
    "all": everything,
    "a range": lambda n: ((n, 2 * n),),
    "all but one": lambda n: ((0, 1), (2, n + 1)),
    "every second": lambda n: tuple((i, i + 1) for i in range(0, 3 * n, 2)),
}


@pytest.mark.parametrize("kind", HOLDERS)
@pytest.mark.parametrize("name", [n for n in LAYOUTS if "permuted" not in n])
def test_the_replicas_of_a_shard_are_the_holders_with_its_coordinates(name: str, kind: str) -> None:
    layout, world = LAYOUTS[name]
    holders = HOLDERS[kind](world)
    ranks = [r for a, b in holders for r in range(a, b)]
    missing = []
    for shard in product(*map(range, layout.shards)):
        expected = [r for r in ranks if layout.shard(r) == shard]
        assert list(replicas(layout, holders, shard)) == expected
        missing += [] if expected else [shard]
    assert list(find_unheld_shards(layout, holders)) == missing


def test_replicas_of_a_permuted_mesh_are_those_at_its_positions() -> None:
    layout, _ = LAYOUTS["permuted replicas"]  # positions 0 to 3 are the ranks 3, 1, 0, 2
    assert [tuple(replicas(layout, everything(4), shard)) for shard in ((0,), (1,))] == [(0, 3), (1, 2)]
    assert list(find_unheld_shards(layout, ((0, 3),))) == []
    assert list(find_unheld_shards(layout, ((1, 3),))) == [(0,)]
    with pytest.raises(FormatError, match="rank 4"):
        layout.coordinate(4)
    with pytest.raises(FormatError, match="rank 4"):
        replicas(layout, everything(5), (0,))


@pytest.mark.parametrize(
    ("axes", "cuts", "order", "words"),
    [
        ([Axis("a", 0, 1)], [], None, "without size"),
        ([Axis("a", 4, 1), Axis("b", 2, 2)], [], None, "overlap"),
        ([Axis("a", 2, 1), Axis("b", 2, 3)], [], None, "overlap"),
        ([Axis("a", 2, 1)], [DimShard(1, 0)], None, "along no axis"),
        ([Axis("a", 2, 1)], [DimShard(0, -1)], None, "of no dim"),
        ([Axis("a", 2, 1)], [DimShard(0, 0, 0)], None, "into no blocks"),
        ([Axis("a", 2, 1), Axis("b", 2, 2)], [DimShard(0, 0, MAX_BLOCKS), DimShard(1, 0, 2)], None, "blocks"),
        ([Axis("a", MAX_RANKS + 1, 1)], [], None, "ranks"),
        ([Axis("a", 2, 1)], [], (1, 1), "two positions"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_layout_is_refused(axes: list[Axis], cuts: list[DimShard], order: Shape | None, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        Layout(tuple(axes), tuple(cuts), order)


def test_joined_ranges_have_the_ranks_of_all_and_are_the_fewest() -> None:
    choose = random.Random(3)
    for _ in range(200):
        starts = [choose.randint(0, 20) for _ in range(choose.randint(0, 5))]
        ranges = [(start, start + choose.randint(1, 6)) for start in starts]
        assert join_holders(ranges) == as_holders(sorted({rank for a, b in ranges for rank in range(a, b)}))


# ── the geometry of boxes ─────────────────────────────────────────────────────────────────────────────────────────────


BOX_SHAPES: list[Shape] = [(), (1,), (5,), (0,), (3, 4), (4, 1), (1, 4), (2, 3, 2), (2, 1, 3), (2, 0, 3)]


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


@pytest.mark.parametrize("shape", [s for s in BOX_SHAPES if len(s) < 3], ids=str)
def test_the_intersection_holds_what_both_hold(shape: Shape) -> None:
    for a, b in product(boxes(shape), repeat=2):
        both = a.intersect(b)
        assert elements(shape, both) if both else True
        assert set(elements(shape, both) if both else ()) == set(elements(shape, a)) & set(elements(shape, b))


@pytest.mark.parametrize(("start", "stop"), [((3,), (2,)), ((0, 0), (1,))])
def test_a_box_that_ends_before_it_starts_is_refused(start: Shape, stop: Shape) -> None:
    with pytest.raises(FormatError, match="not a box"):
        Box(start, stop)


def oracle(shape: Shape, found: list[Box]) -> str | None:
    counts = numpy.zeros(shape, int)
    for box in found:
        counts[slices(box)] += 1
    return "overlap" if counts.max(initial=0) > 1 else "are covered" if counts.min(initial=1) < 1 else None


@pytest.mark.parametrize("shape", BOX_SHAPES, ids=str)
def test_uncovered_finds_every_gap_and_overlap(shape: Shape) -> None:
    choose, every = random.Random(0), list(boxes(shape))
    for _ in range(300):
        found = [choose.choice(every) for _ in range(choose.randint(0, 4))]
        said, expected = find_cover_error(shape, found), oracle(shape, found)
        assert (said is None) == (expected is None)
        assert expected is None or expected in str(said)
