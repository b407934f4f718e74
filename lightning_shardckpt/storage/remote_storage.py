"""Checkpoints in an object store: find, read, write and delete them.

Atomic commit without renames: the names of a save's objects begin with its id, so no save touches the objects of
another. No reader finds them until the root index is put, which is the commit. It is put only if the root index that
was there when the save began is still there. All other objects below the path then belong to saves that can't be
committed any more, and are deleted. The root index records the prefix, so a copy in a directory can be read, too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import (
    HEAD_BYTES,
    PREFIXED_NAME,
    ROOT_NAME,
    is_export,
    is_ours,
    prefix_of,
    read_prefix,
)
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.local_files import locked, make_directories, write_at
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.object_store import ObjectStore
from lightning_shardckpt.storage.protocol import Bytes, Reader, names_of_save, names_to_remove, read_all

_WINDOW_BYTES, _THREADS = 8 << 20, 8  # of downloads


class RemoteStorage:
    """Checkpoints in an object store; paths are URLs. Raises ValueError for a bucket alone."""

    visible_within_s = 10.0

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def open(self, path: str) -> RemoteReader:
        """Open the checkpoint at ``path``. Raises CheckpointNotFoundError if there is none, or it is incomplete."""
        url = _checked(path)
        try:
            return RemoteReader(self._objects, url)
        except FileNotFoundError:
            self._objects.list(url)  # raises if there is no such bucket
            raise CheckpointNotFoundError(
                f"{url!r} is not a complete checkpoint: it has no {ROOT_NAME}; checkpoints of other programs can't be "
                "read at a URL: download it first"
            ) from None

    def draft(self, path: str, save_id: str) -> RemoteDraft:
        """Return a draft of a checkpoint that will appear at ``path``."""
        return RemoteDraft(self._objects, _checked(path), save_id)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``, after its root index. Files of other saves, finished or not, stay.

        Returns notes about files that could not be deleted. Raises CheckpointNotFoundError if there is none.
        """
        url, prefix = _checked(path), self.open(path).prefix
        names = names_to_remove(self._objects.list(url), prefix)
        self._objects.delete(f"{url}/{name}" for name in names if is_export(name))
        self._objects.delete([f"{url}/{ROOT_NAME}"])
        try:
            self._objects.delete(f"{url}/{name}" for name in names)
        except OSError as error:
            return [f"could not remove all files of the deleted checkpoint {url!r}: {error}"]
        return []


def _checked(path: str) -> str:
    """Return a URL without a slash at its end."""
    if path.rstrip("/").count("/") < 3 and not path.startswith("memory:"):
        raise ValueError(f"{path!r} is no path of a checkpoint, such as 's3://bucket/name.ckpt'")
    return path.rstrip("/")


# ── drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RemoteDraft:
    """A draft of objects whose names begin with the save's id; the root index is held back until ``publish``."""

    def __init__(self, objects: ObjectStore, url: str, save_id: str) -> None:
        self._objects, self._url, self.prefix = objects, url, prefix_of(save_id)
        self._before: dict[str, str] | None = None  # the tag of the root index when the save began
        self._replaced = "?"  # the prefix of the names in the checkpoint that was there; no name begins with a "?"
        self._begun, self._root, self._written = False, b"", set[str]()
        self.notes: list[str] = []

    def begin(self) -> None:
        """Check the path, and remember its root index, on which the commit depends.

        Raises FileExistsError if an object is at the path, or objects below it that are not a checkpoint.
        """
        with suppress(FileNotFoundError):
            root, self._before = self._objects.get(f"{self._url}/{ROOT_NAME}")
            self._replaced = read_prefix(root[:HEAD_BYTES]) or "?"
        found = self._objects.list(self._url).items() if self._before is None else ()
        others = [name for name, stat in found if stat.size and not PREFIXED_NAME.fullmatch(name)]
        if others or self._objects.exists(self._url):
            raise FileExistsError(
                f"{self._url!r} holds no checkpoint of this package but {', '.join(others[:1]) or 'is an object'}, so "
                "it is not replaced; move it or use another path"
            )
        self._begun = True

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        """Write a new object; the root index is held back, to be put last."""
        if name in self._written:
            raise FileExistsError(f"{name} was written already")
        self._written.add(name)
        if name == ROOT_NAME:
            self._root = b"".join(parts)
        else:
            self._objects.upload(f"{self._url}/{self.prefix}{name}", parts, nbytes)

    def publish(self) -> None:
        """Put the root index; then delete the replaced checkpoint and leftovers of other saves.

        Raises FileExistsError if another process saved to the path, or removed it, since this save began.
        """
        url, names, was_conditional = self._url, [*self._objects.list(self._url)], self._objects.conditional
        if missing := sorted(name for name in self._written - {ROOT_NAME} if self.prefix + name not in names):
            raise FileExistsError(
                f"another process saved to {url!r} since this save began, and deleted {missing[0]} of this save; let "
                "each job save to paths of its own"
            )
        others = [name for name in names if is_ours(name) and not name.startswith(self.prefix)]
        leftovers = [name for name in others if PREFIXED_NAME.fullmatch(name) and not name.startswith(self._replaced)]
        self._delete(name for name in others if is_export(name))  # which is of the replaced one
        try:
            self._objects.put(f"{url}/{ROOT_NAME}", self._root, self._before)
        except FileExistsError:
            raise FileExistsError(
                f"another process saved to {url!r}, or removed it, since this save began; let each job save to paths "
                "of its own"
            ) from None
        self._begun = False
        if not self._objects.conditional:  # a save that this one did not stop may still be committed
            others, leftovers = [name for name in others if name not in leftovers], []
            if was_conditional:
                self.notes.append(
                    f"the store of {url!r} can't compare and write in one step: of two jobs that save to one path in "
                    "the same instant, the later one counts; let each job save to paths of its own"
                )
        if leftovers:
            self.notes.append(f"removed the leftover of an unfinished save at {url!r}")
        try:
            self._delete(others)
        except OSError as error:
            self.notes.append(f"could not remove the replaced checkpoint at {url!r}: {error}")

    def discard(self) -> None:
        """Delete this save's objects, as far as possible."""
        if self._begun:
            with suppress(OSError):
                self._delete(name for name in self._objects.list(self._url) if name.startswith(self.prefix))

    def _delete(self, names: Iterable[str]) -> None:
        self._objects.delete(f"{self._url}/{name}" for name in names)


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class RemoteReader:
    """Reader of a checkpoint in an object store. The root index is in memory from the beginning. Thread-safe."""

    high_latency = True

    def __init__(self, objects: ObjectStore, url: str) -> None:
        self._objects, self._url = objects, url
        self._root, _ = objects.get(f"{url}/{ROOT_NAME}")
        self.prefix, self._sizes = read_prefix(self._root[:HEAD_BYTES]) or "", {ROOT_NAME: len(self._root)}

    def size(self, name: str) -> int:
        """Return the length of a file in bytes."""
        if name not in self._sizes:
            with self._replacement_named():
                self._sizes[name] = self._objects.stat(f"{self._url}/{self.prefix}{name}").size
        return self._sizes[name]

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on, with one request once the size is known."""
        size, stop = self.size(name), offset + len(target)
        if stop > size:
            raise EOFError(f"{name} ends at byte {size}, expected {stop}")
        if name == ROOT_NAME:
            target[:] = self._root[offset:stop]
            return
        with self._replacement_named():
            target[:] = self._objects.read(f"{self._url}/{self.prefix}{name}", offset, stop)

    @contextmanager
    def _replacement_named(self) -> Iterator[None]:
        """Raise an OSError with ``errno.ESTALE`` for a missing file if the root index is no longer the one in memory.

        A save that replaces a checkpoint deletes its files. A checkpoint that merely lacks a file keeps its root index.
        """
        try:
            yield
        except FileNotFoundError:
            now = b""
            with suppress(FileNotFoundError):
                now, _ = self._objects.get(f"{self._url}/{ROOT_NAME}")
            if now == self._root:
                raise
            text = f"{self._url} was replaced or deleted while it was read: open it again"
            raise OSError(errno.ESTALE, text) from None

    def names(self) -> list[str]:
        """Return all entries, sorted, without files and leftovers of other saves to the path."""
        return names_of_save(self._objects.list(self._url), self.prefix)

    def close(self) -> None:
        """Do nothing: no connection is held."""


def open_cached(reader: Reader, folder: str) -> LocalReader:
    """Return a reader that copies files to a local folder before it opens them, and keeps them there.

    The folder's name is the checksum of the checkpoint's root index, so files of different saves are never mixed. The
    ranks of a machine share it: the first rank that needs a file downloads it under a lock, the others wait.
    """
    place = os.path.join(os.path.abspath(folder), checksum(read_all(reader, ROOT_NAME)))
    make_directories(place, sync=False)
    return LocalReader(place, fetch=partial(_download, reader, place))


def _download(reader: Reader, folder: str, name: str) -> None:
    """Download a whole file into a folder, unless a process has already done so."""
    path = os.path.join(folder, name)
    if os.path.isfile(path):
        return
    size = reader.size(name)

    def copy_window(begin: int) -> None:
        window = memoryview(bytearray(min(_WINDOW_BYTES, size - begin)))
        reader.read_into(name, begin, window)
        write_at(file, window, begin)

    with locked(f"{path}.part") as file:
        if not os.path.isfile(path):  # else another rank downloaded it meanwhile
            os.ftruncate(file, size)
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(copy_window, range(0, size, _WINDOW_BYTES)))
            os.fsync(file)  # from the rename on, the file counts as complete
            os.rename(f"{path}.part", path)
