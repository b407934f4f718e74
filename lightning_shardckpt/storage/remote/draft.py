"""Commit a checkpoint as one whole where nothing can be renamed.

The objects of a save have names that begin with its id, so no save touches another's. They are found by nobody until
the root index is put, which is the commit: only if the object that was there when the save began is still there. What
else lies under the path then is of saves that can't be committed any more, and is deleted.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress

from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.protocol import Bytes, Reader
from lightning_shardckpt.storage.remote.objects import ObjectStat, ObjectStore
from lightning_shardckpt.storage.remote.remote_reader import (
    HEAD_BYTES,
    TAGGED,
    RemoteReader,
    is_ours,
    prefix_in,
    prefix_of,
)
from lightning_shardckpt.system.text import count_text, size_text

_PARTS_HINT = (
    "a file that several ranks write parts of can't be saved to an object store, which takes whole objects only; "
    'leave out also="huggingface", and export the checkpoint with `python -m lightning_shardckpt.consolidate`'
)


class RemoteDraft:
    """Objects whose names begin with the id of the save, and a root index that is kept until it is published."""

    def __init__(
        self,
        objects: ObjectStore,
        path: str,
        folder: str,
        save_id: str,
        turn: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._objects, self._path, self._folder, self._turn = objects, path, folder, turn
        self.prefix, self.can_link = prefix_of(save_id), objects.can_copy
        self._before: ObjectStat | None = None
        self._begun = False
        self._root: bytes | None = None
        self._written: set[str] = set()
        self.notes: list[str] = []

    def begin(self) -> None:
        """Look what is there; the commit depends on it.

        Raises:
            FileExistsError: if a single object is at the path, or others that are no checkpoint.
        """
        with suppress(FileNotFoundError):
            self._objects.stat(self._folder)
            raise FileExistsError(
                f"a file is in the way at {self._path!r}: a sharded checkpoint is a folder; move it or use another path"
            )
        with suppress(FileNotFoundError):
            self._before = self._objects.stat(self._key(ROOT_NAME))
        found = self._objects.names(self._folder)
        strange = [name for name in found if not TAGGED.fullmatch(name)]
        if self._before is None and strange:
            raise FileExistsError(
                f"{self._path!r} is not empty ({strange[0]!r} …) and holds no checkpoint of ours, so it is not "
                "replaced; move it or use another path"
            )
        self._objects.make_folder(self._folder)
        self._begun = True

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new object; the root index is kept, to be put last."""
        if name in self._written:
            raise FileExistsError(f"{name} was written already")
        self._written.add(name)
        if name == ROOT_NAME:
            self._root = b"".join(parts)
            return
        with self._turn():
            self._objects.upload(self._key(self.prefix + name), parts)

    def write_pieces(self, name: str, pieces: Iterable[tuple[int, Bytes]]) -> None:
        """Raise ValueError, with the remedy: this is not possible here."""
        raise ValueError(f"{self._path!r}, {name}: {_PARTS_HINT}")

    def link(self, name: str, of: Reader, there: str) -> OSError | None:
        """Have the store copy the object; return the error of one that can't."""
        source = of.key(there, self._objects) if isinstance(of, RemoteReader) else None
        if source is None:
            return OSError(errno.EXDEV, os.strerror(errno.EXDEV), self._path)
        try:
            self._objects.copy(source, self._key(self.prefix + name), of.size(there))
        except FileNotFoundError as error:
            return FileNotFoundError(errno.ENOENT, str(error), source)
        except OSError as error:
            return error
        self._written.add(name)
        return None

    def publish(self) -> None:
        """Put the root index; then delete what else lay there before that.

        Raises:
            FileExistsError: if the path was saved to, or removed, since this save began.
        """
        assert self._root is not None
        key = self._key(ROOT_NAME)
        others, replaced = self._others(), self._prefix_at(key)
        try:
            self._objects.put(key, self._root, None if self._before is None else self._before.tag)
        except FileExistsError:
            if not self._is_ours(key):  # else the answer to an earlier attempt was lost
                raise FileExistsError(
                    f"another process saved to {self._path!r}, or removed it, since this save began; let each job save "
                    "to paths of its own"
                ) from None
        self._begun = False
        try:
            self._delete_others(*others, replaced)
        except OSError as error:
            self.notes.append(f"could not remove what was replaced at {self._path!r}: {error}")

    def discard(self) -> None:
        """Delete this save's objects, and have its uploads forgotten, as far as that is possible."""
        if not self._begun:
            return
        with suppress(OSError):
            self._objects.abort(self._objects.unfinished(self._key(self.prefix)))
        with suppress(OSError):
            ours = [name for name in self._objects.names(self._folder) if name.startswith(self.prefix)]
            self._objects.delete(map(self._key, ours))
            self._objects.drop_folder(self._folder)

    def _others(self) -> tuple[dict[str, int], list[tuple[str, str]]]:
        """Return what lies there and is not of this save: objects with their sizes, and unfinished uploads."""
        listed = self._objects.names(self._folder)
        gone = sorted(name for name in self._written - {ROOT_NAME} if self.prefix + name not in listed)
        if gone and self._objects.conditional:
            raise FileExistsError(
                f"another process saved to {self._path!r} since this save began, and {gone[0]} of it was deleted; "
                "let each job save to paths of its own"
            )
        found = {n: size for n, size in listed.items() if is_ours(n) and not n.startswith(self.prefix)}
        uploads = self._objects.unfinished(self._key(""))
        here = [(key, upload) for key, upload in uploads if is_ours(key.removeprefix(self._key("")))]
        return found, [(key, upload) for key, upload in here if not key.startswith(self._key(self.prefix))]

    def _is_ours(self, key: str) -> bool:
        try:
            return self._objects.read(key, 0, self._objects.stat(key).size) == self._root
        except FileNotFoundError:
            return False

    def _prefix_at(self, key: str) -> str | None:
        """Return what the names of the files that a root index vouches for begin with."""
        if self._before is None:
            return None
        try:
            return prefix_in(self._objects.read(key, 0, min(self._before.size, HEAD_BYTES)))
        except FileNotFoundError:
            return None

    def _delete_others(self, found: dict[str, int], uploads: list[tuple[str, str]], replaced: str | None) -> None:
        """Delete what was replaced, and what saves left that can't be committed any more: this one came first.

        Where the store can't compare as it writes, one of them still might be; so it is left alone then.
        """
        dead = {n: size for n, size in found.items() if TAGGED.fullmatch(n) and not n.startswith(replaced or "?")}
        if self._before is None:
            found = dead
        if not self._objects.conditional and dead:
            size = size_text(sum(dead.values()))
            self.notes.append(
                f"left {count_text(len(dead), 'file')} of unfinished saves at {self._path!r}, {size}: this store can't "
                "tell whether another process is saving there"
            )
            found = {name: size for name, size in found.items() if name not in dead}
            dead, uploads = {}, []
        self._objects.abort(uploads)
        self._objects.delete(map(self._key, found))
        if dead or uploads:
            self.notes.append(
                f"removed the leftover of an unfinished save at {self._path!r}: {count_text(len(dead), 'file')}, "
                f"{size_text(sum(dead.values()))}, and {count_text(len(uploads), 'unfinished upload')}"
            )

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"
