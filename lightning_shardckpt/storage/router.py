"""Storage for any path: the file system, or object stores for URLs, whose readers and drafts of checkpoints are here.

Atomic commit without renames: the names of a save's objects begin with its id, which the root index records. No reader
finds them until that is put, which is the commit, and only if the root index that was there when the save began is
still there. All other objects below the path then belong to saves that can't be committed any more, and are deleted.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import copy
from functools import partial
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import PREFIXED_NAME, ROOT_NAME, is_export, is_ours, prefix_of, read_prefix
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.local_files import locked, make_directories, write_at
from lightning_shardckpt.storage.local_storage import LocalReader, LocalStorage
from lightning_shardckpt.storage.object_store import ObjectStore
from lightning_shardckpt.storage.protocol import Bytes, Draft, Reader, Storage, names_of_save, names_to_remove, read_all
from lightning_shardckpt.system.host import TUNING, Tuning

_LOCAL_PROTOCOLS = ("file://", "local://")
_MANGLED_URL = re.compile(r"(s3a?|gs|gcs|az|abfss?|memory|https?):/[^/]")
_WINDOW_BYTES, _THREADS = 8 << 20, 8  # of downloads


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a URL that does not name the local file system, as ``file:///tmp/a.ckpt`` does."""
    return "://" in os.fspath(path) and not os.fspath(path).startswith(_LOCAL_PROTOCOLS)


