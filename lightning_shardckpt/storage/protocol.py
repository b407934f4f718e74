"""The protocol of a storage backend: readers, drafts of checkpoints, and outputs of exports.

A checkpoint is a flat set of named files that appears whole or not at all. Each backend has its own way: a rename in
a file system, the root index put last in an object store. Names never contain a directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Literal, NamedTuple, Protocol, TypeAlias

from lightning_shardckpt.format.strict_json import MAX_JSON_BYTES

Bytes = bytes | memoryview

File: TypeAlias = "int | Callable[[memoryview], object]"
"""A descriptor, or a stream: it is called with the bytes in order, by one thread at a time, and keeps none of them."""


class Reader(Protocol):
    """A checkpoint opened for reading.

    ``high_latency``: a call takes long, whatever it reads: better several at once, and nothing twice.
    """

    high_latency: bool

    def size(self, name: str) -> int:
        """Length of a file in bytes. Raises FileNotFoundError."""

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on. Raises EOFError if the file ends before that."""

    def names(self) -> list[str]:
        """Return every entry, sorted; for ``verify`` only: a load opens what the index names."""

    def clone(self) -> Reader:
        """Return another reader of the same checkpoint, for another thread; valid while this one is open.

        Closing it leaves this one open.
        """

    def close(self) -> None:
        """Release what is open."""


class Draft(Protocol):
    """A checkpoint being written. Every rank holds one; ``begin``, ``publish``, ``discard`` are for one rank only.

    ``notes`` are sentences for the user: what was found of saves that were killed, and what could not be deleted.
    ``prefix`` is what the place puts before the names of files, but for the root index, which has to say so.
    ``can_link``: whether ``link`` may work here.
    """

    notes: list[str]
    prefix: str
    can_link: bool

    def begin(self) -> None:
        """Make the place where all ranks write, and remove what dead saves left beside it.

        Raises FileExistsError if the target cannot be replaced, or if another process is saving to it.
        """

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new file. Waits until this rank sees what the one that began made.

        It is durable on return, as is what ``publish`` did, unless the backend was told to leave out syncs.
        """

    def write_pieces(self, name: str, pieces: Iterable[tuple[int, Bytes]]) -> None:
        """Write pieces of a file that other ranks write pieces of, too, each at its offset; else like ``write``.

        Raises ValueError where the backend can write whole files only.
        """

    def link(self, name: str, of: Reader, there: str) -> OSError | None:
        """Make a new file that is the file ``there`` of another checkpoint, without writing its bytes.

        It is durable on return as if it was written. It stays when the other checkpoint is deleted.

        Returns the error of a place that can't do it; the file is not there then, and is to be written.
        """

    def publish(self) -> None:
        """Make the checkpoint appear at its path, in place of one that is there.

        What was replaced is deleted after that; if it cannot be, that is a note.
        """

    def discard(self) -> None:
        """Remove what was written; never raises for what is already gone."""


class Storage(Protocol):
    """A kind of place, addressed by path.

    ``visible_within_s``: how long it may take until all ranks see what one of them did.
    """

    visible_within_s: float

    def open(self, path: str) -> Reader:
        """The checkpoint at ``path``. Raises CheckpointNotFoundError."""

    def draft(self, path: str, save_id: str) -> Draft:
        """A new checkpoint that will appear at ``path``; the drafts of one ``save_id`` are one."""

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``; nothing that is not one. Raises CheckpointNotFoundError.

        Returns notes, if it is gone from its path but could not be deleted wholly.
        """


class Contents(NamedTuple):
    """The contents of a path: names of files, relative to it, and their first bytes by name and number."""

    names: list[str]
    head: Callable[[str, int], bytes]


NewFile: TypeAlias = "Callable[[str, int], AbstractContextManager[File]]"
"""Makes a file by its name, which may have slashes, and how many bytes it will have, or a few less."""


class Outputs(Protocol):
    """Storage for what an export writes, which is no checkpoint: a file or a directory, whole or not at all.

    What is written is in place, and durable, at the end of a context; an error inside leaves nothing of it. With it
    comes a list of sentences for the user.
    """

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """Return what is at a path; None for nothing."""

    def contents(self, path: str) -> Contents:
        """Return what is in a directory."""

    def file(self, path: str, nbytes: int, *, overwrite: bool) -> AbstractContextManager[tuple[File, list[str]]]:
        """A file of so many bytes, or a few more. Raises FileExistsError if something is there that may not go."""

    def directory(
        self, path: str, *, replaceable: Callable[[Contents], bool]
    ) -> AbstractContextManager[tuple[NewFile, list[str]]]:
        """A directory, whose last file is the one that makes it whole. What is there must be ``replaceable``.

        Raises FileExistsError if it is not.
        """


def read_all(reader: Reader, name: str) -> bytes:
    """The whole content of a JSON file. Raises ValueError for more than one may have."""
    size = reader.size(name)
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{size} bytes, more than the limit of {MAX_JSON_BYTES}")
    content = bytearray(size)
    reader.read_into(name, 0, memoryview(content))
    return bytes(content)
