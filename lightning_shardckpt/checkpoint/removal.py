"""Delete what a callback no longer keeps: a checkpoint, a link, a plain file or an object of a store."""

from __future__ import annotations

import os

from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.remote.remote_storage import RemoteStorage
from lightning_shardckpt.storage.router import StorageRouter, is_url


def remove_any(path: str, storage: Storage) -> list[str]:
    """Delete what is at a path or URL, if anything is, and return sentences about what had to stay.

    Never raises for what the file system refuses: training must not end for that.
    """
    try:
        if is_url(path):
            return _remove_from_store(path, storage)
        if os.path.isfile(path) and not os.path.islink(path):
            os.unlink(path)
        elif os.path.lexists(path):
            return storage.remove(path)
    except OSError as error:
        return [f"not removed: {error}"]
    return []


def _remove_from_store(url: str, storage: Storage) -> list[str]:
    store = storage.of(url) if isinstance(storage, StorageRouter) else storage
    if isinstance(store, RemoteStorage) and store.is_object(url):
        store.delete_object(url)
        return []
    if isinstance(store, RemoteStorage) and store.is_empty(url):
        return []
    return store.remove(url)
