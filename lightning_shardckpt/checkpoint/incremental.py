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
from functools import partial
from typing import TypeAlias

from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.plan_cache import SavePlan
from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, ShardCkptError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import checksum, checksum_blocks, count_checksums, slice_checksums
from lightning_shardckpt.format.index import FileInfo, RankIndex, ShardEntry, shard_file_name
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.safetensors_header import HeaderLengthError, read_header
from lightning_shardckpt.storage.protocol import Draft, Reader, Storage
from lightning_shardckpt.storage.router import file_path, is_url
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.writer import (
    StagePiece,
    WrittenFile,
    block_bytes,
    build_rank_index,
    hash_step,
    plan_files,
    write_component,
    write_file,
    write_index,
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


class RankWriter:
    """Writes the shard files and indexes of one rank.

    Args:
        path: of the checkpoint.
        rank: of this process.
        options: the options of the save.
        storage: of ``path``.
        history: earlier saves and loads by the same caller, whose files may be linked.
    """

    def __init__(self, path: str, rank: int, options: SaveOptions, storage: Storage, history: SaveHistory) -> None:
        self._path, self._rank, self._options = path, rank, options
        self._storage, self._history, self._indexes = storage, history, RankIndexes()

    def write(
        self, draft: Draft, plan: SavePlan, frozen: Mapping[str, frozenset[str]], stage: StagePiece, save_id: str
    ) -> RankFiles:
        """Write the files of a plan.

        Args:
            draft: of the checkpoint.
            plan: of this rank.
            frozen: keys of parameters that need no gradient, by component.
            stage: returns the bytes of a piece.
            save_id: of this save.
        """
        if self._options.incremental:
            return self._write_changed(draft, plan, frozen, stage, save_id)
        written = RankFiles()
        for name, files in plan.files.items():
            info = write_component(draft, name, self._rank, save_id, files, stage)
            if info is not None:
                written.indexes[name] = info
        written.nbytes = sum(file.nbytes for files in plan.files.values() for file in files)
        return written

    def _write_changed(
        self, draft: Draft, plan: SavePlan, frozen: Mapping[str, frozenset[str]], stage: StagePiece, save_id: str
    ) -> RankFiles:
        """Write the files of a plan, but link those that the base has."""
        written = RankFiles()
        with self._history.open_base(self._path, draft, self._storage, self._rank) as base:
            for name, planned in plan.files.items():
                pieces = [piece for file in planned for piece in file.pieces]
                if not pieces:
                    continue
                files, remaining = self._link_files(draft, name, pieces, stage, base)
                written.linked_nbytes += sum(file.info.nbytes for file in files)
                for group in divide(remaining, frozen.get(name, frozenset())):
                    first, limit = len(files) + 1, self._options.size_per_shard
                    planned_files = plan_files(name, self._rank, group, limit, first=first)
                    files += [write_file(draft, planned, save_id, stage) for planned in planned_files]
                index = self._indexes[name] = build_rank_index(name, self._rank, save_id, files)
                written.indexes[name] = write_index(draft, index)
                written.nbytes += sum(file.nbytes for file in index.files.values())
        return written

    def _link_files(
        self, draft: Draft, component: str, pieces: Sequence[Piece], stage: StagePiece, base: Base | None
    ) -> tuple[list[WrittenFile], list[Piece]]:
        """Link the files of the base that hold exactly pieces of the plan; return them, and the remaining pieces."""
        remaining = {(piece.key, piece.part.box): piece for piece in pieces}
        files: list[WrittenFile] = []
        index = base.indexes.get(component) if base is not None else None
        for file in base_files(index) if base is not None and index is not None else ():
            held = file.pieces(remaining)
            if base is None or base.error is not None or held is None:
                continue
            if not file.is_intact(base.reader) or not is_unchanged(file, held, stage):
                continue
            name = shard_file_name(component, self._rank, len(files) + 1)
            if (error := draft.link(name, base.reader, file.info.name)) is None:
                files.append(file.describe_link(name, held))
                for piece in held:
                    del remaining[piece.key, piece.part.box]
            elif error.errno not in _ONE_FILE_ERRORS:
                base.error = error
        return files, [*remaining.values()]

    def remember_files(self) -> None:
        """Let later saves link the files of this one. Called once the save is complete on all ranks."""
        if self._options.incremental:
            self._history.add(self._path, self._indexes)


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

    def is_intact(self, reader: Reader) -> bool:
        """Return True if the file's size and header match the base's index."""
        name = self.info.name
        try:
            if reader.size(name) != self.info.nbytes:
                return False
            header = read_header(partial(reader.read_into, name), self.info.nbytes)
        except (OSError, EOFError, FormatError, HeaderLengthError):
            return False
        return checksum(header) == self.info.checksum

    def describe_link(self, name: str, pieces: Sequence[Piece]) -> WrittenFile:
        """Return the file's description for the index of the new save."""
        entries = [
            (key, entry._replace(file=name, global_shape=piece.spec.shape))
            for (key, entry), piece in zip(self.entries, pieces, strict=True)
        ]
        return WrittenFile(FileInfo(name, self.info.nbytes, self.info.checksum, self.info.save_id), entries)


def base_files(index: RankIndex) -> Iterator[BaseFile]:
    """Yield the files of a rank's index that hold tensors."""
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


_MAX_DIRECTORIES = 4  # for each, a base with its block checksums is kept
_ONE_FILE_ERRORS = (errno.EMLINK, errno.ENOENT, errno.ESTALE)
"""Errors that don't affect other files: too many links, or the base is gone."""

RankIndexes: TypeAlias = dict[str, RankIndex]
"""The indexes that a rank wrote, by component."""


class SaveHistory:
    """The checkpoints whose files the next save may link, by directory. Not for concurrent use."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[str, RankIndexes | None]] = {}
        self._cannot_link: set[str] = set()

    def add(self, path: str, indexes: RankIndexes | None = None) -> None:
        """Add a complete checkpoint that was loaded, or saved, with this rank's indexes."""
        directory = _directory(path)
        self._last.pop(directory, None)
        self._last[directory] = _absolute(path), indexes
        while len(self._last) > _MAX_DIRECTORIES:
            del self._last[next(iter(self._last))]

    @contextmanager
    def open_base(self, path: str, draft: Draft, storage: Storage, rank: int) -> Iterator[Base | None]:
        """Open the base of a save to ``path``, which is not deleted while it is open; None if there is none.

        Adds notes to ``draft`` if files can't be linked.
        """
        directory = _directory(path)
        if directory in self._cannot_link:
            yield None
            return
        if not draft.can_link:
            self._cannot_link.add(directory)
            draft.notes.append(f"incremental=True: files can't be linked at {path!r}, so every save writes all of them")
            yield None
            return
        base = None
        for known, indexes in filter(None, (self._last.get(directory), (_absolute(path), None))):
            try:
                base = _open_checkpoint(known, indexes, storage, rank)
                break
            except CheckpointNotFoundError:
                continue
            except (ShardCkptError, OSError) as error:
                draft.notes.append(f"no file of {known!r} is linked in {path!r}: {error}")
        if base is None:
            yield None
            return
        try:
            yield base
        finally:
            base.reader.close()
            if base.error is not None:
                self._cannot_link.add(directory)
                draft.notes.append(
                    f"incremental=True: files can't be linked in {directory!r}, so every save writes all of them: "
                    f"{base.error}"
                )


@dataclass(slots=True)
class Base:
    """An open checkpoint whose files may be linked; ``error`` is set if the file system refuses links."""

    reader: Reader
    indexes: Mapping[str, RankIndex]
    error: OSError | None = None


def _open_checkpoint(path: str, saved: RankIndexes | None, storage: Storage, rank: int) -> Base:
    if saved is not None:
        return Base(storage.open(path), saved)  # each linked file names the save that wrote it
    checkpoint = Checkpoint(storage, path)
    try:
        names = [name for name, component in checkpoint.root.components.items() if rank in component.indexes]
        indexes = {name: checkpoint.index(name, rank) for name in names}
        for name, index in indexes.items():
            for file in index.files:
                checkpoint.check_file(name, rank, file)
    except BaseException:
        checkpoint.close()
        raise
    return Base(checkpoint.reader, indexes)


def _directory(path: str) -> str:
    return os.path.dirname(_absolute(path))


def _absolute(path: str) -> str:
    return path if is_url(path) else os.path.abspath(file_path(path))
