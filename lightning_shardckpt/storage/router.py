"""Choice of the storage backend for a path: the file system, or an object store for URLs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from copy import copy
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.object_store import ObjectStore
from lightning_shardckpt.storage.protocol import Draft, Reader, Storage
from lightning_shardckpt.storage.remote_storage import RemoteStorage, open_cached
from lightning_shardckpt.system.host import TUNING, Tuning

_LOCAL_PROTOCOLS = ("file://", "local://")
_MANGLED_URL = re.compile(r"(s3a?|gs|gcs|az|abfss?|memory|https?):/[^/]")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return True if a path is a URL that does not name the local file system.

    >>> is_url("s3://bucket/a.ckpt"), is_url("file:///tmp/a.ckpt"), is_url("a.ckpt")
    (True, False, False)
    """
    return "://" in os.fspath(path) and not os.fspath(path).startswith(_LOCAL_PROTOCOLS)


def file_path(path: str | os.PathLike[str]) -> str:
    """Return a path without the protocol of the local file system, and with the home directory for ``~``.

    Other URLs are returned unchanged. fsspec, by which Lightning opens files, reads ``~`` in the same way.

    >>> file_path("file:///tmp/a.ckpt"), file_path("s3://bucket/a.ckpt")
    ('/tmp/a.ckpt', 's3://bucket/a.ckpt')
    """
    path = os.fspath(path)
    for protocol in _LOCAL_PROTOCOLS:
        path = path.removeprefix(protocol)
    return os.path.expanduser(path)


def absolute_path(path: str | os.PathLike[str]) -> str:
    """Return ``file_path(path)``, made absolute if it is not a URL."""
    path = file_path(path)
    return path if is_url(path) else os.path.abspath(path)


class StorageRouter:
    """Storage for any path: the file system for paths and ``file://`` URLs, object stores for other URLs.

    Its methods raise a ValueError for a URL that was converted to a ``Path``, and errors of ``ObjectStore``.

    Args:
        local: the storage of the file system; ``LocalStorage`` by default.
        storage_options: for URLs, as in ``ObjectStore``.
        pre_download: a local folder that caches files of URLs: they are copied there before they are read, and reused.
        tuning: of requests to object stores.
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
        self._cache = None if pre_download is None else os.fspath(pre_download)

    def with_options(self, storage_options: Mapping[str, Any]) -> StorageRouter:
        """Return the same storage with other options for URLs; ``throttle_uploads`` stays if it is not among them."""
        router, kept = copy(self), {"throttle_uploads": self._options.get("throttle_uploads", False)}
        router._buckets, router._options = {}, {**kept, **storage_options}
        return router

    def backend(self, path: str) -> Storage:
        """Return the backend of a path."""
        if is_url(path):
            return RemoteStorage(self.objects(path))
        _check_not_mangled(path)
        return self.local

    def objects(self, url: str) -> ObjectStore:
        """Return the bucket of a URL. Connections to a bucket are shared by its URLs."""
        bucket = "/".join(url.split("/")[:3])
        if bucket not in self._buckets:
            self._buckets[bucket] = ObjectStore(url, self._options, self._tuning)
        return self._buckets[bucket]

    def open(self, path: str) -> Reader:
        """Open the checkpoint at ``path``. Raises CheckpointNotFoundError."""
        reader = self.backend(path).open(file_path(path))
        return open_cached(reader, self._cache) if self._cache is not None and is_url(path) else reader

    def draft(self, path: str, save_id: str) -> Draft:
        """Return a draft of a checkpoint that will appear at ``path``."""
        return self.backend(path).draft(file_path(path), save_id)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``; return notes. Raises CheckpointNotFoundError."""
        return self.backend(path).remove(file_path(path))


def check_writable(path: str) -> None:
    """Raise a ValueError for a URL of the web, where nothing can be written."""
    if path.startswith(("http://", "https://")):
        raise ValueError(f"{path!r} can be read, but not written: save to a path or to an object store")


def refuse_existing(path: str, storage: StorageRouter) -> None:
    """Raise a FileExistsError if something other than an empty directory is at the path of a new checkpoint."""
    if is_url(path):
        try:
            storage.open(path).close()
        except CheckpointNotFoundError:
            return
    if is_url(path) or (os.path.lexists(path) and not (os.path.isdir(path) and not os.listdir(path))):
        raise FileExistsError(f"{path!r} exists already; pass overwrite=True to replace a checkpoint")


def check_local(path: str) -> None:
    """Raise a ValueError if a path is a URL, or was one, where no export can be written."""
    if is_url(path):
        raise ValueError(f"{path!r} is a URL, but exports need a file system: export to a path, then upload")
    _check_not_mangled(path)


def _check_not_mangled(path: str) -> None:
    if _MANGLED_URL.match(os.fspath(path)):
        raise ValueError(f"{path!r} was a URL before it became a Path, which drops a slash: pass it as a str")
