"""Export adapters to a folder that ``PeftModel.from_pretrained`` loads, without torch and PEFT.

The folder has ``adapter_model.safetensors`` and ``adapter_config.json``, with the names that PEFT's own
``save_pretrained`` gives; the configuration was saved with the checkpoint. Memory does not grow with the adapters.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.export.safetensors_export import Export, ShardedCheckpoint, nbytes, write_directory
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.safetensors_files import OutputFile, OutputTensor, plan_file
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.state.documents import PEFT
from lightning_shardckpt.state.peft_names import Adapter, adapters_from_json
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.text import progress
from lightning_shardckpt.transfer.reader import Checkpoint

_log = logging.getLogger(__name__)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DEFAULT = "default"


def export_adapters(
    checkpoint_folder: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    adapter: str | None = None,
    prefix: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> list[Path | str]:
    """Write adapters of a checkpoint in PEFT's layout; returns the folders, one for each adapter: of URLs, as text.

    As with PEFT's ``save_pretrained``, the adapter "default" is in ``output`` itself and others in folders of their
    names inside it; a single one that was asked for is in ``output``. The folder appears when it is complete; at a URL
    the configurations come last.

    Args:
        checkpoint_folder: a checkpoint of this package, with or without the base model.
        output: a folder that does not exist yet, or is empty; or a URL.
        adapter: which one; all by default.
        prefix: of the names of the model with the adapters, such as "model.", if there are several such models.
        storage_options: for URLs, see ``ShardCkptIO``.

    Raises:
        CheckpointNotFoundError: if the folder is no checkpoint.
        FormatError: if it has no such adapter, or not all of one.
        FileExistsError: if there is something at ``output``.
        CorruptionError: naming file, tensor and rank of corrupted data.
    """
    folder, output = file_path(checkpoint_folder), file_path(output)
    storage = StorageRouter(storage_options=storage_options)
    outputs = storage.outputs(output)
    with Checkpoint(storage, folder) as checkpoint:
        stored, export, paths = ShardedCheckpoint(checkpoint), Export([]), []
        for one in _choose(checkpoint, adapter, prefix):
            inner = "" if one.name == (adapter or _DEFAULT) else f"{one.name}/"
            export.containers.append(_container(inner + WEIGHTS, folder, one, stored.components()))
            export.files[inner + CONFIG] = one.config.encode()
            paths.append(os.path.join(output, inner).rstrip("/"))
        if outputs.kind(output) == "file" or outputs.contents(output).names:
            raise FileExistsError(f"the adapters need a folder that does not exist yet or is empty: {output}")
        directory = outputs.directory(output, replaceable=lambda there: not there.names)
        with directory as (new, notes), progress(nbytes(export)) as advance:
            write_directory(stored, export, new, advance)
        for note in notes:
            _log.warning(note)
    return [path if is_url(path) else Path(path) for path in paths]


def _choose(checkpoint: Checkpoint, adapter: str | None, prefix: str | None) -> list[Adapter]:
    where = f"checkpoint {checkpoint.path!r}"
    if PEFT not in checkpoint.root.documents:
        raise FormatError(
            f"{where} has no adapters of PEFT: it has no {PEFT}, which is saved with a module that PEFT wrapped"
        )
    try:
        known = adapters_from_json(parse_json(checkpoint.document(PEFT), PEFT))
    except FormatError as error:
        raise FormatError(f"{where}, {PEFT}: {error}") from None
    chosen = [a for a in known if adapter in (None, a.name) and prefix in (None, a.prefix)]
    listed = ", ".join(f"{a.name!r} of the model {a.prefix!r}" for a in known)
    if not chosen:
        raise FormatError(f"{where} has no adapter {adapter!r} of a model {prefix or 'any'!r}; it has {listed}")
    if len({a.prefix for a in chosen}) > 1:
        raise FormatError(f"{where} has adapters of several models, {listed}: say which with prefix")
    return chosen


def _container(name: str, folder: str, adapter: Adapter, components: Mapping[str, Component]) -> OutputFile:
    """Return the layout of the file of an adapter's weights."""
    model = components.get("model", Component({}))
    names = adapter.names({**model.tensors, **model.aliases}.keys())
    if not any(".lora_" in own or own.startswith("lora_") for own in names):
        raise FormatError(f"checkpoint {folder!r} has no tensors of adapter {adapter.name!r} below {adapter.prefix!r}")
    keys = {own: model.aliases.get(stored, stored) for own, stored in names.items()}
    specs = {own: model.tensors[key] for own, key in keys.items()}
    tensors = [OutputTensor(own, spec.dtype, spec.shape, ("model", keys[own])) for own, spec in specs.items()]
    return plan_file(name, tensors, {"format": "pt"})
