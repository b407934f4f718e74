"""A layout shards as torch does. Oracle: ``torch.chunk`` on tensors that hold their own indices."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product
from math import prod

import numpy
import pytest
import torch

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.layout import (
    REPLICATED,
    Axis,
    Box,
    DimShard,
    Holders,
    Layout,
    Shape,
    find_cover_error,
    find_unheld_shards,
    parts_of_rank,
    replicas,
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
    for cut, at in zip(layout.cuts, layout.shard(rank), strict=True):
        pieces = [chunk(tensor, cut.blocks, i, cut.dim) for i in range(cut.blocks)]
        taken = [chunk(p, layout.axes[cut.axis].size, at, cut.dim) for p in pieces]
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


def test_replicas_of_a_permuted_mesh_are_those_at_its_positions() -> None:
    layout, _ = LAYOUTS["permuted replicas"]  # positions 0 to 3 are the ranks 3, 1, 0, 2
    assert [tuple(replicas(layout, everything(4), shard)) for shard in ((0,), (1,))] == [(0, 3), (1, 2)]
    assert list(find_unheld_shards(layout, ((0, 3),))) == []
    assert list(find_unheld_shards(layout, ((1, 3),))) == [(0,)]
    with pytest.raises(FormatError, match="rank 4"):
        layout.shard(4)
    with pytest.raises(FormatError, match="rank 4"):
        replicas(layout, everything(5), (0,))


BOX_SHAPES: list[Shape] = [(), (1,), (5,), (0,), (3, 4), (4, 1), (1, 4), (2, 3, 2), (2, 1, 3), (2, 0, 3)]


def boxes(shape: Shape) -> Iterator[Box]:
    """Every box of a tensor of this shape, empty ones too."""
    ranges = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    for choice in product(*ranges):
        yield Box(tuple(a for a, _ in choice), tuple(b for _, b in choice))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))


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
