"""Export of a committed checkpoint's model into its folder ``huggingface``, for transformers' ``from_pretrained``.

The folder is no part of the checkpoint: no index names it, and no load of the checkpoint reads it. It is deleted with
the checkpoint. It appears when it is complete: by a rename in a file system, by its last object in an object store.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from lightning_shardckpt.errors import CheckpointNotFoundError, StateError
from lightning_shardckpt.export.safetensors_export import plan_safetensors
from lightning_shardckpt.export.whole_files import Options, write
from lightning_shardckpt.format.index import EXPORT_FOLDER
from lightning_shardckpt.sources.source import sharded_source
from lightning_shardckpt.state.documents import CONFIG
from lightning_shardckpt.storage.posix import rename_with_flag
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.remote_storage import RemoteStorage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.storage.temporaries import NewFile, output_directory
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

        def check_current() -> None:
            with Checkpoint(storage, path) as current:
                if current.root.save_id != checkpoint.root.save_id:
                    raise CheckpointNotFoundError("another process replaced it")

        stored = sharded_source(checkpoint, for_export=True)
        if stored.document("huggingface") is None:
            raise StateError(
                "its module has no model of transformers; `python -m lightning_shardckpt.consolidate --format "
                "safetensors` converts any checkpoint"
            )
        try:
            export = plan_safetensors(stored, Options(format="huggingface"))
        except ValueError as error:
            raise StateError(str(error)) from None
        new_folder, open_files = _directory(path, check_current), 64
        if isinstance(store, RemoteStorage):  # an object takes space on the local disk until it is uploaded
            new_folder, open_files = _objects(store, path, check_current), 1
        try:
            with new_folder as create:
                write(stored, export, create, open_files=open_files)
        except FileNotFoundError:
            check_current()
            raise
    return export.notes


@contextmanager
def _directory(path: str, check: Callable[[], None]) -> Iterator[NewFile]:
    """Yield a function that creates a file of the export; at the end, ``check``, and let all appear at once."""

    def rename(new: str, target: str, flag: int) -> bool:
        check()
        return rename_with_flag(new, target, flag)

    with output_directory(os.path.join(path, EXPORT_FOLDER), lambda folder: True, rename) as (create, _):
        yield create


@contextmanager
def _objects(store: RemoteStorage, path: str, check: Callable[[], None]) -> Iterator[NewFile]:
    """Yield a function as `_directory` does. transformers reads the folder once its last object is there."""
    last: list[bytes] = []

    @contextmanager
    def create(name: str) -> Iterator[int]:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
            file.seek(0)
            if name == CONFIG:
                last.append(file.read())
            else:
                store.add(path, f"{EXPORT_FOLDER}/{name}", iter(lambda: file.read(_PART_BYTES), b""))

    try:
        yield create
        check()
        store.add(path, f"{EXPORT_FOLDER}/{CONFIG}", last)
    except BaseException:
        with suppress(OSError):
            store.remove_export(path)
        raise
