"""Safetensors files for other programs: a model and its optimizers, a model of transformers, adapters of PEFT.

The plan of each is a choice of names over the stored tensors, and a few documents. No torch.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, StateError
from lightning_shardckpt.export.whole_files import OPTIMIZER, SIZE_PER_SHARD, WRITER, Export, Options, WholeFile, write
from lightning_shardckpt.format.index import EXPORT_FOLDER, Component
from lightning_shardckpt.format.safetensors_header import (
    OutputFile,
    OutputTensor,
    build_index,
    group_by_size,
    name_chunks,
    name_tensor_file,
    plan_file,
)
from lightning_shardckpt.sources.source import Source, StoredTensor, sharded_source
from lightning_shardckpt.state import hf_directory
from lightning_shardckpt.state.documents import CONFIG, PEFT
from lightning_shardckpt.state.peft import adapters_from_json
from lightning_shardckpt.storage.local_files import NewFile, open_output, write_at
from lightning_shardckpt.storage.object_store import ObjectStore
from lightning_shardckpt.storage.router import StorageRouter, is_url
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.writer import MB

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
_FORMAT = {"format": "pt"}
_PART_BYTES = 8 << 20


def plan_safetensors(stored: Source, options: Options) -> Export:
    """Plan the files of an export, and their contents.

    Raises:
        ValueError: if names collide, an option matches no tensor, or no tensor is selected.
        FormatError: naming a tensor that safetensors cannot hold.
    """
    export, selected = Export([]), options.select(stored)
    if "model" not in stored.table:
        raise ValueError("the checkpoint has no model")
    table, ties, model = selected.table["model"], selected.aliases.get("model", {}), None
    if options.format == "huggingface":
        model = hf_directory.pick_model(stored.document("huggingface"), [*table, *ties])
        if model is None:
            export.notes.append("there is no config.json: the checkpoint has no record of a model of transformers")
    if model is not None:
        tensors, ties = _hugging_face_tensors(stored, [*table, *ties], model, options, export), {}
    else:
        tensors = [_output(name, one, options.output_dtype(one.spec.dtype)) for name, one in table.items()]
    if not tensors:
        raise ValueError("no tensor of the model is left to write")
    if other_state := sorted(selected.document("model") or ()):
        listed = list_some([*map(repr, other_state)], 5)
        export.notes.append(f"state of the model that is not tensors is not in the output: {listed}")
    _add_files("model", tensors, ties, options, export)
    if options.has_optimizer:
        if (document := selected.document("optimizer")) is None:
            raise ValueError("the checkpoint has no optimizer: it was saved with weights only")
        moments = selected.table.get("optimizer", {})  # by <n>/<name>/<state>
        _add_files("optimizer", [_output(key, moments[key]) for key in moments], {}, options, export)
        export.documents[OPTIMIZER] = (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()
    return export


def _output(name: str, stored: StoredTensor, dtype: str | None = None) -> OutputTensor:
    return OutputTensor(name, dtype or stored.spec.dtype, stored.spec.shape, (stored.component, stored.key))


def _hugging_face_tensors(
    stored: Source, names: list[str], model: hf_directory.Model, options: Options, export: Export
) -> list[OutputTensor]:
    """Return the tensors that ``from_pretrained`` expects, and add the configs to the documents of the export."""
    component, kind = stored.components()["model"], model.recorded["class"]
    for name in component.names:
        if (new := options.key_mapping(name)) not in (name, None):
            raise ValueError(
                f"from_pretrained takes the weights of {kind} by their names: for format 'huggingface', key_mapping "
                f"can leave {name!r} out, but not rename it to {new!r}"
            )
    if outside := [name for name in names if not name.startswith(model.prefix)]:
        export.notes.append(f"not of the {kind}, and not in the output: {list_some([*map(repr, outside)], 5)}")
    keys = {name: component.names[name] for name in names}
    tensors = list(model.tensors(keys, component, options.output_dtype, refuses_adapters=True))
    if twice := [name for name, count in Counter(tensor.name for tensor in tensors).items() if count > 1]:
        raise ValueError(f"two tensors would be called {twice[0]!r}")
    floating = (tensor.dtype for tensor in tensors if tensor.dtype in hf_directory.CONFIG_DTYPES)
    export.documents |= model.files(next(floating, None), options.dtype is not None)
    return tensors


def plan_adapters(stored: Source) -> Export:
    """Plan the files that PEFT's ``save_pretrained`` writes, in folders for adapters other than "default".

    Args:
        stored: a checkpoint of this package, with or without the base model.

    Raises:
        FormatError: if the checkpoint has no adapters, only a part of one, or those of several models.
    """
    export, where, document = Export([]), f"checkpoint {stored.path!r}", stored.document("peft")
    if document is None:
        raise FormatError(f"{where} has no adapters of PEFT: no {PEFT}, which is saved with a module that PEFT wrapped")
    adapters = adapters_from_json(document)
    if len({a.prefix for a in adapters}) != 1:
        listed = ", ".join(f"{a.name!r} of the model {a.prefix!r}" for a in adapters)
        raise FormatError(f"{where} does not have adapters of exactly one model: it has {listed}")
    keys = stored.components().get("model", Component({})).names
    for one in adapters:
        folder = "" if one.name == "default" else f"{one.name}/"
        names = one.names(keys.keys())
        if not any(".lora_" in name or name.startswith("lora_") for name in names):
            raise FormatError(f"{where} has no tensors of adapter {one.name!r} below {one.prefix!r}")
        tensors = [_output(name, stored.table["model"][keys[live]]) for name, live in names.items()]
        export.files.append(_whole_file(plan_file(folder + ADAPTER_WEIGHTS, tensors, _FORMAT)))
        export.documents[folder + ADAPTER_CONFIG] = one.config.encode()
    return export


def _add_files(
    stem: str, tensors: list[OutputTensor], ties: Mapping[str, str], options: Options, export: Export
) -> None:
    """Add the files of a model or an optimizer to an export, and their index if there may be several.

    Args:
        stem: of the files' names.
        tensors: to write.
        ties: names under which tensors are written, by further names, for the metadata.
        options: of the export.
        export: to add to.
    """
    if options.files == "one_file_per_tensor":
        groups = [[tensor] for tensor in tensors]
        names = [name_tensor_file(stem, tensor.name) for tensor in tensors]
    else:
        limit = int((options.size_per_shard or SIZE_PER_SHARD) * MB) if options.files == "chunks" else sys.maxsize
        groups = group_by_size(tensors, limit) or [[]]
        names = name_chunks(stem, len(groups))
    files = []
    for name, group in zip(names, groups, strict=True):
        written = {tensor.name for tensor in group}
        group_ties = {name: of for name, of in ties.items() if of in written and name != "format"}
        files.append(plan_file(name, group, {**_FORMAT, **dict([WRITER]), **group_ties}))
    export.files += map(_whole_file, files)
    if len(files) > 1 or options.files == "one_file_per_tensor":
        export.documents[f"{stem}.safetensors.index.json"] = build_index(files)


def _whole_file(planned: OutputFile) -> WholeFile:
    def begin(file: int) -> tuple[int, ...]:
        write_at(file, memoryview(planned.header), 0)
        return planned.begins

    return WholeFile(planned.name, planned.tensors, begin)


# ── beside a checkpoint ───────────────────────────────────────────────────────────────────────────────────────────────
# The folder ``huggingface`` is no part of its checkpoint: no index names it, and no load of the checkpoint reads it. It
# is deleted with the checkpoint. It appears when it is complete: by a rename in a file system, by its config, the last
# object that transformers waits for, in an object store.


def export_beside(path: str, storage: StorageRouter) -> list[str]:
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
        if is_url(path):
            with _objects(storage.objects(path), f"{path}/{EXPORT_FOLDER}", check_current) as create:
                write(stored, export, create)
        else:
            folder = os.path.join(path, EXPORT_FOLDER)
            with open_output(folder, is_file=False, replaceable=lambda folder: True) as (create, _):
                write(stored, export, create)
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
            store.upload(f"{folder}/{name}", iter(lambda: file.read(_PART_BYTES), b""))

    try:
        yield create
    except BaseException:
        with suppress(OSError):
            store.delete(f"{folder}/{name}" for name in store.list(folder))
        raise
