"""Everything is written once and found again. Oracle: the unsharded tensors, element by element."""

from __future__ import annotations

import random
import sys
from collections import Counter
from itertools import product

import pytest

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format import layout as layout_module
from lightning_shardckpt.format import plan as plan_module
from lightning_shardckpt.format.index import Component as IndexComponent
from lightning_shardckpt.format.index import RootIndex, TensorSpec, root_to_json
from lightning_shardckpt.format.layout import REPLICATED, DimShard, Layout, Part, Shape, find_cover_error, parts_of_rank
from lightning_shardckpt.format.plan import (
    Piece,
    Tensors,
    check_cover,
    choose_replicas,
    plan_load,
    plan_save,
    split_into_files,
    table_digest,
)
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.transfer.reader import Checkpoint
from tests.support import worlds
from tests.support.storages import MemoryStorage
from tests.support.worlds import TOPOLOGIES, mesh, table


@pytest.fixture(scope="module")
def saved() -> MemoryStorage:
    """A checkpoint of every topology under its name."""
    storage = MemoryStorage()
    for name, (_, _, world) in TOPOLOGIES.items():
        worlds.save(storage, {"model": table(name)}, world, path=name)
    return storage


@pytest.mark.parametrize("source", TOPOLOGIES)
def test_any_topology_loads_what_any_other_saved(source: str, saved: MemoryStorage) -> None:
    with Checkpoint(saved, source) as checkpoint:
        for target, (_, _, world) in TOPOLOGIES.items():
            for (key, spec), rank in product(table(target).items(), range(world)):
                found, expected = worlds.load(checkpoint, key, spec.layout, rank), worlds.local(key, spec, rank)
                assert (found.shape, found.tobytes()) == (expected.shape, expected.tobytes()), target


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_element_is_written_by_one_rank(topology: str) -> None:
    tensors, (_, _, world) = table(topology), TOPOLOGIES[topology]
    check_cover("model", tensors)
    written = [piece for rank in range(world) for piece in plan_save(tensors, rank)]
    for key, spec in tensors.items():
        assert find_cover_error(spec.shape, [p.part.box for p in written if p.key == key]) is None
    assert [p.writer for p in written if p.key == "empty"] == [0]
    assert all(p.part in parts_of_rank(p.spec.layout, p.spec.shape, p.writer) for p in written if p.key == "norm")


def test_a_gap_is_named() -> None:
    tensors = {
        "fits": TensorSpec("F32", (3, 2), mesh(4, cuts=(DimShard(0, 0),)), ((0, 3),)),
        "gap": TensorSpec("F32", (8, 2), mesh(4, cuts=(DimShard(0, 0),)), ((0, 3),)),
    }
    with pytest.raises(FormatError, match=r"model: the boxes of 'gap', shape \(8, 2\), .*\(6, 0\)\.\.\(8, 2\)"):
        check_cover("model", tensors)


MODELS: dict[str, dict[str, Shape]] = {
    "transformer": {"embed": (50_257, 512), **{f"{i}.{n}": (512, n) for i in range(6) for n in (1, 512, 513, 2048)}},
    "many tiny": {f"t{i}": (i % 17 + 1,) for i in range(500)},
    "awkward dims": {f"t{i}": (5, 7, 90, 3) for i in range(40)},
}


@pytest.mark.parametrize("model", MODELS)
def test_replicas_share_the_writing_evenly(model: str) -> None:
    for layout, world in ((REPLICATED, 3), (REPLICATED, 8), (mesh(2, 2, cuts=(DimShard(1, 0),)), 4)):
        tensors = {key: TensorSpec("F32", shape, layout, ((0, world),)) for key, shape in MODELS[model].items()}
        sizes = [sum(p.nbytes for p in plan_save(tensors, rank)) for rank in range(world)]
        assert max(sizes) <= 1.2 * sum(sizes) / world


def piece(key: str, nbytes: int, start: int = 0, dtype: str = "U8") -> Piece:
    spec = TensorSpec(dtype, (10_000,), REPLICATED, ((0, 1),))
    stop = start + nbytes // DTYPE_BYTES[dtype]
    return Piece(key, spec, Part(worlds.Box((start,), (stop,)), (start,)), 0)