def file_path(path: str | os.PathLike[str]) -> str:
    """Return a path without the protocol of the local file system, and with the home directory for ``~``, as fsspec.

    Other URLs are returned unchanged; raises a ValueError for one that was converted to a ``Path``.

    >>> file_path("file:///tmp/a.ckpt"), file_path("s3://bucket/a.ckpt")
    ('/tmp/a.ckpt', 's3://bucket/a.ckpt')
    """
    path = os.fspath(path)
    if _MANGLED_URL.match(path):
        raise ValueError(f"{path!r} was a URL before it became a Path, which drops a slash: pass it as a str")
    for protocol in _LOCAL_PROTOCOLS:
        path = path.removeprefix(protocol)
    return os.path.expanduser(path)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return ``file_path(path)``, made absolute if it is not a URL."""
    path = file_path(path)
    return path if is_url(path) else os.path.abspath(path)


def check_writable(path: str) -> None:
    """Raise a ValueError for a URL of the web, where nothing can be written."""
    if path.startswith(("http://", "https://")):
        raise ValueError(f"{path!r} can be read, but not written: save to a path or to an object store")


def refuse_existing(path: str, storage: StorageRouter) -> None:
    """Raise a FileExistsError if something other than an empty directory is at the path of a new checkpoint."""
    exists = os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))
    if is_url(path):
        with suppress(CheckpointNotFoundError):
            storage.open(path).close()
            exists = True
    if exists:
        raise FileExistsError(f"{path!r} exists already; pass overwrite=True to replace a checkpoint")


class StorageRouter:
    """A ``Storage`` for any path: ``local``, by default a ``LocalStorage``, and for URLs buckets as ``ObjectStore``.

    Files of URLs are copied to the local folder ``pre_download``, if there is one, before they are read, and reused.
    """

    def __init__(
        self,
        local: Storage | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        pre_download: str | os.PathLike[str] | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        self.local: Storage = local or LocalStorage()
        self.visible_within_s, self._tuning = self.local.visible_within_s, tuning
        self._options, self._buckets = dict(storage_options or {}), dict[str, ObjectStore]()
        self._cache = None if pre_download is None else os.path.abspath(pre_download)

    def with_options(self, storage_options: Mapping[str, Any]) -> StorageRouter:
        """Return the same storage with other options for URLs; ``throttle_uploads`` stays if it is not among them."""
        router, kept = copy(self), {"throttle_uploads": self._options.get("throttle_uploads", False)}
        router._buckets, router._options = {}, {**kept, **storage_options}
        return router

    def objects(self, url: str) -> ObjectStore:
        """Return the bucket of a URL. Connections to a bucket are shared by its URLs."""
        bucket = "/".join(url.split("/")[:3])
        if bucket not in self._buckets:
            self._buckets[bucket] = ObjectStore(url, self._options, self._tuning)
        return self._buckets[bucket]

    def open(self, path: str) -> Reader:
        if not is_url(path):
            return self.local.open(file_path(path))
        reader = _open_remote(self.objects(path), path.rstrip("/"))
        if self._cache is None:
            return reader
        place = os.path.join(self._cache, checksum(read_all(reader, ROOT_NAME)))  # files of saves are never mixed
        make_directories(place, sync=False)
        return LocalReader(place, fetch=partial(_download, reader, place))

    def draft(self, path: str, save_id: str) -> Draft:
        if not is_url(path):
            return self.local.draft(file_path(path), save_id)
        check_writable(path)
        return RemoteDraft(self.objects(path), path.rstrip("/"), save_id)

    def remove(self, path: str) -> list[str]:
        if not is_url(path):
            return self.local.remove(file_path(path))
        objects, url = self.objects(path), path.rstrip("/")
        names = names_to_remove(objects.list(url), _open_remote(objects, url).prefix)
        objects.delete(f"{url}/{name}" for name in names if is_export(name))
        objects.delete([f"{url}/{ROOT_NAME}"])
        try:
            objects.delete(f"{url}/{name}" for name in names)
        except OSError as error:
            return [f"could not remove all files of the deleted checkpoint {url!r}: {error}"]
        return []


def _open_remote(objects: ObjectStore, url: str) -> RemoteReader:
    try:
        return RemoteReader(objects, url)
    except FileNotFoundError:
        objects.list(url)  # raises if there is no such bucket
        raise CheckpointNotFoundError(
            f"{url!r} is not a complete checkpoint: it has no {ROOT_NAME}; checkpoints of other programs can't be "
            "read at a URL: download it first"
        ) from None


class RemoteDraft:
    """A draft of objects whose names begin with the save's id; the root index is held back until ``publish``."""

    def __init__(self, objects: ObjectStore, url: str, save_id: str) -> None:
        self._objects, self._url, self.prefix = objects, url, prefix_of(save_id)
        self._before: dict[str, str] | None = None  # the tag of the root index when the save began
        self._replaced = "?"  # the prefix of the names in the checkpoint that was there; no name begins with a "?"
        self._begun, self._root, self._written = False, b"", set[str]()
        self.notes: list[str] = []

    def begin(self) -> None:
        """Check the path, and remember its root index, on which the commit depends."""
        with suppress(FileNotFoundError):
            root, self._before = self._objects.get(f"{self._url}/{ROOT_NAME}")
            self._replaced = read_prefix(root) or "?"
        found = self._objects.list(self._url).items() if self._before is None else ()
        others = [name for name, stat in found if stat.size and not PREFIXED_NAME.fullmatch(name)]
        if others or self._objects.tag(self._url) is not None:
            raise FileExistsError(
                f"{self._url!r} holds no checkpoint of this package but {', '.join(others[:1]) or 'is an object'}, so "
                "it is not replaced; move it or use another path"
            )
        self._begun = True

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        if name in self._written:
            raise FileExistsError(f"{name} was written already")
        self._written.add(name)
        if name == ROOT_NAME:
            self._root = b"".join(parts)
        else:
            self._objects.upload(f"{self._url}/{self.prefix}{name}", parts, nbytes)

    def publish(self) -> None:
        """Put the root index; then delete the replaced checkpoint and leftovers of other saves."""
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
        if self._begun:
            with suppress(OSError):
                self._delete(name for name in self._objects.list(self._url) if name.startswith(self.prefix))

    def _delete(self, names: Iterable[str]) -> None:
        self._objects.delete(f"{self._url}/{name}" for name in names)


class RemoteReader:
    """Reader of a checkpoint in an object store. The root index is in memory from the beginning."""

    high_latency = True

    def __init__(self, objects: ObjectStore, url: str) -> None:
        self._objects, self._url = objects, url
        self._root, _ = objects.get(f"{url}/{ROOT_NAME}")
        self.prefix, self._sizes = read_prefix(self._root), {ROOT_NAME: len(self._root)}

    def size(self, name: str) -> int:
        if name not in self._sizes:
            with self._replacement_named():
                self._sizes[name] = self._objects.stat(f"{self._url}/{self.prefix}{name}").size
        return self._sizes[name]

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
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
        """Raise an OSError with ``errno.ESTALE`` for a missing file if the root index in memory is an old one."""
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
        return names_of_save(self._objects.list(self._url), self.prefix)

    def close(self) -> None:
        """Do nothing: no connection is held."""


def _download(reader: Reader, folder: str, name: str) -> None:
    """Download a whole file into a folder, under a lock, unless a process of this machine has already done so."""
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
