"""Indexes say the same after a trip through JSON, and nothing untrue. Oracle: the values themselves."""

from __future__ import annotations

import json

import pytest

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.index import (
    Component,
    FileInfo,
    RankIndex,
    RootIndex,
    ShardEntry,
    TensorSpec,
    rank_index_from_json,
    rank_index_name,
    rank_index_to_json,
    root_from_json,
    root_to_json,
    shard_file_name,
)
from lightning_shardckpt.format.layout import REPLICATED, Box, DimShard
from lightning_shardckpt.format.value_checks import checksum
from tests.support.worlds import mesh

FSDP = mesh(2, 2, cuts=(DimShard(1, 0), DimShard(0, 0, 3)))
PERMUTED = mesh(4, cuts=(DimShard(0, 0),), order=(3, 1, 0, 2))
SUM = "0123456789abcdef"
TWO = SUM * 2


def a_root() -> RootIndex:
    tensors = {
        "a": TensorSpec("F32", (8, 3), FSDP, ((0, 4),)),
        "b.é": TensorSpec("BF16", (), REPLICATED, ((0, 1), (2, 4)), True),
        "c": TensorSpec("I64", (0, 2), PERMUTED, ((0, 4),)),
        "d": TensorSpec("F32", (8, 3), FSDP, ((0, 4),)),
    }
    indexes = {rank: FileInfo(rank_index_name("model", rank), 100 + rank, SUM) for rank in range(4)}
    return RootIndex(
        save_id="5afe" * 8,
        world_size=4,
        components={"model": Component(tensors, {"tied": "a"}, indexes), "optimizer": Component({})},
        documents={"trainer-state.json": FileInfo("trainer-state.json", 5, SUM)},
        step=3,
        epoch=None,
        topology={"data_parallel_shard": 2},
        software={"torch": "2.13"},
    )


def a_rank_index() -> RankIndex:
    name = shard_file_name("model", 2, 1)
    first = ShardEntry(Box((2, 0), (4, 3)), (8, 3), "F32", name, 64, 4096, 24, SUM)
    more = ShardEntry(Box((6, 0), (8, 3)), (8, 3), "F32", name, 88, 16, 24, TWO)
    empty = ShardEntry(Box((0,), (0,)), (0,), "U8", name, 112, 4096, 0, "")
    shards = {"a": (first, more), "e": (empty,), 'two\nlines, "quoted" ✓': (empty,)}
    return RankIndex("5afe" * 8, "model", 2, {name: FileInfo(name, 112, SUM)}, shards)


def test_a_root_index_comes_back_as_it_was() -> None:
    assert root_from_json(root_to_json(a_root()), "x") == a_root()


def test_a_rank_index_comes_back_as_it_was() -> None:
    assert rank_index_from_json(rank_index_to_json(a_rank_index()), "x") == a_rank_index()


def test_the_first_line_of_the_root_index_seals_the_rest() -> None:
    text = root_to_json(a_root())
    line, _, rest = text.partition(b"\n")
    assert json.loads(text)["checksum"] == checksum(rest)
    assert line == b'{"checksum":"' + checksum(rest).encode() + b'",'
    for at in range(len(text)):
        damaged = bytearray(text)
        damaged[at] ^= 1
        with pytest.raises((CorruptionError, FormatError), match="x"):
            root_from_json(bytes(damaged), "x")
