"""Find, write and delete checkpoints in an object store; ``RemoteReader`` reads them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Literal

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.format.strict_json import MAX_JSON_BYTES
from lightning_shardckpt.storage.other_programs import other_program
from lightning_shardckpt.storage.protocol import Bytes, Contents, File, NewFile, Reader
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

# ── a checkpoint that is being uploaded ───────────────────────────────────────────────────────────────────────────────
# Commit a checkpoint as one whole where nothing can be renamed.
#
# The objects of a save have names that begin with its id, so no save touches another's. They are found by nobody until
# the root index is put, which is the commit: only if the object that was there when the save began is still there. What
# else lies under the path then is of saves that can't be committed any more, and is deleted.


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
        self.prefix, self.can_link = prefix_of(save_id), False
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
        """Return an error: a store has no links."""
        return OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), self._path)

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


# ── outputs of exports ────────────────────────────────────────────────────────────────────────────────────────────────
# Write exports to an object store: each file appears at once, and the one that makes them whole is the last.
#
# Nothing is kept on a disk, and of a file no more in memory than its parts that are being sent. In place of an older
# export a directory cannot appear at once: that is deleted first, so that the two are never mixed.


class RemoteOutputs:
    """``Outputs`` of a store; paths are URLs."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """Return what is at a path: an object, or some below it."""
        key = self._objects.key(path)
        with suppress(FileNotFoundError):
            self._objects.stat(key)
            return "file"
        return "directory" if self._objects.names(key) else None

    def contents(self, path: str) -> Contents:
        """The objects below a path."""
        folder = self._objects.key(path)
        sizes = self._objects.names(folder)

        def head(name: str, nbytes: int) -> bytes:
            return self._objects.read(f"{folder}/{name}", 0, min(sizes[name], nbytes))

        return Contents(sorted(sizes), head)

    @contextmanager
    def file(self, path: str, nbytes: int, *, overwrite: bool) -> Iterator[tuple[File, list[str]]]:
        """An object, which appears at the end; where the store knows no such thing, it grows there.

        Raises:
            FileExistsError: if one is there that may not be replaced, or objects below the path.
        """
        there = self.kind(path)
        if there is not None and not (overwrite and there == "file"):
            raise FileExistsError(f"something is at {path!r}, so nothing is written there")
        key = self._objects.key(path)
        self._objects.make_folder(key.rpartition("/")[0])
        with self._objects.uploading(key, nbytes, replace=overwrite) as put:
            yield put, []

    @contextmanager
    def directory(self, path: str, *, replaceable: Callable[[Contents], bool]) -> Iterator[tuple[NewFile, list[str]]]:
        """A function that makes objects below the path, one after the other; an error deletes them.

        Raises:
            FileExistsError: if something is there that is not replaceable; or if another process wrote there meanwhile.
        """
        there = self.kind(path)
        if there is not None and not (there == "directory" and replaceable(self.contents(path))):
            raise FileExistsError(f"something is at {path!r}, so nothing is written there")
        old, folder, written = self.contents(path).names, self._objects.key(path), list[str]()
        for is_mark in (True, False):  # first what makes it whole
            self._objects.delete(f"{folder}/{name}" for name in old if name.endswith(".json") == is_mark)

        @contextmanager
        def new(name: str, nbytes: int) -> Iterator[File]:
            key = f"{folder}/{name}"
            self._objects.make_folder(key.rpartition("/")[0])
            with self._objects.uploading(key, nbytes, replace=False) as put:
                yield put
            written.append(name)

        try:
            yield new, []
        except BaseException as error:
            try:
                self._delete(path, written)
            except OSError as why:
                error.add_note(f"files may be left at {path!r}: {why}")
            raise

    def _delete(self, path: str, names: Iterable[str]) -> None:
        folder = self._objects.key(path)
        self._objects.delete([f"{folder}/{name}" for name in names])
        self._objects.drop_folder(folder)


_DOWNLOAD = "; what other programs wrote is not read at URLs: download it first"
_ATTEMPTS = 5  # of opening what another process replaces


class RemoteStorage:
    """Checkpoints below the keys of a store; paths are URLs.

    Args:
        objects: the store.
        turn: entered while a rank uploads; it may wait until nobody else does.
    """

    visible_within_s = 10.0

    def __init__(
        self, objects: ObjectStore, turn: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._objects, self._turn = objects, turn

    def open(self, path: str) -> RemoteReader:
        """The checkpoint at ``path``.

        Raises:
            CheckpointNotFoundError: if there is none, if it is incomplete, or if the path is something else.
            PermissionError: if the store does not let us look.
        """
        folder = self._objects.key(path)
        root = f"{folder}/{ROOT_NAME}"
        for _ in range(_ATTEMPTS):
            try:
                before = self._objects.stat(root)
                if before.size > MAX_JSON_BYTES:
                    raise FormatError(f"{path}/{ROOT_NAME} has {before.size} bytes, more than {MAX_JSON_BYTES}")
                content = self._objects.read(root, 0, before.size)
                if self._objects.stat(root) == before:
                    return RemoteReader(self._objects, folder, content)
            except FileNotFoundError:
                raise CheckpointNotFoundError(self._why_none(path, folder)) from None
        raise CheckpointNotFoundError(f"the checkpoint at {path!r} is replaced faster than it can be opened")

    def draft(self, path: str, save_id: str) -> RemoteDraft:
        """A new checkpoint that will appear at ``path``."""
        return RemoteDraft(self._objects, path, self._objects.key(path), save_id, self._turn)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``: first the root index, then its other files.

        What other saves left there, or are writing, is not touched.

        Returns:
            What went wrong then, as sentences.

        Raises:
            CheckpointNotFoundError: if there is none.
        """
        folder = self._objects.key(path)
        found = self._objects.names(folder)
        if ROOT_NAME not in found:
            raise CheckpointNotFoundError(self._why_none(path, folder))
        prefix = prefix_in(self.root_head(path, HEAD_BYTES)) or "?"
        its = [n for n in found if is_ours(n) and (n.startswith(prefix) or not TAGGED.fullmatch(n))]
        self._objects.delete([f"{folder}/{ROOT_NAME}"])
        try:
            self._objects.delete([f"{folder}/{name}" for name in its])
        except OSError as error:
            return [f"could not remove all files of the deleted checkpoint {path!r}: {error}"]
        self._objects.drop_folder(folder)
        return []

    def complete(self, folder: str) -> list[str]:
        """The checkpoints directly below a folder."""
        found = [name for name in self._objects.names(self._objects.key(folder)) if name.endswith(f"/{ROOT_NAME}")]
        names = sorted(name.removesuffix(f"/{ROOT_NAME}") for name in found)
        return [f"{folder.rstrip('/')}/{name}" for name in names if "/" not in name]

    def is_complete(self, path: str) -> bool:
        """Return whether a checkpoint is at the path."""
        return self.is_object(f"{path}/{ROOT_NAME}")

    def root_head(self, path: str, nbytes: int) -> bytes:
        """The first bytes of a root index. Raises FileNotFoundError."""
        key = f"{self._objects.key(path)}/{ROOT_NAME}"
        return self._objects.read(key, 0, min(self._objects.stat(key).size, nbytes))

    def is_object(self, path: str) -> bool:
        """Return whether the path is that of a single object."""
        try:
            self._objects.stat(self._objects.key(path))
        except FileNotFoundError:
            return False
        return True

    def is_empty(self, path: str) -> bool:
        """Return whether nothing lies below the path."""
        return not self._objects.names(self._objects.key(path))

    def delete_object(self, path: str) -> None:
        """Delete the single object at a path."""
        self._objects.delete([self._objects.key(path)])

    def _why_none(self, path: str, folder: str) -> str:
        if self.is_object(path):
            return f"{path!r} is a file, not a checkpoint of lightning-shardckpt{_DOWNLOAD}"
        found = self._objects.names(folder)
        if not found:
            return f"no checkpoint at {path!r}: there is nothing at this path"
        if (program := other_program(found)) is not None:
            return f"{path!r} {program}{_DOWNLOAD}"
        near = sorted(name for name in found if name.endswith(f"/{ROOT_NAME}"))
        hint = f"; did you mean {path.rstrip('/')}/{near[0].removesuffix(f'/{ROOT_NAME}')}?" if near else ""
        return f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}{hint}"
