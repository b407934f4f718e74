"""Link the shard files of a save that an earlier checkpoint has already, and write the rest.

Each rank decides for itself, in the thread that writes, so ranks exchange nothing. The base is the last complete
checkpoint that was saved or loaded here in the same directory, or the one that is about to be replaced. It is held open
like by any reader, and may be gone: then everything is written.
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
from lightning_shardckpt.format.file_names import FileInfo, shard_file_name
from lightning_shardckpt.format.index import RankIndex, ShardEntry
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.safetensors_header import HeaderLengthError, read_header
from lightning_shardckpt.storage.protocol import Draft, Reader, Storage
from lightning_shardckpt.storage.router import file_path, is_url
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.writer import (
    Stage,
    WrittenFile,
    block_bytes,
    hash_step,
    index_of,
    plan_files,
    write_component,
    write_file,
    write_index,
)

# ── all files of a rank ───────────────────────────────────────────────────────────────────────────────────────────────
# Write the shard files and indexes of one rank: all of them, or those that no earlier checkpoint has.


@dataclass(slots=True)
class RankFiles:
    """The files of one rank.

    Attributes:
        indexes: by component.
        nbytes: of all shard files.
        linked_nbytes: of those that were linked, and not written.
    """

    indexes: dict[str, FileInfo] = field(default_factory=dict)
    nbytes: int = 0
    linked_nbytes: int = 0


class RankWriter:
    """Writes what one rank has to save at ``path``.

    Args:
        path: of the checkpoint.
        rank: this one.
        options: what the caller of the save chose.
        storage: where ``path`` is.
        history: of earlier saves and loads by the same caller, whose files may be linked.
    """

    def __init__(self, path: str, rank: int, options: SaveOptions, storage: Storage, history: SaveHistory) -> None:
        self._path, self._rank, self._options = path, rank, options
        self._storage, self._history, self._indexes = storage, history, Indexes()

    def write(
        self, draft: Draft, plan: SavePlan, frozen: Mapping[str, frozenset[str]], stage: Stage, save_id: str
    ) -> RankFiles:
        """Write the files of a plan.

        Args:
            draft: of the checkpoint.
            plan: of this rank.
            frozen: keys of parameters for which no gradient is computed, by component.
            stage: gives the bytes of a piece.
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
        self, draft: Draft, plan: SavePlan, frozen: Mapping[str, frozenset[str]], stage: Stage, save_id: str
    ) -> RankFiles:
        """Do the same, but link the files that an earlier checkpoint has."""
        written = RankFiles()
        with self._history.base(self._path, draft, self._storage, self._rank) as base:
            for name, planned in plan.files.items():
                pieces = [piece for file in planned for piece in file.pieces]
                if not pieces:
                    continue
                files, left = self._linked(draft, name, pieces, stage, base)
                written.linked_nbytes += sum(file.info.nbytes for file in files)
                for group in divide(left, frozen.get(name, frozenset())):
                    first, limit = len(files) + 1, self._options.size_per_shard
                    planned_files = plan_files(name, self._rank, group, limit, first=first)
                    files += [write_file(draft, planned, save_id, stage) for planned in planned_files]
                index = self._indexes[name] = index_of(name, self._rank, save_id, files)
                written.indexes[name] = write_index(draft, index)
                written.nbytes += sum(file.nbytes for file in index.files.values())
        return written

    def _linked(
        self, draft: Draft, component: str, pieces: Sequence[Piece], stage: Stage, base: Base | None
    ) -> tuple[list[WrittenFile], list[Piece]]:
        """Link the files of the base that have what is to be saved; returns them, and the pieces that are left."""
        left = {(piece.key, piece.part.box): piece for piece in pieces}
        files: list[WrittenFile] = []
        index = base.indexes.get(component) if base is not None else None
        for file in base_files(index) if base is not None and index is not None else ():
            inside = file.pieces(left)
            if base is None or base.error is not None or inside is None:
                continue
            if not file.is_intact(base.reader) or not is_unchanged(file, inside, stage):
                continue
            name = shard_file_name(component, self._rank, len(files) + 1)
            if (error := draft.link(name, base.reader, file.info.name)) is None:
                files.append(file.linked_as(name, inside))
                for piece in inside:
                    del left[piece.key, piece.part.box]
            elif error.errno not in _OF_ONE_FILE:
                base.error = error
        return files, [*left.values()]

    def completed(self) -> None:
        """Let later saves link the files of this one: it is complete on all ranks."""
        if self._options.incremental:
            self._history.saved(self._path, self._indexes)


# ── files of the base ─────────────────────────────────────────────────────────────────────────────────────────────────
# Link shard files of an earlier checkpoint, the base, in place of writing the same bytes again. No torch.
#
# A file is linked if the base's index says that it has the pieces that are to be saved, and checksums of them in memory
# are those of the index; never by name or time. A file can only be linked as a whole, so frozen parameters get files of
# their own.


_MOST_FILES = 64  # a smaller share of a component's bytes gets no file of its own

PieceKey = tuple[str, Box]
"""A piece by its tensor and box."""


