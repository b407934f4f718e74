"""Link shard files of an earlier checkpoint, the base, in place of writing the same bytes again. No torch.

A file is linked if the base's index says that it has the pieces that are to be saved, and checksums of them in memory
are those of the index; never by name or time. A file can only be linked as a whole, so pieces that stayed as they were
get files of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box
from lightning_shardckpt.format.checksum import block_checksums, checksum, count_of, from_number
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.index import RankIndex, ShardEntry
from lightning_shardckpt.format.plan import Piece
from lightning_shardckpt.format.safetensors_header import HeaderLengthError, read_header
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.writer import Stage, WrittenFile, block_bytes, hash_step

_MOST_FILES = 64  # of a component, of pieces that stayed as they were: a smaller share of the bytes gets no file

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

    def is_intact(self, reader: Reader, name: str) -> bool:
        """Return whether size and header in the base, under this name, are those that its index has."""
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


def first_change(file: BaseFile, pieces: Sequence[Piece], stage: Stage) -> Piece | None:
    """The first piece whose bytes in memory are not those that the file was written with; None if all are."""
    for piece, (_, entry) in zip(pieces, file.entries, strict=True):
        data, step = stage(piece), hash_step(entry.block)
        if len(data) != entry.nbytes:
            return piece
        for at in range(0, entry.nbytes, step):
            sums = block_checksums(data[at : at + step], entry.block)
            if sums != from_number(entry.checksums, at // entry.block, count_of(sums)):
                return piece
    return None


def divided(pieces: Iterable[Piece], steady: frozenset[PieceKey]) -> list[list[Piece]]:
    """Pieces in groups that share no file: those that will probably stay as they are, and the others.

    A small share of ``steady`` ones is not worth a file, and would make more of them with each save.
    """
    groups: tuple[list[Piece], list[Piece]] = [], []
    for piece in pieces:
        groups[(piece.key, piece.part.box) not in steady].append(piece)
    nbytes = [sum(piece.nbytes for piece in group) for group in groups]
    if nbytes[0] * _MOST_FILES < sum(nbytes):
        return [[*groups[0], *groups[1]]]
    return [group for group in groups if group]
