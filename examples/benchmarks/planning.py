"""Section planning: the time in which a rank finds out what it writes and reads, in worlds of any size.

Pure functions in one process: 1,000 parameters and AdamW's moments of them. The peers exchange their plans; ours follow
from layouts, so that a rank sends a digest, and what it wrote.
"""

from __future__ import annotations

import json
import random
import time
from argparse import Namespace
from math import prod

from turns import MB, Facts, Row

from lightning_shardckpt.format import layout as layout_module
from lightning_shardckpt.format import plan as plan_module
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import Component, FileInfo, RootIndex, TensorSpec, document_name, rank_index_name
from lightning_shardckpt.format.index_json import root_to_json
from lightning_shardckpt.format.layout import Axis, DimShard, Layout, parts_of_rank
from lightning_shardckpt.format.plan import choose_replicas, plan_load, plan_save, table_digest

WORLDS = (64, 1024, 16384)
_SHAPES = [(4096, 4096), (16384, 4096), (4096,), (32000, 4096)]
_PARAMETERS = 1000


def _mesh(*sizes: int, cuts: tuple[DimShard, ...]) -> Layout:
    return Layout(tuple(Axis(f"m{i}", n, prod(sizes[i + 1 :])) for i, n in enumerate(sizes)), cuts)


def _layouts(world: int) -> dict[str, Layout]:
    return {
        "FSDP": _mesh(world, cuts=(DimShard(0, 0),)),
        "HSDP": _mesh(world // 8, 8, cuts=(DimShard(1, 0),)),
        "FSDP × TP": _mesh(world // 8, 8, cuts=(DimShard(1, 0), DimShard(0, 0))),
    }


def _tables(world: int, layout: Layout) -> dict[str, dict[str, TensorSpec]]:
    everyone = ((0, world),)

    def table(dtype: str, *names: str) -> dict[str, TensorSpec]:
        return {
            name.format(i): TensorSpec(dtype, _SHAPES[i % 4], layout, everyone)
            for i in range(_PARAMETERS)
            for name in names
        }

    model = table("BF16", "layers.{}.weight")
    return {
        "model": model,
        "optimizer": table("F32", *(f"0/layers.{{}}.weight/{m}" for m in ("exp_avg", "exp_avg_sq"))),
    }


def planning(options: Namespace, folder: str) -> list[Row]:
    """For one rank; loads are onto FSDP over half as many ranks."""
    rows: dict[tuple[int, str], Row] = {}
    for _ in range(options.rounds):
        for world in WORLDS:
            for kind, layout in _layouts(world).items():
                about = {"section": "planning", "case": f"{world:,} ranks", "way": kind, "limit": None, "peer": None}
                row = rows.setdefault((world, kind), {**about, "rounds": []})
                row["rounds"].append(_facts(world, layout))
    return list(rows.values())


def _facts(world: int, layout: Layout) -> Facts:
    tables, rank = _tables(world, layout), world // 3
    _forget()
    begin = time.perf_counter()
    digest = checksum(table_digest({name: Component(tensors) for name, tensors in tables.items()}).encode())
    pieces = {name: plan_save(tensors, rank) for name, tensors in tables.items()}
    save_s = time.perf_counter() - begin
    half = _mesh(world // 2, cuts=(DimShard(0, 0),))
    _forget()
    begin, overlaps = time.perf_counter(), 0
    for tensors in tables.values():
        chosen = choose_replicas(tensors)
        for key, spec in tensors.items():
            overlaps += len(list(plan_load(spec, chosen[key], parts_of_rank(half, spec.shape, rank // 2))))
    load_s = time.perf_counter() - begin
    assert all(pieces.values()) and overlaps
    # what Save.prepare and Save.write report to rank 0; FileInfo is a name, a size and a checksum
    files = {name: [rank_index_name(name, rank), 123456, "0" * 16] for name in tables}
    wish = {"path": "/checkpoints/step-100000.ckpt", "step": 100000, "digest": digest}
    wrote = {"indexes": files, "documents": [], "elements": 1 << 40}
    sent = len(json.dumps(wish)) + len(json.dumps(wrote))
    drawn = random.Random(world)  # sizes as of ranks that wrote anything from one tensor to all: they are never alike

    def info(name: str, most: int) -> FileInfo:
        return FileInfo(name, drawn.randrange(500, most), f"{drawn.getrandbits(64):016x}")

    infos = {name: {r: info(rank_index_name(name, r), 600_000) for r in range(world)} for name in tables}
    states = [info(document_name("trainer-state", r), 100_000) for r in range(world)]
    components = {n: Component(t, {}, infos[n]) for n, t in tables.items()}
    root = RootIndex("0" * 32, world, components, {info.name: info for info in states})
    return {"save_s": save_s, "load_s": load_s, "sent_b": sent, "root_mb": len(root_to_json(root)) / MB}


def _forget() -> None:
    """As in a new process: nothing is cached."""
    for module in (layout_module, plan_module):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
