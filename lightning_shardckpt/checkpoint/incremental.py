"""Link the shard files of a save that exist in an earlier checkpoint, the base, and write the others.

Each rank decides alone, in the writing thread, without communication. The base is the last complete checkpoint that
this process saved or loaded in the same directory, or the checkpoint that the save replaces. It is held open like by
any reader. If it is gone, all files are written.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lightning_shardckpt.checkpoint.plan_cache import SavePlan
from lightning_shardckpt.errors import CheckpointNotFoundError, ShardCkptError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import checksum_blocks, count_checksums, slice_checksums
from lightning_shardckpt.format.index import FileInfo, RankIndex, ShardEntry, shard_file_name
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.storage.protocol import Draft, Reader, Storage
from lightning_shardckpt.storage.router import absolute_path
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.writer import (
    StagePiece,
    WrittenFile,
    block_bytes,
    hash_step,
    plan_files,
    write_component,
)

# ── all files of a rank ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        indexes: by component.
        nbytes: of all shard files.
        linked_nbytes: of the shard files that were linked instead of written.
    """

    indexes: dict[str, FileInfo] = field(default_factory=dict)
    nbytes: int = 0
    linked_nbytes: int = 0


def write_files(
    draft: Draft,
    plan: SavePlan,
    stage: StagePiece,
    save_id: str,
    rank: int,
    *,
    base: Base | None = None,
    divided: Mapping[str, frozenset[str]] | None = None,
    size_per_shard: float = 0.0,
) -> RankFiles:
    """Write the shard files and indexes of one rank, or link shard files that the base has.

    Args:
        draft: of the checkpoint.
        plan: of this rank.
        stage: returns the bytes of a piece.
        save_id: of this save.
        rank: of this process.
        base: of an incremental save, if there is one.
        divided: of an incremental save: by component, keys of parameters that need no gradient, which get their files.
        size_per_shard: of an incremental save, whose files are planned here.
    """
    written = RankFiles()
    for name, files in plan.files.items():
        linked: list[WrittenFile] = []
        if divided is not None:
            pieces = [piece for file in files for piece in file.pieces]
            linked, remaining = _link_files(draft, name, rank, pieces, stage, base)
            files = []
            for group in divide(remaining, divided.get(name, frozenset())):
                files += plan_files(name, rank, group, size_per_shard, first=len(linked) + len(files) + 1)
        if files or linked:
            written.indexes[name] = write_component(draft, name, rank, save_id, files, stage, linked=linked)
        nbytes = sum(file.info.nbytes for file in linked)
        written.linked_nbytes += nbytes
        written.nbytes += nbytes + sum(file.nbytes for file in files)
    return written


def _link_files(
    draft: Draft, component: str, rank: int, pieces: Sequence[Piece], stage: StagePiece, base: Base | None
) -> tuple[list[WrittenFile], list[Piece]]:
    """Link the files of the base that hold exactly pieces of the plan; return them, and the remaining pieces."""
    remaining = {(piece.key, piece.part.box): piece for piece in pieces}
    files: list[WrittenFile] = []
    for file in base_files(base.indexes.get(component)) if base is not None else ():
        assert base is not None
        held = file.pieces(remaining)
        if base.error is not None or held is None or not is_unchanged(file, held, stage):
            continue
        name = shard_file_name(component, rank, len(files) + 1)
        if (error := draft.link(name, base.reader, file.info.name)) is None:
            files.append(file.describe_link(name, held))
            for piece in held:
                del remaining[piece.key, piece.part.box]
        elif error.errno not in _ONE_FILE_ERRORS:
            base.error = error
    return files, [*remaining.values()]


# ── files of the base ─────────────────────────────────────────────────────────────────────────────────────────────────
# A file is linked if the base's index lists exactly pieces of the plan in it, and the checksums of these pieces in
# memory equal those of the index; names and times don't count. A file can only be linked as a whole, so frozen
# parameters get files of their own. No torch.


_FROZEN_DIVISOR = 64  # frozen parameters get own files if they are at least 1/64 of a component's bytes

PieceKey = tuple[str, Box]
"""The key of a piece: the name of its tensor, and its box."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A shard file of the base, with its entries in order; ``info`` names the save that wrote it."""

    info: FileInfo
    entries: tuple[tuple[str, ShardEntry], ...]

    def pieces(self, planned: Mapping[PieceKey, Piece]) -> tuple[Piece, ...] | None:
        """Return the planned pieces that the file holds, in order; None if it holds any other."""
        pieces = tuple(planned.get((key, entry.box)) for key, entry in self.entries)
        is_same = all(
            piece is not None and piece.spec.dtype == entry.dtype and entry.block == block_bytes(piece.nbytes)
            for piece, (_, entry) in zip(pieces, self.entries, strict=True)
        )
        return pieces if is_same else None  # type: ignore[return-value]  # none of them is None

    def describe_link(self, name: str, pieces: Sequence[Piece]) -> WrittenFile:
        """Return the file's description for the index of the new save."""
        entries = [
            (key, entry._replace(file=name, global_shape=piece.spec.shape))
            for (key, entry), piece in zip(self.entries, pieces, strict=True)
        ]
        return WrittenFile(FileInfo(name, self.info.nbytes, self.info.checksum, self.info.save_id), entries)


