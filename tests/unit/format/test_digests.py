"""Digests are what FORMAT.md defines, however a tensor is cut, and tell states apart. Oracle: the code in FORMAT.md."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import numpy
import pytest

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.box_digest import RunsOfBox
from lightning_shardckpt.format.component_digest import (
    ComponentString,
    NamedDigest,
    component_digest,
    values_digest,
    whole_digest,
)
from lightning_shardckpt.format.crc64 import crc64, crc64_text, joined, part, total, zeros
from lightning_shardckpt.format.crc64_arrays import followed, parts_of, steps_of
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.index import Component, RankIndex, RootIndex, ShardEntry, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, DimShard
from lightning_shardckpt.format.plan import plan_save
from lightning_shardckpt.format.rank_index_json import rank_index_from_json, rank_index_to_json
from lightning_shardckpt.format.root_index_json import root_from_json, root_to_json
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.transfer.digest_parts import DigestParts, DigestPlan
from tests.support import worlds
from tests.support.worlds import mesh
from tests.unit.format.test_plan import TOPOLOGIES, table

SPECIFICATION = (Path(__file__).parents[3] / "lightning_shardckpt" / "FORMAT.md").read_text()
POLYNOMIAL = 0xAD93D23594C93659 | 1 << 64  # highest power first, as the catalogue of CRCs has it
SHAPES: list[tuple[Shape, int]] = [
    *(((), 4), ((5,), 2), ((7, 3), 4), ((6, 10, 2), 8), ((4, 3, 3, 3), 2), ((2, 3), 16), ((0, 4), 4), ((4, 0), 4)),
    *(((2, 5000), 4), ((40_000,), 1), ((2, 33_001), 1)),  # few runs, of many bytes
    *(((1000, 7), 1), ((300, 40), 8), ((130, 2, 160), 4), ((9, 20, 12), 4)),  # many runs, short ones and long ones
]


def defined() -> dict[str, Any]:
    """The functions in FORMAT.md."""
    section = SPECIFICATION.partition("\n## Digests\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.strip().splitlines()) <= 20
    found: dict[str, Any] = {}
    exec(code, found)
    return found


DEFINED = defined()


def tilings(shape: Shape, draw: random.Random) -> Iterator[Box]:
    """The boxes of a random grid that have elements."""
    cuts = [sorted({0, n, *(draw.randrange(n + 1) for _ in range(2))}) for n in shape]
    for ranges in product(*(list(pairwise(of)) for of in cuts)):
        yield Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def component_of(table: Component, parts: Mapping[str, int]) -> int:
    string = ComponentString.of(table)
    return string.of_zeros ^ part_in(string, parts)


def part_in(string: ComponentString, parts: Mapping[str, int]) -> int:
    """The part in a component's digest of boxes that have these in those of their tensors."""
    return string.part(b"".join(parts.get(key, 0).to_bytes(8, "big") for key in string.keys))


# ── what is defined ───────────────────────────────────────────────────────────────────────────────────────────────


def test_the_crc_is_the_one_that_the_specification_computes() -> None:
    draw = random.Random(1)
    assert DEFINED["crc64"](b"123456789") == crc64(b"123456789") == 0xAE8B14860A799888  # of the catalogue
    for nbytes in (0, 1, 7, 8, 100, 4096):
        data = draw.randbytes(nbytes)
        cut = draw.randrange(nbytes + 1)
        assert DEFINED["crc64"](data) == crc64(data) == crc64(memoryview(data)[cut:], crc64(data[:cut]))


@pytest.mark.parametrize("name", ["a", "blocks.10.weight", "é", 'a"\n["b","F32",[2]]\n', "\u2028 \U0001f600"])
def test_a_component_has_the_digest_that_the_specification_computes(name: str) -> None:
    draw = random.Random(name)
    shapes: dict[str, tuple[str, Shape]] = {name: ("F32", (3, 2)), "blocks.9.weight": ("C128", ()), "b": ("BF16", (0,))}
    data = {key: draw.randbytes(prod(shape) * DTYPE_BYTES[dtype]) for key, (dtype, shape) in shapes.items()}
    described = Component(
        {key: TensorSpec(dtype, shape, REPLICATED, ((0, 1),)) for key, (dtype, shape) in shapes.items()},
        {"alias": name, "~": "blocks.9.weight"},
    )
    names = {**{key: key for key in shapes}, **described.aliases}
    expected = DEFINED["component"](sorted((alias, *shapes[key], data[key]) for alias, key in names.items()))
    assert component_digest(NamedDigest(n, *shapes[key], crc64(data[key])) for n, key in names.items()) == expected
    assert component_of(described, {key: part(of) for key, of in data.items()}) == expected


