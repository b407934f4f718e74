"""The bytes come back, no others, and never changed ones. Oracle: the tensors' bytes, and a reader that counts."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import get_args

import numpy
import pytest

from lightning_shardckpt.errors import CorruptionError, FormatError, ShardCkptError, StateError
from lightning_shardckpt.format.index import ROOT_NAME, TensorSpec, rank_index_from_json, root_from_json
from lightning_shardckpt.format.layout import REPLICATED, Box, DimShard, Layout, parts_of_rank
from lightning_shardckpt.format.plan import plan_save
from lightning_shardckpt.format.safetensors_header import parse_header
from lightning_shardckpt.format.value_checks import checksum, checksum_blocks
from lightning_shardckpt.sources.source import read_windows, sharded_source
from lightning_shardckpt.transfer.reader import Checkpoint, ReadSizes, fetch
from lightning_shardckpt.transfer.writer import plan_files, write_component
from tests.support import worlds
from tests.support.storages import MemoryReader, MemoryStorage
from tests.support.worlds import PATH, SAVE_ID, mesh

FSDP = {n: mesh(n, cuts=(DimShard(0, 0),)) for n in (1, 2, 3, 4, 5, 8)}


@dataclass
class Counting:
    """A reader that notes what is read of which file."""

    inner: MemoryReader
    reads: list[tuple[str, int, int]] = field(default_factory=list)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    high_latency = False

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.reads.append((name, offset, len(target)))
        self.inner.read_into(name, offset, target)

    def names(self) -> list[str]:
        return self.inner.names()

    def clone(self) -> Counting:
        return Counting(self.inner, self.reads)

    def close(self) -> None:
        self.inner.close()

    def of_shards(self) -> int:
        return sum(n for name, _, n in self.reads if name.endswith(".safetensors"))


class CountingStorage(MemoryStorage):
    def open(self, path: str) -> MemoryReader:
        return Counting(super().open(path))  # type: ignore[return-value]


def saved(tensors: dict[str, TensorSpec], world: int, size_per_shard: float = 1024) -> CountingStorage:
    storage = CountingStorage()
    worlds.save(storage, {"model": tensors}, world, size_per_shard=size_per_shard)
    return storage


def spec(shape: tuple[int, ...], layout: Layout, world: int, dtype: str = "F32") -> TensorSpec:
    return TensorSpec(dtype, shape, layout, ((0, world),))


def test_files_hold_what_their_header_and_the_index_say() -> None:
    tensors = {"a": spec((6, 4), FSDP[2], 2), "b": spec((3,), REPLICATED, 2, "U8"), "c": spec((), REPLICATED, 2, "F64")}
    storage = saved(tensors, 2)
    files = storage.checkpoints[PATH]
    root = root_from_json(files[ROOT_NAME], "")
    for rank, info in root.components["model"].indexes.items():
        assert (len(files[info.name]), checksum(files[info.name])) == (info.nbytes, info.checksum)
        index = rank_index_from_json(files[info.name], "")
        assert (index.rank, index.component, index.save_id) == (rank, "model", SAVE_ID)
        for shard_file in index.files.values():
            content = files[shard_file.name]
            length = 8 + int.from_bytes(content[:8], "little")
            assert (len(content), checksum(content[:length])) == (shard_file.nbytes, shard_file.checksum)
            stored, metadata = parse_header(content[:length], "")
            assert metadata["save_id"] == SAVE_ID
            for key, (entry,) in index.shards.items():
                data = content[entry.begin : entry.begin + entry.nbytes]
                expected = worlds.content(worlds.whole(key, tensors[key])[worlds.at(entry.box)])
                assert (stored[key].begin, stored[key].nbytes, data) == (entry.begin, entry.nbytes, bytes(expected))
                assert entry.checksums == checksum_blocks(memoryview(data), entry.block)


def test_memory_that_is_not_what_was_planned_is_not_written() -> None:
    storage = MemoryStorage()
    tensors = {"a": spec((6, 4), REPLICATED, 1)}
    with pytest.raises(StateError, match=r"'a' has 92 bytes for .*, expected 96"):
        files = plan_files("model", 0, plan_save(tensors, 0), 1)
        write_component(storage.draft(PATH, SAVE_ID), "model", 0, SAVE_ID, files, lambda p: memoryview(bytes(92)))


RESHARDS = [(4, 2), (4, 3), (3, 4), (4, 1), (1, 5)]


@pytest.mark.parametrize("how", get_args(worlds.How))
@pytest.mark.parametrize(("source", "target"), RESHARDS)
def test_a_reshard_along_dim_0_reads_little_more_than_it_needs(source: int, target: int, how: worlds.How) -> None:
    shape = (1024, 257)  # about 1 MiB
    storage = saved({"w": spec(shape, FSDP[source], source)}, source)
    for rank in range(target):
        with Checkpoint(storage, PATH) as checkpoint:
            reader: Counting = checkpoint.reader  # type: ignore[assignment]
            parts = parts_of_rank(FSDP[target], shape, rank)
            needed = sum(part.box.numel for part in parts) * 4
            found = worlds.empty_local(parts, worlds.whole("w", spec(shape, REPLICATED, 1)))
            wanted = worlds.requests(checkpoint, "w", parts, found)
            opened = {request.writer for request in wanted}
            reader.reads.clear()
            fetch(PATH, checkpoint.reader, wanted, verify=how == "verified")
            assert needed <= reader.of_shards() <= (1.1 * needed if how == "verified" else needed)
            assert {name for name, _, _ in reader.reads} == {
                f"model-dist-{writer:05d}-shard-00001.safetensors" for writer in opened
            }
            assert numpy.array_equal(found, worlds.local("w", spec(shape, FSDP[target], target), rank))


def test_a_part_is_verified_by_the_blocks_that_it_touches() -> None:
    shape = (96 << 13,)  # 3 MiB in blocks of 32 KiB
    storage = saved({"w": spec(shape, REPLICATED, 1)}, 1)
    with Checkpoint(storage, PATH) as checkpoint:
        part = parts_of_rank(FSDP[1], shape, 0)[0]
        third = type(part)(Box((8192 + 1,), (2 * 8192 + 1,)), (0,))  # the second block but for an element, and one more
        (request,) = worlds.requests(checkpoint, "w", (third,), numpy.zeros(8193, "f4"))
        begin = request.entry.begin
        reader: Counting = checkpoint.reader  # type: ignore[assignment]
        reader.reads.clear()
        fetch(PATH, checkpoint.reader, [request], verify=True)
        assert reader.reads == [(request.entry.file, begin + (1 << 15), 1 << 16)]
        files = storage.checkpoints[PATH]
        for offset, touched in ((0, False), (32767, False), (32768, True), (98303, True), (98304, False)):
            intact = files[request.entry.file]
            files[request.entry.file] = flipped(intact, begin + offset)
            said = rf"'w'.*rank 0, bytes {begin + offset // 32768 * 32768} to"
            with pytest.raises(CorruptionError, match=said) if touched else nullcontext():
                fetch(PATH, checkpoint.reader, [request], verify=True)
            files[request.entry.file] = intact


WAYS: tuple[worlds.How, ...] = get_args(worlds.How)


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    "seed", [*range(12), *(pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.sweep]) for seed in range(12, 24))]
)
def test_regions_windows_blocks_and_gaps_of_any_size_meet(seed: int, how: worlds.How) -> None:
    draw = random.Random(seed)
    sizes = ReadSizes(
        window=draw.choice((100, 4500, 9000, 1 << 20)),
        direct=draw.choice((1, 64, 1 << 20)),
        gap=draw.choice((0, 500)),
        threads=seed % 2 + draw.randint(1, 2),
        threaded=0,
    )
    dims = draw.randint(1, 4)
    shape = tuple(draw.randint(1, {1: 20000, 2: 160, 3: 30, 4: 13}[dims]) for _ in range(dims))
    dtype = draw.choice(("U8", "BF16", "F32", "F64", "C128"))
    layouts = [mesh(k, cuts=(DimShard(0, d, b),)) for k in (2, 3) for d in range(dims) for b in (1, 2)]
    layouts += [mesh(2, 2, cuts=(DimShard(0, a), DimShard(1, b))) for a in range(dims) for b in range(dims)]
    written, wanted = draw.choice(layouts), draw.choice(layouts)
    world = prod(axis.size for axis in written.axes)
    tensors = {"w": spec(shape, written, world, dtype), "v": spec((5, *shape), FSDP[1], world, dtype)}
    storage = saved(tensors, world)
    ranks = range(prod(axis.size for axis in wanted.axes))
    expected = {(r, k): worlds.local(k, spec(t.shape, wanted, 1, dtype), r) for r in ranks for k, t in tensors.items()}

    def load(rank: int, key: str) -> bool:
        with Checkpoint(storage, PATH) as checkpoint:
            found = worlds.load(checkpoint, key, wanted, rank, how, sizes)
        return found.tobytes() == expected[rank, key].tobytes()

    assert all(load(rank, key) for rank, key in expected)
    files, noticed = storage.checkpoints[PATH], 0
    for _ in range(8 if how != "unverified" else 0):
        name = draw.choice([name for name in files if name.endswith("safetensors")])
        intact = files[name]
        files[name] = flipped(intact, draw.randrange(8 + int.from_bytes(intact[:8], "little"), len(intact)))
        for rank, key in expected:
            try:
                assert load(rank, key)  # nobody needs that byte
            except CorruptionError as error:
                assert name in str(error)
                noticed += 1
        files[name] = intact
    assert noticed or how == "unverified"


@pytest.mark.parametrize("nbytes", [16, 72, 1000, 5000, 1 << 20])
def test_tensors_are_read_whole_and_in_parts_through_memory_of_any_size(nbytes: int) -> None:
    tensors = {
        "rows": spec((40, 7), FSDP[3], 3),
        "columns": spec((9, 31), mesh(2, cuts=(DimShard(0, 1),)), 2, "C128"),
        "scalar": spec((), REPLICATED, 1, "BF16"),
        "none": spec((0, 3), REPLICATED, 1),
        "cube": spec((3, 4, 5), FSDP[2], 2, "U8"),
    }
    storage = saved(tensors, 3)
    parts = {"cube": Box((0, 1, 2), (3, 3, 5)), "rows": Box((4, 0), (30, 7))}
    wanted = [*(("model", key, None) for key in tensors), *(("model", key, box) for key, box in parts.items())]
    found = [b""] * len(wanted)
    with Checkpoint(storage, PATH) as checkpoint:
        for number, data in read_windows(sharded_source(checkpoint), wanted, nbytes):
            assert 0 < len(data) <= nbytes
            found[number] += data
    whole = {key: worlds.whole(key, tensor) for key, tensor in tensors.items()}
    expected = [*whole.values(), *(whole[key][worlds.at(box)] for key, box in parts.items())]
    assert found == [array.tobytes() for array in expected]


def flipped(content: bytes, at: int, bit: int = 0) -> bytes:
    return content[:at] + bytes([content[at] ^ (1 << bit)]) + content[at + 1 :]


SMALL = {"w": spec((3, 2), FSDP[2], 2), "b": spec((5,), REPLICATED, 2, "BF16"), "flag": spec((), REPLICATED, 2, "BOOL")}


def load_all(storage: MemoryStorage, target: dict[str, numpy.ndarray]) -> None:
    """Fill the targets, and verify every byte on the way, as ``checkpoint.load`` does."""
    with Checkpoint(storage, PATH) as checkpoint:
        wanted = []
        for key, tensor in SMALL.items():
            wanted += worlds.requests(checkpoint, key, parts_of_rank(REPLICATED, tensor.shape, 0), target[key])
        fetch(PATH, checkpoint.reader, wanted, verify=True)


def test_a_flipped_bit_in_any_byte_of_any_file_is_an_error_that_names_the_file() -> None:
    storage = MemoryStorage()
    worlds.save(storage, {"model": SMALL}, 2)
    files = storage.checkpoints[PATH]
    target = {key: numpy.full_like(worlds.whole(key, tensor), 7) for key, tensor in SMALL.items()}
    for name, content in list(files.items()):
        for at in range(len(content)):
            files[name] = flipped(content, at, at % 8)
            with pytest.raises((CorruptionError, FormatError), match=name) as caught:
                load_all(storage, target)
            assert isinstance(caught.value, ShardCkptError)
            files[name] = content
    load_all(storage, target)
    for key, tensor in SMALL.items():
        assert target[key].tobytes() == worlds.whole(key, tensor).tobytes()