@dataclass(frozen=True, slots=True)
class BaseFile:
    """A shard file of the base: its pieces in order. ``info`` has the save that wrote it."""

    info: FileInfo
    entries: tuple[tuple[str, ShardEntry], ...]

    def pieces(self, planned: Mapping[PieceKey, Piece]) -> tuple[Piece, ...] | None:
        """The pieces to save that are the ones in the file, in order; None if one is not to be saved like this."""
        found = tuple(planned.get((key, entry.box)) for key, entry in self.entries)
        is_same = all(
            piece is not None and piece.spec.dtype == entry.dtype and entry.block == block_bytes(piece.nbytes)
            for piece, (_, entry) in zip(found, self.entries, strict=True)
        )
        return found if is_same else None  # type: ignore[return-value]  # none of them is None

    def is_intact(self, reader: Reader) -> bool:
        """Return whether size and header in the base are those that its index has."""
        name = self.info.name
        try:
            if reader.size(name) != self.info.nbytes:
                return False
            header = read_header(partial(reader.read_into, name), self.info.nbytes)
        except (OSError, EOFError, FormatError, HeaderLengthError):
            return False
        return checksum(header) == self.info.checksum

    def linked_as(self, name: str, pieces: Sequence[Piece]) -> WrittenFile:
        """How the index of the new save describes it."""
        entries = [
            (key, entry._replace(file=name, global_shape=piece.spec.shape))
            for (key, entry), piece in zip(self.entries, pieces, strict=True)
        ]
        return WrittenFile(FileInfo(name, self.info.nbytes, self.info.checksum, self.info.save_id), entries)


def base_files(index: RankIndex) -> Iterator[BaseFile]:
    """The files of a rank's index."""
    inside: dict[str, list[tuple[str, ShardEntry]]] = {name: [] for name in index.files}
    for key, entries in index.shards.items():
        for entry in entries:
            inside[entry.file].append((key, entry))
    for name, info in index.files.items():
        written_by = FileInfo(name, info.nbytes, info.checksum, info.save_id or index.save_id)
        if inside[name]:
            yield BaseFile(written_by, tuple(sorted(inside[name], key=lambda item: item[1].begin)))


def is_unchanged(file: BaseFile, pieces: Sequence[Piece], stage: Stage) -> bool:
    """Return whether the bytes of the pieces in memory are those that the file was written with."""
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
    """Return pieces in groups that share no file: those of frozen parameters, and the others.

    A small share of frozen ones is not worth a file.
    """
    groups: tuple[list[Piece], list[Piece]] = [], []
    for piece in pieces:
        groups[piece.key not in frozen].append(piece)
    nbytes = [sum(piece.nbytes for piece in group) for group in groups]
    if nbytes[0] * _MOST_FILES < sum(nbytes):
        return [[*groups[0], *groups[1]]]
    return [group for group in groups if group]


_MOST_DIRECTORIES = 4  # in which bases are remembered, with the checksums of their blocks
_OF_ONE_FILE = (errno.EMLINK, errno.ENOENT, errno.ESTALE)
"""Errors that say nothing of other files: too many links, or the base is gone."""

Indexes: TypeAlias = dict[str, RankIndex]
"""What a rank wrote of each component."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A complete checkpoint, and what this rank wrote of it if it was saved here."""

    path: str
    indexes: Indexes | None = None


class SaveHistory:
    """The checkpoints whose files the next save may link, by directory. Its users are one after the other."""

    def __init__(self) -> None:
        self._last: dict[str, _Saved] = {}
        self._cannot_link: set[str] = set()

    def loaded(self, path: str) -> None:
        """Take a checkpoint that was loaded as a base."""
        self._remember(_Saved(_absolute(path)))

    def saved(self, path: str, indexes: Indexes) -> None:
        """Take a checkpoint that is complete as a base."""
        self._remember(_Saved(_absolute(path), indexes))

    def _remember(self, saved: _Saved) -> None:
        directory = _directory(saved.path)
        self._last.pop(directory, None)
        self._last[directory] = saved
        while len(self._last) > _MOST_DIRECTORIES:
            del self._last[next(iter(self._last))]

    @contextmanager
    def base(self, path: str, draft: Draft, storage: Storage, rank: int) -> Iterator[Base | None]:
        """Open what a save to ``path`` may link files of; nobody deletes it inside the context."""
        directory = _directory(path)
        if directory in self._cannot_link:
            yield None
            return
        if not draft.can_link:
            self._cannot_link.add(directory)
            draft.notes.append(f"incremental=True: files can't be linked at {path!r}, so every save writes all of them")
            yield None
            return
        found = None
        for saved in filter(None, (self._last.get(directory), _Saved(_absolute(path)))):
            try:
                found = _open_base(saved, storage, rank)
                break
            except CheckpointNotFoundError:
                continue
            except (ShardCkptError, OSError) as error:
                draft.notes.append(f"no file of {saved.path!r} is linked in {path!r}: {error}")
        if found is None:
            yield None
            return
        try:
            yield found
        finally:
            found.reader.close()
            if found.error is not None:
                self._cannot_link.add(directory)
                draft.notes.append(
                    f"incremental=True: files can't be linked in {directory!r}, so every save writes all of them: "
                    f"{found.error}"
                )


@dataclass(slots=True)
class Base:
    """A checkpoint, open for reading, whose files may be linked; ``error`` is why the place can't."""

    reader: Reader
    indexes: Mapping[str, RankIndex]
    error: OSError | None = None


def _open_base(saved: _Saved, storage: Storage, rank: int) -> Base | None:
    if saved.indexes is not None:
        return Base(storage.open(saved.path), saved.indexes)  # each file that is linked says of which save it is
    checkpoint = Checkpoint(storage, saved.path)
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
