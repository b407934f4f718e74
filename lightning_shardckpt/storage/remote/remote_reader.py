"""Readers of checkpoints in object stores, where names of files begin with a prefix, part of the save's id.

The root index records the prefix, so that a copy of the objects in a directory can be read in the same way.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

from lightning_shardckpt.format.index import HEAD_BYTES, PREFIXED_NAME, ROOT_NAME, read_prefix
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.local import locks
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.local.posix import make_directories, write_at
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.storage.remote.objects import ObjectStore

# ── a local cache ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Local copies of a checkpoint's files are made when a file is first read, and kept.
#
# The folder's name contains the save's id and the checksum of its root index, so files of different saves are never
# mixed. The ranks of a machine share it: the first rank that needs a file downloads it under a lock, the others wait.


_SAVE_ID = re.compile(rb'"save_id":"([0-9a-f]{32})"')
_WINDOW_BYTES, _THREADS = 8 << 20, 8
_WAIT_S = 3600.0  # for another process of this machine that downloads the same file


class CachedReader:
    """Reader that copies files to a local folder before their first read. Thread-safe."""

    high_latency = False

    def __init__(self, reader: Reader, folder: str) -> None:
        self._reader = reader
        root = read_all(reader, ROOT_NAME)
        match = _SAVE_ID.search(root)
        save_id = match[1].decode() if match else "unknown"
        self.folder = os.path.join(os.path.abspath(folder), f"{save_id}-{checksum(root)}")
        make_directories(self.folder, sync=False)
        self._downloaded: set[str] = set()

    def size(self, name: str) -> int:
        """Return the length of a file in bytes, from the store."""
        return self._reader.size(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on; download the file first if it is not cached."""
        if name == ROOT_NAME:
            self._reader.read_into(name, offset, target)
            return
        if name not in self._downloaded:
            _download_file(self._reader, name, self.folder)
            self._downloaded.add(name)
        with closing(LocalReader(self.folder)) as local:
            local.read_into(name, offset, target)

    def names(self) -> list[str]:
        """Return all entries of the checkpoint, sorted."""
        return self._reader.names()

    def clone(self) -> CachedReader:
        """Return this reader, since threads can share it."""
        return self

    def close(self) -> None:
        """Do nothing: no file stays open."""


def _download_file(reader: Reader, name: str, folder: str) -> None:
    """Download a whole file into a folder, unless this or another process has already done so."""
    size, path = reader.size(name), os.path.join(folder, name)
    if _is_whole(path, size):
        return
    unfinished = path + ".part"
    file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)

    def copy_window(begin: int) -> None:
        window = memoryview(bytearray(min(_WINDOW_BYTES, size - begin)))
        reader.read_into(name, begin, window)
        write_at(file, window, begin)

    try:
        if not locks.lock(file, _WAIT_S):
            raise TimeoutError(f"another process has been downloading {path!r} for {_WAIT_S:g} s")
        if _is_whole(path, size):  # another rank downloaded it meanwhile
            return
        os.ftruncate(file, size)
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(copy_window, range(0, size, _WINDOW_BYTES)))
        os.fsync(file)  # from the rename on, a file of the right size counts as complete
        os.rename(unfinished, path)
    finally:
        locks.release(file)


def _is_whole(path: str, size: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_size == size
    except FileNotFoundError:
        return False


_START_BYTES = 16 << 10


class PrefixedReader:
    """Reader that adds the prefix to the names of files, so that callers use the names in the indexes."""

    def __init__(self, reader: Reader, prefix: str) -> None:
        self._reader, self._prefix, self.high_latency = reader, prefix, reader.high_latency

    def size(self, name: str) -> int:
        """Return the length of a file in bytes."""
        return self._reader.size(self._add_prefix(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on."""
        self._reader.read_into(self._add_prefix(name), offset, target)

    def names(self) -> list[str]:
        """Return all entries, sorted; files of other saves keep their prefix."""
        return sorted(name.removeprefix(self._prefix) for name in self._reader.names())

    def clone(self) -> PrefixedReader:
        """Return another reader of the same files."""
        return PrefixedReader(self._reader.clone(), self._prefix)

    def close(self) -> None:
        """Close the underlying reader."""
        self._reader.close()

    def _add_prefix(self, name: str) -> str:
        return name if name == ROOT_NAME else self._prefix + name


class RemoteReader:
    """Reader of a checkpoint in an object store. The root index is already in memory. Thread-safe."""

    high_latency = True

    def __init__(self, objects: ObjectStore, folder: str, root: bytes) -> None:
        self._objects, self._folder, self._root = objects, folder, root
        self._sizes = {ROOT_NAME: len(root)}
        self._starts = {ROOT_NAME: root}  # the first bytes of files

    def size(self, name: str) -> int:
        """Return the length of a file in bytes."""
        if name not in self._sizes:
            with self._replacement_named():
                self._sizes[name] = self._objects.stat(f"{self._folder}/{name}").size
        return self._sizes[name]

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on, with one request at most once the size is known.

        A reader of the length of a header reads the header next, which then usually needs no request of its own.
        """
        size, stop = self.size(name), offset + len(target)
        if stop > size:
            raise EOFError(f"{name} ends at byte {size}, expected {stop}")
        if offset == 0 and stop <= 8 and name not in self._starts:
            self._starts[name] = self._read(name, 0, min(size, _START_BYTES))
        start = self._starts.get(name, b"")
        target[:] = start[offset:stop] if stop <= len(start) else self._read(name, offset, stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        with self._replacement_named():
            return self._objects.read(f"{self._folder}/{name}", start, stop)

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
                now = self._objects.read_json(f"{self._folder}/{ROOT_NAME}")
            if now == self._root:
                raise
            url = self._objects.url(self._folder)
            raise OSError(errno.ESTALE, f"{url} was replaced or deleted while it was read: open it again") from None

    def names(self) -> list[str]:
        """Return all entries, sorted, without files and leftovers of other saves to the path."""
        prefix, names = read_prefix(self._root[:HEAD_BYTES]), sorted(self._objects.sizes(self._folder))
        return [
            name for name in names if prefix is None or name.startswith(prefix) or not PREFIXED_NAME.fullmatch(name)
        ]

    def clone(self) -> RemoteReader:
        """Return this reader, since threads can share it."""
        return self

    def close(self) -> None:
        """Do nothing: no connection is held."""
