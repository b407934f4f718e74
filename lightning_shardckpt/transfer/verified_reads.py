"""Compare bytes of stored boxes with their checksums, and say which bytes of which file are corrupted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import xxhash

from lightning_shardckpt.errors import CorruptionError
from lightning_shardckpt.format.checksum import BETWEEN, block_checksums, count_of, from_number
from lightning_shardckpt.format.index import ShardEntry
from lightning_shardckpt.storage.protocol import Reader


class Files(Protocol):
    """An opened checkpoint, of any format."""

    path: str
    reader: Reader


def read_verbatim(files: Files, file: str, offset: int, target: memoryview) -> None:
    """Fill ``target`` from ``offset`` on in a file; nothing is verified.

    Raises:
        CorruptionError: naming the file, if it is missing or ends before that.
    """
    try:
        files.reader.read_into(file, offset, target)
    except (EOFError, FileNotFoundError) as error:
        raise CorruptionError(f"checkpoint {files.path!r}, file {file}: {error}") from None


def check_blocks(path: str, key: str, writer: int, entry: ShardEntry, data: memoryview, low: int) -> None:
    """Compare whole blocks of a box with its checksums.

    Args:
        path: of the checkpoint, for the message.
        key: of the tensor, for the message.
        writer: the rank that wrote the box, for the message.
        entry: the box, with its checksums.
        data: bytes of the file from ``low`` on; it ends with a block, or with the box.
        low: where ``data`` begins in the file, in bytes; a block begins there.

    Raises:
        CorruptionError: naming the checkpoint, the tensor, the file, the rank that wrote it and the bytes.
    """
    block = entry.block
    found = block_checksums(data, block)
    if found == entry.checksums:  # a shortcut: of a box as a whole
        return
    expected = from_number(entry.checksums, (low - entry.begin) // block, count_of(found))
    if found != expected:
        pairs = zip(found.split(BETWEEN), expected.split(BETWEEN), strict=True)
        at = next(i for i, (one, other) in enumerate(pairs) if one != other) * block
        raise corrupted(path, key, writer, entry, low + at, low + min(at + block, len(data)))


def corrupted(path: str, key: str, writer: int, entry: ShardEntry, first: int, last: int) -> CorruptionError:
    """The error for bytes ``[first, last)`` of a file that are not what was saved."""
    return CorruptionError(
        f"checkpoint {path!r}: corrupted data of {key!r} in {entry.file}, written by rank {writer}, "
        f"bytes {first} to {last}. Load another checkpoint, or restore the file; verify lists all damage"
    )


class BlockChecksums:
    """Compares the bytes of a stored box with its checksums as they come by, in order, in pieces of any size.

    A box without checksums, of another format, is taken as it is.
    """

    def __init__(self, entry: ShardEntry) -> None:
        self.at = 0
        self._entry, self._digest, self._nbytes = entry, xxhash.xxh3_64(), entry.nbytes

    def feed(self, data: memoryview) -> Iterator[tuple[int, int]]:
        """Ranges in the file, ``[first, last)``, of the blocks that ended in ``data`` and are not what was saved."""
        entry, block, done = self._entry, self._entry.block, 0
        while done < len(data):
            count = min(block - self.at % block, len(data) - done)
            piece = data[done : done + count]
            done, self.at = done + count, self.at + count
            if self.at % block and self.at != self._nbytes:
                self._digest.update(piece)
                continue
            number = (self.at - 1) // block
            if count == self.at - number * block:
                found = xxhash.xxh3_64_hexdigest(piece)
            else:
                self._digest.update(piece)
                found = self._digest.hexdigest()
                self._digest.reset()
            if entry.checksums and found != from_number(entry.checksums, number, 1):
                yield entry.begin + number * block, entry.begin + self.at
