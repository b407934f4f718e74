"""Find the storage backend of a path: a file system, or what fsspec has for a URL."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from functools import partial
from typing import Any

from lightning_shardckpt.storage.local.local_outputs import LocalOutputs
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.storage.local.locks import one_per_machine
from lightning_shardckpt.storage.protocol import Draft, Outputs, Reader, Storage
from lightning_shardckpt.storage.remote.objects import ObjectStore
from lightning_shardckpt.storage.remote.remote_reader import CachedReader
from lightning_shardckpt.storage.remote.remote_storage import RemoteOutputs, RemoteStorage
from lightning_shardckpt.storage.remote.retry import RetryPolicy
from lightning_shardckpt.storage.remote.s3 import S3Objects, options_of
from lightning_shardckpt.system.tuning import TUNING, Tuning

_HERE = ("file://", "local://")
_S3 = ("s3", "s3a")
_MANGLED = re.compile(r"(s3a?|gs|gcs|az|abfss?|hdfs|memory|https?):/[^/]")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a URL of something else than the file system.

    >>> is_url("s3://bucket/a.ckpt"), is_url("file:///tmp/a.ckpt"), is_url("a.ckpt")
    (True, False, False)
    """
    return "://" in os.fspath(path) and not os.fspath(path).startswith(_HERE)


def file_path(path: str | os.PathLike[str]) -> str:
    """A path of the file system without a protocol; URLs of other places as they are.

    >>> file_path("file:///tmp/a.ckpt"), file_path("s3://bucket/a.ckpt")
    ('/tmp/a.ckpt', 's3://bucket/a.ckpt')
    """
    found = os.fspath(path)
    for start in _HERE:
        found = found.removeprefix(start)
    return found


class StorageRouter:
    """The storage of any path: paths and ``file://`` URLs are of the file system, other URLs are fsspec's.

    Args:
        local: for the file system.
        storage_options: passed to ``fsspec.filesystem`` for URLs, such as ``endpoint_url``, ``key`` and ``secret``.
        throttle_uploads: let only one process of each machine upload at a time.
        pre_download: a local folder to which files of URLs are copied before they are read, and where they are found
            again.
        retry_policy: how often and how long requests are tried.
        tuning: sizes of parts, numbers of threads and waiting times of transfers to and from stores, and those of the
            file system without ``local``.
    """

    def __init__(
        self,
        local: Storage | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        throttle_uploads: bool = False,
        pre_download: str | os.PathLike[str] | None = None,
        retry_policy: RetryPolicy | None = None,
        tuning: Tuning = TUNING,
    ) -> None:
        self.local: Storage = local or LocalStorage(tuning=tuning)
        self.visible_within_s = self.local.visible_within_s
        self._options = dict(storage_options or {})
        self._retry_policy, self._tuning = retry_policy or RetryPolicy(), tuning
        self._turn = partial(one_per_machine, tuning.turn_wait_s) if throttle_uploads else nullcontext
        self._cache = None if pre_download is None else os.fspath(pre_download)

    def with_options(self, storage_options: Mapping[str, Any]) -> StorageRouter:
        """Return the same storage, with these options for URLs."""
        found = copy(self)
        found._options = dict(storage_options)
        return found

    def of(self, path: str) -> Storage:
        """The backend for a path.

        Raises:
            ValueError: if the path was a URL before it was made a ``Path``, or the protocol is unknown.
            ImportError: if a package for the protocol is missing.
        """
        return self.remote(path) if is_url(path) else self._checked_local(path)

    def remote(self, url: str) -> RemoteStorage:
        """The backend for a URL; raises as ``of`` does."""
        return RemoteStorage(self._objects(url), self._turn)

    def outputs(self, path: str) -> Outputs:
        """Return where an export to a path is written; raises as ``of`` does."""
        if is_url(path):
            return RemoteOutputs(self._objects(path))
        self._checked_local(path)
        return LocalOutputs()

    def _objects(self, url: str) -> ObjectStore:
        import fsspec  # type: ignore[import-untyped]  # comes with lightning; here: only URLs need it

        protocol = url.partition("://")[0]
        is_s3 = protocol in _S3
        try:
            fs, _ = fsspec.core.url_to_fs(url, **(options_of(self._options) if is_s3 else self._options))
        except ImportError as error:
            extra = 'pip install "s3fs>=2026.1"' if is_s3 else "install the package that it names"
            raise ImportError(f"{url!r} can't be opened: {error}; {extra}") from error
        return (S3Objects if is_s3 else ObjectStore)(fs, retry_policy=self._retry_policy, tuning=self._tuning)

    def open(self, path: str) -> Reader:
        """The checkpoint at ``path``. Raises CheckpointNotFoundError."""
        found = self.of(path).open(path)
        return CachedReader(found, self._cache, self._tuning) if self._cache is not None and is_url(path) else found

    def draft(self, path: str, save_id: str) -> Draft:
        """A new checkpoint that will appear at ``path``."""
        return self.of(path).draft(path, save_id)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``. Raises CheckpointNotFoundError."""
        return self.of(path).remove(path)

    def _checked_local(self, path: str) -> Storage:
        if _MANGLED.match(os.fspath(path)):
            raise ValueError(f"{path!r} was a URL before it became a Path, which drops a slash: pass it as a str")
        return self.local


def storage_of(path: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Storage:
    """The storage for a path or a URL; without options with fsspec's own: environment variables, ``fsspec.json``."""
    return StorageRouter(storage_options=storage_options).of(os.fspath(path))
