"""How does a save plan become files? Header, data, checksums: each byte is hashed in memory before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.header import Entry, checksum, encode
from lightning_shardckpt.index import (
    FileInfo,
    RankIndex,
    ShardEntry,
    rank_index_name,
    rank_index_to_json,
    shard_file_name,
)
from lightning_shardckpt.plan import Piece, split_into_files
from lightning_shardckpt.storage.protocol import Draft

MB = 1 << 20
_MIN_BLOCK, _MAX_BLOCK = 4096, MB
_BLOCKS = 96  # halves, thirds, quarters … of a shard are whole blocks: a reshard reads hardly more than it needs

Stage = Callable[[Piece], memoryview]
"""Host memory with the bytes of a piece, row-major; valid until the memoryview is dropped."""


def block_bytes(nbytes: int) -> int:
    """How many bytes one checksum covers: 1/96 of a shard, or less, so that a part of it can be read and verified.

    >>> block_bytes(100), block_bytes(3 << 20), block_bytes(3 << 30)
    (4096, 32768, 1048576)
    """
    blocks = _BLOCKS * max(-(-nbytes // (_BLOCKS * _MAX_BLOCK)), 1)
    return max(-(-nbytes // blocks), _MIN_BLOCK)


def block_checksums(data: memoryview, block: int) -> tuple[str, ...]:
    """The checksum of every ``block`` bytes; the last may be shorter. None for no bytes."""
    return tuple(checksum(data[i : i + block]) for i in range(0, len(data), block))


def write_component(
    draft: Draft,
    component: str,
    rank: int,
    save_id: str,
    pieces: list[Piece],
    stage: Stage,
    size_per_shard: float,
    advance: Callable[[int], Any] = lambda nbytes: None,
) -> FileInfo | None:
    """Write a rank's pieces into shard files of at most ``size_per_shard`` MB, then their index; None without pieces.

    ``advance`` is told of the bytes as they are handed to the storage.
    """
    if not pieces:
        return None
    files: dict[str, FileInfo] = {}
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    for number, group in enumerate(split_into_files(pieces, int(size_per_shard * MB)), start=1):
        name = shard_file_name(component, rank, number)
        entries = [Entry(p.key, p.spec.dtype, p.part.box.shape, p.part.box.start) for p in group]
        header, begins = encode(entries, save_id)
        written: list[ShardEntry] = []
        draft.write(name, _content(header, group, begins, name, stage, written, advance))
        files[name] = FileInfo(name, begins[-1] + group[-1].nbytes, checksum(header))
        for piece, entry in zip(group, written, strict=True):
            shards[piece.key] = (*shards.get(piece.key, ()), entry)
    index = rank_index_to_json(RankIndex(save_id, component, rank, files, shards))
    info = FileInfo(rank_index_name(component, rank), len(index), checksum(index))
    draft.write(info.name, [index])
    return info


def _content(
    header: bytes,
    group: list[Piece],
    begins: list[int],
    name: str,
    stage: Stage,
    written: list[ShardEntry],
    advance: Callable[[int], Any],
) -> Iterator[bytes | memoryview]:
    """The parts of a shard file in order; notes each piece's entry in ``written`` as it goes by."""
    yield header
    for piece, begin in zip(group, begins, strict=True):
        data = stage(piece)
        if len(data) != piece.nbytes:
            raise StateError(
                f"{len(data)} bytes of {piece.key!r} are here, {piece.nbytes} were planned for {piece.part.box}"
            )
        block = block_bytes(len(data))
        sums = block_checksums(data, block)
        written.append(ShardEntry(piece.part.box, piece.spec.shape, piece.spec.dtype, name, begin, block, sums))
        yield data
        advance(len(data))