def test_values_and_the_whole_have_the_digests_that_the_specification_computes() -> None:
    values = [("0", "w", "lr", 0.5), ("0", "é", "state step", {"v": "3", "$": "int"}), ("0", "a\n", "lr", None)]
    expected = DEFINED["crc64"](b"".join(sorted(DEFINED["line"](value) for value in values)))
    assert values_digest(values) == values_digest(values[::-1]) == expected
    whole = whole_digest({"optimizer": 1, "model": expected})
    assert whole == DEFINED["crc64"](DEFINED["line"]({"model": f"{expected:016x}", "optimizer": f"{1:016x}"}))


# ── arithmetic ────────────────────────────────────────────────────────────────────────────────────────────────────


def times(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), highest power first, modulo that of the CRC."""
    product = 0
    for bit in range(63, -1, -1):
        product = product << 1 ^ (b >> bit & 1) * a
        product ^= (product >> 64) * POLYNOMIAL
    return product


def power_of_x(exponent: int) -> int:
    power, square = 1, 2
    while exponent:
        power, square, exponent = times(power, square) if exponent & 1 else power, times(square, square), exponent >> 1
    return power


def reflected(value: int) -> int:
    return int(f"{value:064b}"[::-1], 2)


def test_zeros_that_follow_multiply_by_a_power_of_x() -> None:
    draw = random.Random(2)
    for nbytes in (*range(9), *(draw.getrandbits(bits) for bits in range(4, 63)), 2**63 - 1, 2**64 - 1, 2**64, 2**70):
        first, second = draw.getrandbits(64), draw.getrandbits(64)
        assert joined(first, second, nbytes) == reflected(times(reflected(first), power_of_x(8 * nbytes))) ^ second
    assert [zeros(nbytes) for nbytes in (0, 1, 1000)] == [crc64(bytes(nbytes)) for nbytes in (0, 1, 1000)]


def test_many_parts_are_followed_at_once() -> None:
    draw = random.Random(3)
    parts = [draw.getrandbits(64) for _ in range(300)]
    nbytes = [0, 1, 2**63 - 1, *(draw.getrandbits(draw.randrange(64)) for _ in range(297))]
    few = [draw.choice([0, 3, 4096]) for _ in parts]  # of a few lengths, each of which is a step
    for after, most in ((nbytes, 63), (few, 2), ([0] * 300, 0)):
        expected = [joined(one, 0, bytes_after) for one, bytes_after in zip(parts, after, strict=True)]
        assert followed(parts_of(parts), steps := steps_of(after)).tolist() == expected
        assert len(steps) <= most
    assert followed(parts_of([]), steps_of([])).tolist() == []


def test_the_polynomial_is_primitive() -> None:
    """So no two bits of a tensor, however far apart, cancel each other out."""
    assert prod(factors := (3, 5, 17, 257, 641, 65537, 6700417)) == 2**64 - 1
    assert power_of_x(2**64 - 1) == 1
    assert 1 not in [power_of_x((2**64 - 1) // factor) for factor in factors]


# ── boxes ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("shape", "size"), SHAPES)
def test_a_box_has_the_part_of_a_tensor_with_zeros_elsewhere_and_boxes_of_any_grid_have_all(
    shape: Shape, size: int
) -> None:
    draw = random.Random(prod(shape) + size)
    data = draw.randbytes(prod(shape) * size)
    array = numpy.frombuffer(data, f"V{size}").reshape(shape)
    for _ in range(5):
        parts = []
        for box in tilings(shape, draw):
            alone = numpy.zeros_like(array)
            alone[worlds.at(box)] = array[worlds.at(box)]
            found = RunsOfBox.of(box, shape, size).part(memoryview(array[worlds.at(box)].tobytes()))
            assert found == crc64(alone.tobytes()) ^ zeros(len(data))
            parts.append(found)
        assert total(parts) ^ zeros(len(data)) == crc64(data)


@pytest.mark.parametrize(
    ("shape", "cuts"),
    [
        ((70_000, 3), (1,)),  # more runs than are taken at a time
        ((6000, 100), (1, 60)),  # more bytes than are
        ((100, 5000), (7, 199, 400)),  # far apart: short ones, and long ones
    ],
)
def test_boxes_of_many_runs(shape: tuple[int, int], cuts: tuple[int, ...]) -> None:
    rows, columns = shape
    array = numpy.frombuffer(random.Random(0).randbytes(prod(shape)), numpy.uint8).reshape(shape)
    boxes = [Box((0, first), (rows, stop)) for first, stop in pairwise([0, *cuts, columns])]
    parts = [RunsOfBox.of(box, shape, 1).part(memoryview(array[worlds.at(box)].tobytes())) for box in boxes]
    assert total(parts) ^ zeros(array.nbytes) == crc64(array.tobytes())


def test_a_large_box_is_followed_piece_by_piece() -> None:
    data, cuts = random.Random(5).randbytes(96), [0, 1, 40, 96]
    runs = TensorSpec("U8", (3, 4, 12), mesh(2, cuts=(DimShard(0, 1),)), ((0, 2),))
    whole = TensorSpec("U8", (8, 12), REPLICATED, ((0, 1),))
    described = Component({"runs": runs, "whole": whole})
    for rank in range(2):
        pieces = plan_save(described.tensors, rank)
        plan = DigestPlan(ComponentString.of(described), pieces)
        digests, expected = DigestParts(plan), DigestParts(plan)
        digests.expect(pieces)
        expected.expect(pieces)
        for piece in pieces:
            content = memoryview(data)[: prod(piece.part.box.shape)]
            expected.add(piece, content)
            follow = digests.begin(piece, content)
            assert (follow is None) == (piece.key == "runs")
            for first, stop in pairwise(cuts) if follow is not None else ():
                follow(content[first:stop])
        keys = [piece.key for piece in pieces]
        assert digests.text(keys) == expected.text(keys) != ""
        assert digests.of_component() == expected.of_component() != 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_one_state_has_one_digest_on_every_topology(topology: str) -> None:
    """By rank, as saves compute it: each the parts of what it writes."""
    described, (_, _, world) = Component(table(topology), {"tied": "qkv"}), TOPOLOGIES[topology]
    string = ComponentString.of(described)
    ranks = []
    for rank in range(world):
        pieces = plan_save(described.tensors, rank)
        plan = DigestPlan(string, pieces)
        for seed in range(3):  # one plan, however often and in whatever order it is written
            digests, expected = DigestParts(plan), dict[str, list[int]]()
            order = random.Random(seed % 2).sample(pieces, len(pieces))
            digests.expect(order)
            for place, piece in enumerate(order):
                data = worlds.content(worlds.local(piece.key, piece.spec, rank)[worlds.at(piece.part.local)])
                runs = RunsOfBox.of(piece.part.box, piece.spec.shape, DTYPE_BYTES[piece.spec.dtype])
                expected.setdefault(piece.key, []).append(of_box := runs.part(data))
                if seed and place % 3 == 0:
                    digests.add_known(of_box)
                else:
                    digests.add(piece, data)
            assert digests.text([*expected]) == "".join(crc64_text(of_box) for of in expected.values() for of_box in of)
            of_tensors = {key: total(of) for key, of in expected.items()}
            assert digests.of_component() == part_in(string, of_tensors)
        with pytest.raises(ValueError, match="an index has other tensors"):
            digests.text([*expected, "another"])
        ranks.append(of_tensors)
    whole = {key: worlds.whole(key, spec).tobytes() for key, spec in described.tensors.items()}
    for key, data in whole.items():
        assert total(parts.get(key, 0) for parts in ranks) ^ zeros(len(data)) == crc64(data)
    found = total(part_in(string, of) for of in ranks) ^ string.of_zeros
    names = [*((key, key) for key in described.tensors), *described.aliases.items()]
    of_names = [(name, key, described.tensors[key]) for name, key in names]
    rows = [NamedDigest(name, spec.dtype, spec.shape, crc64(whole[key])) for name, key, spec in of_names]
    assert found == component_digest(rows)
    assert crc64_text(whole_digest({"model": found})) == "7f99343039e7ee99"  # never to be pinned anew


# ── on disk ───────────────────────────────────────────────────────────────────────────────────────────────────────


def rank_index(crc64: str) -> RankIndex:
    """Three boxes: a tensor in two, and one after it."""

    def entry(key: str, start: int) -> ShardEntry:
        return ShardEntry(Box((start,), (start + 1,)), (3,), "U8", f"{key}.safetensors", 8, 4096, 1, "0" * 16)

    shards = {"a": (entry("a", 0), entry("b", 2)), "ü": (entry("c", 0),)}
    files = {f"{name}.safetensors": FileInfo(f"{name}.safetensors", 9, "0" * 16) for name in "abc"}
    return RankIndex(worlds.SAVE_ID, "model", 0, files, shards, crc64)


def test_a_rank_index_has_the_part_of_each_box() -> None:
    digits = "0123456789abcdef" * 3
    for index in (rank_index(digits), rank_index("")):
        text = rank_index_to_json(index)
        spaced = json.dumps(json.loads(text)).encode()  # for the parser, and not the scanner
        assert rank_index_from_json(text, "i") == rank_index_from_json(spaced, "i") == index
    boxes = [("a", Box((0,), (1,)), (3,)), ("a", Box((2,), (3,)), (3,)), ("ü", Box((0,), (1,)), (3,))]
    assert rank_index(digits).parts() == dict.fromkeys(boxes, 0x0123456789ABCDEF) and rank_index("").parts() == {}


@pytest.mark.parametrize("wrong", ["0", "0" * 47, "0" * 64, "0" * 47 + "A", "0" * 47 + " ", "é" * 48, 0, None, ["0"]])
def test_a_rank_index_with_other_digits_is_refused(wrong: Any) -> None:
    value = json.loads(rank_index_to_json(rank_index("0" * 48))) | {"crc64": wrong}
    with pytest.raises(FormatError, match=r"^i: crc64 has .*(for 'ü'|for 'a'|for each of 3 boxes)"):
        rank_index_from_json(json.dumps(value, separators=(",", ":")).encode(), "i")


@pytest.mark.parametrize("world", [2, 300])
def test_a_root_index_has_the_digest_of_each_component(world: int) -> None:
    info = FileInfo("model-meta-dist-00000.index.json", 9, "0" * 16)
    spec = TensorSpec("F32", (2,), REPLICATED, ((0, world),))
    for digest in ("0123456789abcdef", None):
        root = RootIndex(worlds.SAVE_ID, world, {"model": Component({"a": spec}, {}, {0: info}, digest)}, {})
        assert root_from_json(root_to_json(root), "r") == root
    for wrong in ("0" * 15, "0" * 32, "G" * 16):
        root = RootIndex(worlds.SAVE_ID, world, {"model": Component({"a": spec}, {}, {0: info}, wrong)}, {})
        with pytest.raises(FormatError, match=f"^r: '{wrong}'"):
            root_from_json(root_to_json(root), "r")


# ── collisions ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_ten_thousand_single_changes_give_as_many_digests() -> None:
    """Bits, pairs of signs, elements or rows or tensors that swap places, rotations."""
    draw, shapes = random.Random(7), {"a": (60, 9), "b": (60, 9), "c": (400,)}
    state = {name: numpy.frombuffer(draw.randbytes(prod(shape) * 4), "u4") for name, shape in shapes.items()}
    described = Component({n: TensorSpec("F32", shape, REPLICATED, ((0, 1),)) for n, shape in shapes.items()})
    known = {name: part(array.tobytes()) for name, array in state.items()}
    string = ComponentString.of(described)
    swapped = {**known, "a": known["b"], "b": known["a"]}
    changes, found = set[tuple[str, bytes]](), [part_in(string, known), part_in(string, swapped)]
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
            found.append(part_in(string, {**known, name: part(content)}))
    assert len(set(found)) == len(found) == 10_002


def test_zeros_differ_by_their_name_dtype_and_shape() -> None:
    kinds = [("a", "F32", (2, 3)), ("a", "F32", (3, 2)), ("a", "I32", (2, 3)), ("b", "F32", (2, 3))]
    tables = [Component({n: TensorSpec(dtype, shape, REPLICATED, ((0, 1),))}) for n, dtype, shape in kinds]
    tables += [Component({}), Component(tables[0].tensors, {"b": "a"})]
    assert len({ComponentString.of(table).of_zeros for table in tables}) == 6
