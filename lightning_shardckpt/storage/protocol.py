"""The protocol of a storage backend: readers and drafts of checkpoints. It describes the methods of all backends.

A checkpoint is a flat set of named files that appears as a whole or not at all. A file system renames a directory; an
object store puts the root index last. Names never contain a directory.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from lightning_shardckpt.format.index import PREFIXED_NAME, is_ours
from lightning_shardckpt.format.value_checks import MAX_JSON_BYTES

Bytes = bytes | memoryview


class Reader(Protocol):
    """A checkpoint opened for reading. Thread-safe.

    Names are those in its indexes, without the prefix of stored names that the root index records. If another
    checkpoint has replaced it at its path, a file that is gone is an OSError with ``errno.ESTALE``. If it has a
    ``high_latency``, each call is slow however little it reads: callers read in parallel, and nothing twice.
    """

    high_latency: bool

    def size(self, name: str) -> int:
        """Return the length of a file in bytes. Raises FileNotFoundError."""

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on. Raises EOFError if the file is too short."""

    def names(self) -> list[str]:
        """Return all entries, sorted, without those of other saves. Only ``verify`` lists: a load follows indexes."""

    def close(self) -> None:
        """Close all files."""


class Draft(Protocol):
    """A checkpoint that is being written. Every rank has one; only one calls ``begin``, ``publish`` and ``discard``.

    ``notes`` are sentences for the user about leftovers of killed saves and files that could not be deleted.
    ``prefix`` precedes all stored names except the name of the root index, which records it.
    """

    notes: list[str]
    prefix: str

    def begin(self) -> None:
        """Create the place where all ranks write, and remove leftovers of killed saves next to it.

        Raises FileExistsError if the target cannot be replaced, or another process is saving to it.
        """

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        """Write a new file, of ``nbytes`` if it may be large, when this rank sees the place that ``begin`` created.

        The file and its name are durable on return, as after ``publish``, unless the backend is not to sync.
        """

    def publish(self) -> None:
        """Make the checkpoint appear at its path; then delete an older one there. A failure of that becomes a note.

        Raises OSError if something other than a checkpoint is there, or another process changed what is.
        """

    def discard(self) -> None:
        """Remove the files written so far, as far as possible. Never raises, since it follows an error."""


class Storage(Protocol):
    """A backend, which stores checkpoints by path."""

    visible_within_s: float  # the time within which all ranks see a change that one of them made

    def open(self, path: str) -> Reader:
        """Open the checkpoint at ``path``. Raises CheckpointNotFoundError if there is none, or it is incomplete."""

    def draft(self, path: str, save_id: str) -> Draft:
        """Return a draft of a checkpoint at ``path``; all ranks' drafts with one ``save_id`` form one checkpoint."""

    def remove(self, path: str) -> list[str]:
        """Delete a checkpoint, and no file of another save; return notes. Raises CheckpointNotFoundError."""


def names_of_save(stored: Iterable[str], prefix: str) -> list[str]:
    """Return the sorted names of stored files without their prefix; if there is one, without those of other saves."""
    names = [name.removeprefix(prefix) for name in stored]
    return sorted(name for name in names if not prefix or not (name[:1] == "." or PREFIXED_NAME.fullmatch(name)))


def names_to_remove(stored: Iterable[str], prefix: str) -> list[str]:
    """Return the stored names that a removal of a checkpoint deletes: none of other saves, finished or not."""
    names = filter(is_ours, stored)
    return [name for name in names if name.startswith(prefix or "?") or not PREFIXED_NAME.fullmatch(name)]


def read_all(reader: Reader, name: str) -> bytes:
    """Return the content of a JSON file. Raises ValueError if it is larger than JSON may be."""
    size = reader.size(name)
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{size} bytes, more than the limit of {MAX_JSON_BYTES}")
    content = bytearray(size)
    reader.read_into(name, 0, memoryview(content))
    return bytes(content)
