"""Export of a committed checkpoint's model into its folder ``huggingface``, for transformers' ``from_pretrained``.

The folder is no part of the checkpoint: no index names it, and no load of the checkpoint reads it. It is deleted with
the checkpoint. It appears when it is complete: by a rename in a file system, by its last object in an object store.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from lightning_shardckpt.errors import CheckpointNotFoundError, StateError
from lightning_shardckpt.export.options import Options
from lightning_shardckpt.export.safetensors_export import Export, plan_export, write_directory
from lightning_shardckpt.format.index import EXPORT_FOLDER
from lightning_shardckpt.sources.source import sharded_source
from lightning_shardckpt.state.documents import CONFIG
from lightning_shardckpt.storage.local.posix import sync_directory
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.remote.remote_storage import RemoteStorage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.transfer.reader import Checkpoint

_PART_BYTES = 8 << 20


def export_beside(path: str, storage: Storage) -> list[str]:
    """Write the model of a checkpoint into its folder ``huggingface``. Runs on one rank, also off the main thread.

    Args:
        path: a committed checkpoint, or its URL.
        storage: of ``path``.

    Returns:
        Sentences for the user.

    Raises:
        StateError: if the saved module has no model of transformers, or it has adapters that are not merged.
        CheckpointNotFoundError: if the checkpoint was replaced meanwhile.
    """
    store = storage.backend(path) if isinstance(storage, StorageRouter) else storage
    with Checkpoint(storage, path) as checkpoint:
        stored = sharded_source(checkpoint, for_export=True)
        if stored.document("huggingface") is None:
            raise StateError(
                "its module has no model of transformers; `python -m lightning_shardckpt.consolidate --format "
                "safetensors` converts any checkpoint"
            )
        try:
            export = plan_export(stored, Options(format="huggingface"))
        except ValueError as error:
            raise StateError(str(error)) from None
        output = _Objects(store, path) if isinstance(store, RemoteStorage) else _Folder(path)
        try:
            for file in export.tensor_files:  # one at a time, since an object's file takes space on the local disk
                write_directory(stored, Export([file]), output.create, lambda nbytes: None)
            write_directory(stored, Export([], export.files), output.create, lambda nbytes: None)
            with Checkpoint(storage, path) as current:
                if current.root.save_id != checkpoint.root.save_id:
                    raise CheckpointNotFoundError("another process replaced it")
            output.finish()
        except BaseException:
            output.discard()
            raise
    return export.notes


class _Folder:
    """A folder of a checkpoint in a file system: written under a temporary name, then renamed."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._temporary = os.path.join(path, f".tmp-{EXPORT_FOLDER}")
        shutil.rmtree(self._temporary, ignore_errors=True)
        os.mkdir(self._temporary)

    @contextmanager
    def create(self, name: str) -> Iterator[int]:
        """Create a file, and yield its descriptor; durable when the context ends."""
        with open(os.path.join(self._temporary, name), "xb+") as file:
            yield file.fileno()
            os.fsync(file.fileno())

    def finish(self) -> None:
        """Let the folder appear, durably."""
        sync_directory(self._temporary)
        target = os.path.join(self._path, EXPORT_FOLDER)
        if os.path.lexists(target):
            shutil.rmtree(target)
        os.rename(self._temporary, target)
        sync_directory(self._path)

    def discard(self) -> None:
        """Delete what was written."""
        shutil.rmtree(self._temporary, ignore_errors=True)


class _Objects:
    """A folder of a checkpoint in an object store. transformers reads it once its last object is there: config.json."""

    def __init__(self, store: RemoteStorage, path: str) -> None:
        self._store, self._path = store, path
        self._last: tuple[str, bytes] | None = None

    @contextmanager
    def create(self, name: str) -> Iterator[int]:
        """Create a file, and yield the descriptor of a temporary file; it is uploaded when the context ends.

        ``config.json`` is held back until ``finish``.
        """
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
            if name == CONFIG:
                file.seek(0)
                self._last = name, file.read()
            else:
                self._store.add(self._path, f"{EXPORT_FOLDER}/{name}", _parts(file))

    def finish(self) -> None:
        """Put the last object."""
        assert self._last is not None
        self._store.add(self._path, f"{EXPORT_FOLDER}/{self._last[0]}", [self._last[1]])

    def discard(self) -> None:
        """Delete what was uploaded, as far as possible."""
        with suppress(OSError):
            self._store.remove_export(self._path)


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    file.seek(0)
    yield from iter(lambda: file.read(_PART_BYTES), b"")
