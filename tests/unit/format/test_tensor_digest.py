"""Digests are what FORMAT.md defines, however a tensor is cut, and tell states apart. Oracle: the code in FORMAT.md."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest

from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.box_digest import alike_digests, box_digest, range_digest
from lightning_shardckpt.format.component_digest import constant_part, part_of_component, whole_digest
from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED
from lightning_shardckpt.format.plan import plan_save
from lightning_shardckpt.format.tensor_digest import TensorDigest, total
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from tests.support import worlds
from tests.unit.format.test_plan import TOPOLOGIES, table

SPECIFICATION = (Path(__file__).parents[3] / "lightning_shardckpt" / "FORMAT.md").read_text()
SHAPES: list[tuple[Shape, int]] = [
    *(((), 4), ((5,), 2), ((7, 3), 4), ((6, 10, 2), 8), ((4, 3, 3, 3), 2), ((2, 3), 16), ((0, 4), 4), ((4, 0), 4)),
    *(((2, 5000), 4), ((40_000,), 1), ((2, 33_001), 1)),  # rows of several segments
]


def defined() -> Callable[[bytes, Shape], tuple[int, int]]:
    """The function in FORMAT.md."""
    section = SPECIFICATION.partition("\n## Digests\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.strip().splitlines()) <= 20
    found: dict[str, Any] = {}
    exec(code, found)
    function: Callable[[bytes, Shape], tuple[int, int]] = found["tensor_digest"]
    return function


def whole(data: bytes, size: int, shape: Shape) -> TensorDigest:
    return box_digest(memoryview(data), size, Box.whole(shape), shape)


def tilings(shape: Shape, draw: random.Random) -> Iterator[Box]:
    """The boxes of a random grid."""
    cuts = [sorted({0, n, *(draw.randrange(n + 1) for _ in range(2))}) for n in shape]
    for ranges in product(*(list(pairwise(of)) for of in cuts)):
        yield Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_it_is_what_the_specification_computes_and_boxes_of_any_grid_add_up_to_it(shape: Shape, size: int) -> None:
    draw = random.Random(prod(shape) + size)
    data = draw.randbytes(prod(shape) * size)
    expected = TensorDigest(*defined()(data, shape))
    assert whole(data, size, shape) == expected
    assert TensorDigest.parse(str(expected)) == expected
    array = numpy.frombuffer(data, f"V{size}").reshape(shape)
    for _ in range(5):
        parts = [
            (box, array[worlds.at(box)].tobytes()) for box in tilings(shape, draw) if 0 not in box.shape or not shape
        ]
        found = total(box_digest(memoryview(part), size, box, shape) for box, part in parts)
        assert found == expected
        edges = sorted({0, len(data), *(draw.randrange(len(data) + 1) for _ in range(3))})
        ranges = [range_digest(memoryview(data)[a:b], a, len(data), shape) for a, b in pairwise(edges)]
        assert total(ranges) == expected


def test_memory_that_is_not_aligned_and_large_boxes_give_the_same() -> None:
    data = random.Random(0).randbytes((5 << 20) + 3)
    shape: Shape = (5, 1 << 20)
    expected = whole(data[: 5 << 20], 1, shape)
    assert box_digest(memoryview(data)[3:], 1, Box.whole(shape), shape) == whole(data[3:], 1, shape) != expected
    halves = [Box((0, 0), (5, 700_001)), Box((0, 700_001), shape)]
    array = numpy.frombuffer(data[: 5 << 20], "u1").reshape(shape)
    parts = [memoryview(array[worlds.at(box)].tobytes()) for box in halves]
    assert total(box_digest(p, 1, b, shape) for p, b in zip(parts, halves, strict=True)) == expected


@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_boxes_that_are_alike_have_together_what_each_has_alone(shape: Shape, size: int) -> None:
    draw = random.Random(prod(shape))
    for box in tilings(shape, draw):
        parts = [draw.randbytes(box.numel * size) for _ in range(3)]
        found = alike_digests(memoryview(b"".join(parts)), 3, size, box, shape)
        assert found == [box_digest(memoryview(part), size, box, shape) for part in parts]


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_state_has_one_digest_on_every_topology(topology: str) -> None:
    """By rank, as saves compute it: each the parts of what it writes."""
    described, (_, _, world) = Component(table(topology), {"tied": "qkv"}), TOPOLOGIES[topology]
    parts = []
    for rank in range(world):
        boxes: dict[str, list[TensorDigest]] = {}
        for piece in plan_save(described.tensors, rank):
            data = worlds.content(worlds.local(piece.key, piece.spec, rank)[worlds.at(piece.part.local)])
            of = box_digest(data, DTYPE_BYTES[piece.spec.dtype], piece.part.box, piece.spec.shape)
            boxes.setdefault(piece.key, []).append(of)
        parts.append(part_of_component(described, boxes))
    digests = {
        key: [whole(worlds.whole(key, spec).tobytes(), DTYPE_BYTES[spec.dtype], spec.shape)]
        for key, spec in described.tensors.items()
    }
    found = total([constant_part(described), *parts])
    assert found == total([constant_part(described), part_of_component(described, digests)])
    assert str(whole_digest({"model": found})) == "f95a3026bded3baa0f1e9ebe064c88c7"  # never to be pinned anew


def test_ten_thousand_single_changes_give_as_many_digests() -> None:
    """Bits, pairs of signs, elements or rows or tensors that swap places, rotations."""
    draw, shapes = random.Random(7), {"a": (60, 9), "b": (60, 9), "c": (400,)}
    state = {name: numpy.frombuffer(draw.randbytes(prod(shape) * 4), "u4") for name, shape in shapes.items()}
    described = Component({n: TensorSpec("F32", shape, REPLICATED, ((0, 1),)) for n, shape in shapes.items()})
    known = {name: whole(array.tobytes(), 4, shapes[name]) for name, array in state.items()}

    def component(digests: dict[str, TensorDigest]) -> TensorDigest:
        return part_of_component(described, {name: [digest] for name, digest in digests.items()})

    swapped = {**known, "a": known["b"], "b": known["a"]}
    changes, found = set[tuple[str, bytes]](), [component(known), component(swapped)]
    while len(changes) < 10_000:
        name, kind = draw.choice(list(shapes)), draw.choice(["bit", "bit", "signs", "elements", "rows", "rotation"])
        changed = state[name].copy().reshape(shapes[name])
        flat = changed.reshape(-1)
        i, j = draw.sample(range(len(flat)), 2)
        if kind == "bit":
            flat[i] ^= 1 << draw.randrange(32)
        elif kind == "signs":
            flat[[i, j]] ^= numpy.uint32(1 << 31)
        elif kind == "elements":
            flat[[i, j]] = flat[[j, i]]
        elif kind == "rows":
            changed[[i % len(changed), j % len(changed)]] = changed[[j % len(changed), i % len(changed)]]
        else:
            flat[:] = numpy.roll(flat, i)
        content = changed.tobytes()
        if content != state[name].tobytes() and (name, content) not in changes:
            changes.add((name, content))
            found.append(component({**known, name: whole(content, 4, shapes[name])}))
    assert len(set(found)) == len(found) == 10_002


def test_zeros_differ_by_their_name_dtype_and_shape() -> None:
    kinds = [("a", "F32", (2, 3)), ("a", "F32", (3, 2)), ("a", "I32", (2, 3)), ("b", "F32", (2, 3))]
    tables = [Component({n: TensorSpec(dtype, shape, REPLICATED, ((0, 1),))}) for n, dtype, shape in kinds]
    assert len({constant_part(of) for of in [*tables, Component({}), Component(tables[0].tensors, {"b": "a"})]}) == 6
