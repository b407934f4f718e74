"""Write the files of a save plan: header, data, checksums; each byte is hashed in memory before it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.checksum import SEPARATOR, checksum, checksum_blocks
from lightning_shardckpt.format.file_names import FileInfo, rank_index_name, shard_file_name
from lightning_shardckpt.format.index import RankIndex, ShardEntry
from lightning_shardckpt.format.index_json import rank_index_to_json
from lightning_shardckpt.format.plan import Piece, split_into_files
from lightning_shardckpt.format.safetensors_header import HeaderEntry, ShardHeader, plan_header
from lightning_shardckpt.storage.protocol import Draft

MB = 1 << 20
_MIN_BLOCK, _MAX_BLOCK = 4096, MB
_PART = MB  # of a large tensor at a time: what was hashed just now is copied from the CPU's cache, and goes on its way
_BLOCKS = 96  # halves, thirds, quarters … of a shard are whole blocks: a reshard reads hardly more than it needs

Stage = Callable[[Piece], memoryview]
"""Host memory with the bytes of a piece, row-major; valid until the memoryview is dropped."""


def block_bytes(nbytes: int) -> int:
    """Return the bytes that one checksum covers: 1/96 of a shard, or less, so that a part can be read and verified.

    >>> block_bytes(100), block_bytes(3 << 20), block_bytes(3 << 30)
    (4096, 32768, 1048576)
    """
    if nbytes <= _BLOCKS * _MIN_BLOCK:  # a shortcut: most tensors are small
        return _MIN_BLOCK
    blocks = _BLOCKS * max(-(-nbytes // (_BLOCKS * _MAX_BLOCK)), 1)
    return max(-(-nbytes // blocks), _MIN_BLOCK)


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A shard file to write: its pieces, in the order in which they are stored."""

    name: str
    pieces: tuple[Piece, ...]
    header: ShardHeader

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.header.begins[-1] + self.pieces[-1].nbytes


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A shard file that is there, and what the index says of its pieces, in order."""

    info: FileInfo
    entries: Sequence[tuple[str, ShardEntry]]


def plan_files(
    component: str, rank: int, pieces: list[Piece], size_per_shard: float, *, first: int = 1
) -> list[FilePlan]:
    """The shard files, of at most ``size_per_shard`` MB each, that a rank writes its pieces into.

    ``first``: the number in the name of the first one.
    """
    files = []
    for number, group in enumerate(split_into_files(pieces, int(size_per_shard * MB)), start=first):
        entries: list[HeaderEntry] = [(p.key, p.spec.dtype, p.part.box.shape, p.part.box.start) for p in group]
        files.append(FilePlan(shard_file_name(component, rank, number), tuple(group), plan_header(entries)))
    return files


def write_component(
    draft: Draft,
    component: str,
    rank: int,
    save_id: str,
    files: list[FilePlan],
    stage: Stage,
    advance: Callable[[int], Any] = lambda nbytes: None,
) -> FileInfo | None:
    """Write a rank's shard files, then their index.

    Args:
        draft: takes the files.
        component: whose files they are, such as "model".
        rank: that writes them.
        save_id: of the save, in the header of every file.
        files: what to write, from ``plan_files``.
        stage: gives the bytes of a piece.
        advance: told of the number of bytes, as they are handed to the storage.

    Returns:
        The index's name, size and checksum; None if there are no files.

    Raises:
        StateError: if a piece has another number of bytes than was planned.
    """
    if not files:
        return None
    written = [write_file(draft, file, save_id, stage, advance) for file in files]
    return write_index(draft, index_of(component, rank, save_id, written))


def write_file(
    draft: Draft,
    file: FilePlan,
    save_id: str,
    stage: Stage,
    advance: Callable[[int], Any] = lambda nbytes: None,
) -> WrittenFile:
    """Write a shard file, with the arguments of ``write_component``; return what the index says of it."""
    header = file.header.of(save_id)
    written: list[ShardEntry] = []
    draft.write(file.name, _content(header, file, stage, written, advance))
    info = FileInfo(file.name, file.nbytes, checksum(header))
    return WrittenFile(info, [(piece.key, entry) for piece, entry in zip(file.pieces, written, strict=True)])


def index_of(component: str, rank: int, save_id: str, written: Iterable[WrittenFile]) -> RankIndex:
    """The index of a rank's shard files."""
    infos: dict[str, FileInfo] = {}
    shards: dict[str, tuple[ShardEntry, ...]] = {}
    for file in written:
        infos[file.info.name] = file.info
        for key, entry in file.entries:
            shards[key] = (*shards[key], entry) if key in shards else (entry,)
    return RankIndex(save_id, component, rank, infos, shards)


def write_index(draft: Draft, index: RankIndex) -> FileInfo:
    """Write a rank's index; all files that it describes are there."""
    content = rank_index_to_json(index)
    info = FileInfo(rank_index_name(index.component, index.rank), len(content), checksum(content))
    draft.write(info.name, [content])
    return info


def hash_step(block: int) -> int:
    """Return how many bytes, which are whole blocks, are hashed at a time."""
    return max(_PART // block, 1) * block


def _content(
    header: bytes,
    file: FilePlan,
    stage: Stage,
    written: list[ShardEntry],
    advance: Callable[[int], Any],
) -> Iterator[bytes | memoryview]:
    """The parts of a shard file in order; notes each piece's entry in ``written`` as it goes by."""
    yield header
    begins = file.header.begins
    for piece, begin, end in zip(file.pieces, begins, (*begins[1:], file.nbytes), strict=True):
        data, box, spec, nbytes = stage(piece), piece.part.box, piece.spec, end - begin
        if len(data) != nbytes:
            raise StateError(f"{len(data)} bytes of {piece.key!r} are here, {nbytes} were planned for {box}")
        block, sums = block_bytes(nbytes), list[str]()
        step = hash_step(block)
        for at in range(0, nbytes, step):
            part = data[at : at + step] if nbytes > step else data
            sums.append(checksum_blocks(part, block))
            yield part
            advance(len(part))
        written.append(ShardEntry(box, spec.shape, spec.dtype, file.name, begin, block, nbytes, SEPARATOR.join(sums)))