def base_files(index: RankIndex | None) -> Iterator[BaseFile]:
    """Yield the files of a rank's index that hold tensors."""
    if index is None:
        return
    by_file: dict[str, list[tuple[str, ShardEntry]]] = {name: [] for name in index.files}
    for key, entries in index.shards.items():
        for entry in entries:
            by_file[entry.file].append((key, entry))
    for name, info in index.files.items():
        with_save_id = FileInfo(name, info.nbytes, info.checksum, info.save_id or index.save_id)
        if by_file[name]:
            yield BaseFile(with_save_id, tuple(sorted(by_file[name], key=lambda item: item[1].begin)))


def is_unchanged(file: BaseFile, pieces: Sequence[Piece], stage: StagePiece) -> bool:
    """Return True if the checksums of the pieces in memory equal those of the file."""
    for piece, (_, entry) in zip(pieces, file.entries, strict=True):
        data, step = stage(piece), hash_step(entry.block)
        if len(data) != entry.nbytes:
            return False
        for at in range(0, entry.nbytes, step):
            sums = checksum_blocks(data[at : at + step], entry.block)
            if sums != slice_checksums(entry.checksums, at // entry.block, count_checksums(sums)):
                return False
    return True


def divide(pieces: Iterable[Piece], frozen: frozenset[str]) -> list[list[Piece]]:
    """Return the pieces of frozen parameters and the others as separate groups, each of which gets its own files.

    A single group if frozen parameters are only a small share of the bytes.
    """
    groups: tuple[list[Piece], list[Piece]] = [], []
    for piece in pieces:
        groups[piece.key not in frozen].append(piece)
    nbytes = [sum(piece.nbytes for piece in group) for group in groups]
    if nbytes[0] * _FROZEN_DIVISOR < sum(nbytes):
        return [[*groups[0], *groups[1]]]
    return [group for group in groups if group]


_ONE_FILE_ERRORS = (errno.EMLINK, errno.ENOENT, errno.ESTALE)
"""Errors that don't affect other files: too many links, or the base is gone."""


@dataclass(slots=True)
class Base:
    """An open checkpoint whose files may be linked; ``error`` is set if the file system refuses links."""

    reader: Reader
    indexes: Mapping[str, RankIndex]
    error: OSError | None = None


class SaveHistory:
    """The checkpoints whose files the next save may link, by directory. Not for concurrent use."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}
        self._cannot_link: set[str] = set()

    def add(self, path: str) -> None:
        """Add a complete checkpoint that was loaded or saved."""
        self._last[_directory(path)] = absolute_path(path)

    @contextmanager
    def open_base(self, path: str, draft: Draft, storage: Storage, rank: int) -> Iterator[Base | None]:
        """Open the base of a save to ``path``, which is not deleted while it is open; None if there is none.

        Adds notes to ``draft`` if files can't be linked.
        """
        directory = _directory(path)
        for known in filter(None, (self._last.get(directory), absolute_path(path))):
            if directory in self._cannot_link:
                break
            try:
                checkpoint = Checkpoint(storage, known)
            except CheckpointNotFoundError:
                continue
            except (ShardCkptError, OSError) as error:
                draft.notes.append(f"no file of {known!r} is linked in {path!r}: {error}")
                continue
            with checkpoint:
                base = _base_of(checkpoint, path, draft, rank)
                yield base
            if base is not None and base.error is not None:
                self._cannot_link.add(directory)
                draft.notes.append(
                    f"incremental=True: files can't be linked in {directory!r}, so every save writes all of them: "
                    f"{base.error}"
                )
            return
        yield None


def _base_of(checkpoint: Checkpoint, path: str, draft: Draft, rank: int) -> Base | None:
    """Return the base of a rank; None, with a note, if its files are damaged."""
    try:
        names = [name for name, component in checkpoint.root.components.items() if rank in component.indexes]
        indexes = {name: checkpoint.index(name, rank) for name in names}
        for name, index in indexes.items():
            for file in index.files:
                checkpoint.check_file(name, rank, file)
        return Base(checkpoint.reader, indexes)
    except (ShardCkptError, OSError) as error:
        draft.notes.append(f"no file of {checkpoint.path!r} is linked in {path!r}: {error}")
        return None


def _directory(path: str) -> str:
    return os.path.dirname(absolute_path(path))
