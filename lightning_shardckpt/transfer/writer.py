"""Write the shard files and indexes of a save plan. Every byte is hashed in memory before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.index import (
    FileInfo,
    RankIndex,
    ShardEntry,
    rank_index_name,
    rank_index_to_json,
    shard_file_name,
)
from lightning_shardckpt.format.plan import Piece, split_into_files
from lightning_shardckpt.format.safetensors_header import HeaderEntry, ShardHeader, plan_header
from lightning_shardckpt.format.value_checks import checksum, checksum_blocks
from lightning_shardckpt.storage.protocol import Draft

MB = 1 << 20
_MIN_BLOCK, _MAX_BLOCK = 4096, MB
_PART = MB  # of a large tensor: each part is hashed and then written while it is in the CPU's cache
_BLOCKS = 96  # halves, thirds, quarters … of a shard are whole blocks, so a reshard reads little more than it needs


def block_bytes(nbytes: int) -> int:
    """Return the bytes that one checksum covers: at most 1/96 of a shard, so that a part of it can be verified.

    >>> block_bytes(100), block_bytes(3 << 20), block_bytes(3 << 30)
    (4096, 32768, 1048576)
    """
    if nbytes <= _BLOCKS * _MIN_BLOCK:  # a fast path: most tensors are small
        return _MIN_BLOCK
    blocks = _BLOCKS * max(-(-nbytes // (_BLOCKS * _MAX_BLOCK)), 1)
    return max(-(-nbytes // blocks), _MIN_BLOCK)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The plan of a shard file: its pieces in stored order, its header, and its size in bytes."""

    name: str
    pieces: tuple[Piece, ...]
    header: ShardHeader
    nbytes: int


def plan_files(component: str, rank: int, pieces: list[Piece], size_per_shard: float) -> list[FilePlan]:
    """Plan the shard files, of at most ``size_per_shard`` MB each, for a rank's pieces."""
    files = []
    for number, group in enumerate(split_into_files(pieces, int(size_per_shard * MB)), start=1):
        entries: list[HeaderEntry] = [(p.key, p.spec.dtype, p.part.box.shape, p.part.box.start) for p in group]
        name, header = shard_file_name(component, rank, number), plan_header(entries)
        files.append(FilePlan(name, tuple(group), header, header.begins[-1] + group[-1].nbytes))
    return files


def write_component(
    draft: Draft, component: str, rank: int, save_id: str, files: list[FilePlan], stage: Callable[[Piece], memoryview]
) -> FileInfo:
    """Write a rank's shard files, of which ``stage`` returns the bytes of a piece, then their index; return its info.

    Raises:
        StateError: if the number of bytes of a piece differs from the plan.
    """
    infos, shards = dict[str, FileInfo](), dict[str, tuple[ShardEntry, ...]]()

    def content(file: FilePlan, header: bytes) -> Iterator[bytes | memoryview]:
        yield header
        begins = file.header.begins
        for piece, begin, end in zip(file.pieces, begins, (*begins[1:], file.nbytes), strict=True):
            data, box, spec, nbytes = stage(piece), piece.part.box, piece.spec, end - begin
            if len(data) != nbytes:
                raise StateError(f"{piece.key!r} has {len(data)} bytes for {box}, expected {nbytes}")
            block, sums = block_bytes(nbytes), list[str]()
            step = max(_PART // block, 1) * block
            for at in range(0, nbytes, step):
                part = data[at : at + step]
                sums.append(checksum_blocks(part, block))
                yield part
            entry = ShardEntry(box, spec.shape, spec.dtype, file.name, begin, block, nbytes, "".join(sums))
            shards[piece.key] = (*shards.get(piece.key, ()), entry)

    for file in files:
        header = file.header.of(save_id)
        draft.write(file.name, content(file, header), nbytes=file.nbytes)
        infos[file.name] = FileInfo(file.name, file.nbytes, checksum(header))
    index = rank_index_to_json(RankIndex(save_id, component, rank, infos, shards))
    info = FileInfo(rank_index_name(component, rank), len(index), checksum(index))
    draft.write(info.name, [index])
    return info