def test_files_keep_to_the_limit_and_hold_a_name_once() -> None:
    choose = random.Random(3)
    for limit in (0, 1, 64, 100, 1000, 1 << 30):
        pieces = [
            piece(f"k{choose.randint(0, 30)}", choose.choice([0, 1, 8, 64, 99, 100, 101, 500]), i) for i in range(80)
        ]
        files = split_into_files(pieces, limit)
        assert Counter(id(p) for f in files for p in f) == Counter(map(id, pieces))
        for found in files:
            assert len(found) == 1 or sum(p.nbytes for p in found) <= limit
            assert len({p.key for p in found}) == len(found)


def large(world: int, kind: str) -> dict[str, TensorSpec]:
    """1,000 tensors."""
    layouts = {
        "fsdp": mesh(world, cuts=(DimShard(0, 0),)),
        "fsdp x tp": mesh(world // 8, 8, cuts=(DimShard(1, 0), DimShard(0, 0))),
    }
    shapes = [(4096, 4096), (16384, 4096), (4096,), (32000, 4096)]
    return {f"layers.{i}.weight": TensorSpec("BF16", shapes[i % 4], layouts[kind], ((0, world),)) for i in range(1000)}


def forget() -> None:
    for module in (layout_module, plan_module):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def steps(*calls: object) -> int:
    """How many lines and calls of Python the calls take; unlike time, the same on every machine."""
    count = 0

    def trace(frame: object, event: str, arg: object) -> object:
        nonlocal count
        count += 1
        return trace

    forget()
    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        for call in calls:
            call()  # type: ignore[operator]
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("fsdp x tp", marks=pytest.mark.slow)])
def test_planning_costs_the_same_in_every_world(kind: str) -> None:
    costs, sizes = [], []
    for world in (64, 1024, 16384):
        tensors = large(world, kind)
        rank = random.Random(world).randrange(world)

        half = mesh(world // 2, cuts=(DimShard(0, 0),))

        def load(tensors: Tensors = tensors, rank: int = rank // 2, half: Layout = half) -> None:
            chosen = choose_replicas(tensors)
            for key, spec in tensors.items():
                list(plan_load(spec, chosen[key], parts_of_rank(half, spec.shape, rank)))

        costs.append(
            [
                steps(lambda t=tensors, r=rank: plan_save(t, r)),
                steps(lambda t=tensors: check_cover("model", t)),
                steps(lambda t=tensors: table_digest({"model": IndexComponent(t)})),
                steps(load),
            ]
        )
        sizes.append(len(root_to_json(RootIndex("0" * 32, world, {"model": IndexComponent(tensors)}, {}))))
    for small, *larger in zip(*costs, strict=True):
        assert max(larger) <= 1.5 * small + 2000, costs
    assert sizes[-1] - sizes[0] < 100, sizes


def test_ranks_with_the_same_table_have_the_same_digest() -> None:
    tensors = {"a": TensorSpec("F32", (4,), REPLICATED, ((0, 2),)), "b": TensorSpec("F32", (5,), REPLICATED, ((0, 2),))}
    base = table_digest({"model": IndexComponent(tensors)})
    assert base == table_digest({"model": IndexComponent(dict(reversed(tensors.items())))})
    others = [
        TensorSpec("F16", (4,), REPLICATED, ((0, 2),)),
        TensorSpec("F32", (4, 1), REPLICATED, ((0, 2),)),
        TensorSpec("F32", (4,), mesh(2, cuts=(DimShard(0, 0),)), ((0, 2),)),
        TensorSpec("F32", (4,), REPLICATED, ((0, 2),), True),
    ]
    digests = [table_digest({"model": IndexComponent({**tensors, "a": other})}) for other in others]
    digests += [table_digest({"trainer": IndexComponent(tensors)}), table_digest({"model": IndexComponent({})})]
    digests += [table_digest({"model": IndexComponent(tensors, {"c": "a"})}), base]
    assert len(set(digests)) == len(digests)
