"""Exports of checkpoints to files that other programs read: by ``consolidate``, and beside a checkpoint after a save.

Memory does not grow with the checkpoint, no GPU, process group or user code is needed, and nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import CheckpointNotFoundError, StateError
from lightning_shardckpt.export import whole_files
from lightning_shardckpt.format.index import EXPORT_FOLDER, ROOT_NAME
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.sources.source import sharded_source
from lightning_shardckpt.state.documents import CONFIG
from lightning_shardckpt.storage.local_files import NewFile, open_output
from lightning_shardckpt.storage.object_store import ObjectStore
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.host import drain_all
from lightning_shardckpt.system.text import progress
from lightning_shardckpt.transfer.reader import Checkpoint

_log = logging.getLogger(__name__)
_SAFETENSORS = ".safetensors"
_PART_BYTES = 8 << 20


def consolidate(
    checkpoint_folder: str | os.PathLike[str],
    output_file: str | os.PathLike[str] | None = None,
    *,
    format: whole_files.Format | None = None,
    split: whole_files.Split | None = None,
    size_per_shard: float | None = None,
    optimizer: bool | None = None,
    dtype: str | None = None,
    key_mapping: KeyMappingLike | None = None,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
) -> Path:
    """Export a checkpoint for other programs.

    The output appears when it is complete and durable; after an error, nothing is left of it. Waits for the
    asynchronous saves of this process.

    Args:
        checkpoint_folder: a checkpoint of this package, which may be a URL, or of any other format that is read.
        output_file: a path. By default, the folder's path with ``.consolidated`` appended, and then ``.safetensors``
            for a safetensors file; for a checkpoint at a URL, in the current directory.
        format: "torch", a file for ``torch.load``; "safetensors", whole tensors of the model and, optionally, the
            optimizers; "huggingface", a directory for ``from_pretrained``, if the saved module contains a model of
            transformers; "peft", a directory for ``PeftModel.from_pretrained`` with the adapters only, as PEFT's
            ``save_pretrained`` writes it. By default "safetensors" if ``output_file`` ends in ``.safetensors``, else
            "torch".
        split: of safetensors: "one_file" (the default), "one_file_per_tensor" or "chunks", several files with an index.
            A model for transformers is in chunks.
        size_per_shard: maximum size of a chunk in MB (2^20 bytes), 5,000 by default; a larger tensor gets its own file.
        optimizer: include the optimizers; by default only for "torch". With safetensors, their state that is not
            tensors is written to ``optimizer.json``.
        dtype: "float64", "float32", "float16" or "bfloat16", for all floating-point tensors of the model.
        key_mapping: selects and renames tensors: a dict of whole names or regular expressions to new names (None
            leaves a tensor out), or a function. A model of transformers keeps its names. See "Rename tensors" in the
            documentation.
        overwrite: replace the output of an earlier call, atomically.
        storage_options: for URLs, by fsspec's names, such as ``endpoint_url``, ``key`` and ``secret``.

    Returns:
        The path of the file or directory.

    Raises:
        ValueError: if options contradict each other, or the output is inside a checkpoint, or at a URL.
        MismatchError: if names collide, or an entry of ``key_mapping`` matches nothing.
        CheckpointNotFoundError: if the folder is not a checkpoint.
        FileExistsError: if the output exists.
        CorruptionError: naming file, tensor and rank.
    """
    is_named = output_file is not None and os.fspath(output_file).endswith(_SAFETENSORS)
    chosen: whole_files.Format = format or ("safetensors" if is_named else "torch")
    options = whole_files.Options(chosen, split, size_per_shard, optimizer, dtype, KeyMapping.of(key_mapping))
    source = file_path(checkpoint_folder).rstrip("/")
    if output_file is None:
        name = Path(source.rpartition("/")[2] if is_url(source) else os.path.abspath(source))
        suffix = _SAFETENSORS if options.is_file and options.format == "safetensors" else ""
        output_file = name.with_name(f"{name.name}.consolidated{suffix}")
    output = file_path(output_file)
    if is_url(output):
        raise ValueError(f"{output!r} is a URL, but exports need a file system: export to a path, then upload")
    drain_all()
    stored, _ = open_source(source, StorageRouter(storage_options=storage_options), for_export=True)
    with closing(stored):
        _check_output(output, options, overwrite)
        if options.format == "peft":
            export = whole_files.plan_adapters(stored)
        elif options.format == "torch":
            from lightning_shardckpt.export.torch_export import plan_torch  # imports torch

            export = plan_torch(stored, options)
        else:
            export = whole_files.plan_safetensors(stored, options)
        if options.format != "peft" and (frozen := stored.document("frozen")):
            export.notes.append(
                f"{stored.path} was saved with adapters_only=True: {len(frozen)} frozen parameters are not in the "
                "output. `load_state_dict` needs strict=False for it; --format peft makes a folder that PEFT loads."
            )
        replaceable = whole_files.is_replaceable if overwrite and not options.is_file else lambda path: overwrite
        opened = open_output(output, is_file=options.is_file, replaceable=replaceable)
        nbytes = sum(tensor.nbytes for file in export.files for tensor in file.tensors)
        with progress(nbytes) as advance, opened as (create, notes):
            whole_files.write(export, create, advance)
    for note in (*export.notes, *notes):
        _log.warning(note)
    return Path(output)


def _check_output(output: str, options: whole_files.Options, overwrite: bool) -> None:
    """Check that ``output`` is free or may be replaced, and not inside a checkpoint."""
    if os.path.lexists(os.path.join(os.path.dirname(os.path.abspath(output)), ROOT_NAME)):
        raise ValueError(f"{output!r} lies inside a checkpoint: choose a path somewhere else")
    if not os.path.lexists(output):
        return
    if not overwrite:
        raise FileExistsError(
            "The path for the converted checkpoint already exists. Choose a different path by providing"
            f" `--output_file` or move/delete the file first: {output}"
        )
    is_directory = os.path.isdir(output) and not os.path.islink(output)
    if options.is_file == is_directory or (is_directory and not whole_files.is_replaceable(output)):
        expected = "a file" if options.is_file else "a directory of an earlier export"
        raise FileExistsError(f"{output} is not {expected}, so it is not replaced; choose a different path")


# ── beside a checkpoint ───────────────────────────────────────────────────────────────────────────────────────────────
# The folder ``huggingface`` is no part of its checkpoint: no index names it, and no load of the checkpoint reads it. It
# is deleted with the checkpoint. It appears when it is complete: by a rename in a file system, by its config, the last
# object that transformers waits for, in an object store.


def export_beside(path: str, storage: StorageRouter) -> list[str]:
    """Write the model of a committed checkpoint into its folder ``huggingface``; return sentences for the user.

    Runs on one rank, also off the main thread.

    Raises:
        StateError, ValueError: if the saved module has no model of transformers, several, or adapters.
        CheckpointNotFoundError: if the checkpoint was replaced meanwhile.
    """
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
        export = whole_files.plan_safetensors(stored, whole_files.Options(format="huggingface"))
        if is_url(path):
            with _objects(storage.objects(path), f"{path}/{EXPORT_FOLDER}", check_current) as create:
                whole_files.write(export, create)
        else:
            folder = os.path.join(path, EXPORT_FOLDER)
            with open_output(folder, is_file=False, replaceable=lambda folder: True) as (create, _):
                whole_files.write(export, create)
                check_current()
    return export.notes


@contextmanager
def _objects(store: ObjectStore, folder: str, check: Callable[[], None]) -> Iterator[NewFile]:
    """Yield a function that creates an object of the export, after ``check`` if it is the config; deletes on errors."""

    @contextmanager
    def create(name: str) -> Iterator[int]:
        with tempfile.TemporaryFile() as file:
            yield file.fileno()
            if name == CONFIG:
                check()
            file.seek(0)
            nbytes = os.fstat(file.fileno()).st_size
            store.upload(f"{folder}/{name}", iter(lambda: file.read(_PART_BYTES), b""), nbytes)

    try:
        yield create
    except BaseException:
        with suppress(OSError):
            store.delete(f"{folder}/{name}" for name in store.list(folder))
        raise
