"""Indexes say the same after a trip through JSON, and nothing untrue. Oracle: the values themselves."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

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


# ── what an edited index may say beside what test_format.py breaks: each is refused, with words that tell why ────────


class Deleted(Enum):
    """What an edited index lacks; an enum, whose members have names that are the same in every process."""

    DELETED = 1


DELETED = Deleted.DELETED


def edited(value: Any, path: str, new: Any) -> Any:
    """A copy of a JSON value in which what is at ``path`` is replaced."""
    value = json.loads(json.dumps(value))
    *above, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    place = value
    for part in above:
        place = place[str(part) if isinstance(place, dict) else part]
    if new is DELETED:
        del place[last]
    else:
        place[str(last) if isinstance(place, dict) else last] = new
    return value


def sealed(value: dict[str, Any]) -> bytes:
    value = {k: v for k, v in value.items() if k != "checksum"}
    rest = json.dumps(value).encode()[1:]
    return b'{"checksum":"' + checksum(rest).encode() + b'",\n' + rest


ROOT_EDITS: list[tuple[str, Any, str]] = [
    ("world_size", 0, "world of 0"),
    ("topology", {"a": -1}, "-1 is not a size"),
    ("layouts/0/axes/0", ["a", 2], "ValueError"),
    ("layouts/2/order", 7, "TypeError"),
    ("components/model/tensors/a/0", ["F32"], "unknown dtype"),
    ("components/model/tensors/a/2", 3, "IndexError"),
    ("components/model/tensors/a", ["F32", [8, 3], 0, "x"], "nothing or a 1"),
    ("components/model/indexes/0/0", "a\u0000b", "is not a file name"),
    ("components/model/indexes/0/2", SUM.upper(), "is not a checksum"),
    ("components/model/indexes", {"one": ["x", 1, SUM]}, "ValueError"),
    ("documents", {"..": [1, SUM]}, "is not a file name"),
    ("prefix", "../", "prefix"),
    ("prefix", "0" * 16 + "-", "prefix"),  # of another save
    ("software", DELETED, "software"),
]
RANK_EDITS: list[tuple[str, Any, str]] = [
    ("files", {"../x": [1, SUM]}, "not a file name"),
    ("metadata/a/file", "model-dist-00009-shard-00001.safetensors", "KeyError"),
    ("metadata/a/checksums", "", "0 digits of checksums, expected 16 for each of 1 blocks"),
    ("metadata/a/lengths", [1 << 62, 1 << 62], "lies outside"),
    ("metadata/a/more", 5, "TypeError"),
]


@pytest.mark.parametrize(("path", "new", "words"), ROOT_EDITS, ids=lambda v: str(v)[:40])
def test_an_edited_root_index_is_refused(path: str, new: Any, words: str) -> None:
    with pytest.raises(FormatError, match=f"(?s)file x: .*({words})"):
        root_from_json(sealed(edited(json.loads(root_to_json(a_root())), path, new)), "file x")


@pytest.mark.parametrize(("path", "new", "words"), RANK_EDITS, ids=lambda v: str(v)[:40])
def test_an_edited_rank_index_is_refused(path: str, new: Any, words: str) -> None:
    text = json.dumps(edited(json.loads(rank_index_to_json(a_rank_index())), path, new)).encode()
    with pytest.raises(FormatError, match=f"(?s)file x: .*({words})"):
        rank_index_from_json(text, "file x")
