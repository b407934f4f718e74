"""Export of adapters to a folder that ``PeftModel.from_pretrained`` loads, without torch and PEFT.

The folder contains ``adapter_model.safetensors``, with the names that PEFT's ``save_pretrained`` gives, and
``adapter_config.json``, which was saved with the checkpoint. Memory does not grow with the size of the adapters.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.export.safetensors_export import Export, tensor_nbytes, write_directory
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.safetensors_files import OutputFile, OutputTensor, plan_file
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.sources.source import sharded_source
from lightning_shardckpt.state.documents import PEFT
from lightning_shardckpt.state.peft_names import Adapter, adapters_from_json
from lightning_shardckpt.storage.local.local_outputs import LocalOutputs
from lightning_shardckpt.storage.router import check_local, file_path
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
) -> list[Path]:
    """Write adapters of a checkpoint in PEFT's layout.

    As with PEFT's ``save_pretrained``, the adapter "default" is written to ``output`` itself, and others to folders
    with their names below it; if ``adapter`` is given, it is written to ``output``. The output appears when it is
    complete.

    Args:
        checkpoint_folder: a checkpoint of this package, with or without the base model.
        output: a folder that does not exist or is empty.
        adapter: the name of the adapter to write; all by default.
        prefix: the prefix of the model's names, such as "model.", if several models have adapters.
        storage_options: options for URLs; see ``ShardCkptIO``.

    Returns:
        The folder of each adapter.

    Raises:
        CheckpointNotFoundError: if the folder is not a checkpoint.
        FormatError: if the checkpoint has no such adapter, or only a part of it.
        FileExistsError: if ``output`` is not empty.
        CorruptionError: naming file, tensor and rank of corrupted data.
    """
    folder, output = file_path(checkpoint_folder), file_path(output)
    check_local(output)
    with open_checkpoint(folder, storage_options=storage_options) as checkpoint:
        stored, export, paths = sharded_source(checkpoint, for_export=True), Export([]), []
        for selected in _select(checkpoint, adapter, prefix):
            subfolder = "" if selected.name == (adapter or _DEFAULT) else f"{selected.name}/"
            export.tensor_files.append(_plan_weights(subfolder + WEIGHTS, folder, selected, stored.components()))
            export.files[subfolder + CONFIG] = selected.config.encode()
            paths.append(Path(output, subfolder))
        if os.path.lexists(output) and not (os.path.isdir(output) and not os.listdir(output)):
            raise FileExistsError(f"the adapters need a folder that does not exist yet or is empty: {output}")
        directory = LocalOutputs().directory(output, replaceable=lambda folder: not os.listdir(folder))
        with directory as (create, notes), progress(tensor_nbytes(export)) as advance:
            write_directory(stored, export, create, advance)
        for note in notes:
            _log.warning(note)
    return paths


def _select(checkpoint: Checkpoint, adapter: str | None, prefix: str | None) -> list[Adapter]:
    where = f"checkpoint {checkpoint.path!r}"
    if PEFT not in checkpoint.root.documents:
        raise FormatError(
            f"{where} has no adapters of PEFT: it has no {PEFT}, which is saved with a module that PEFT wrapped"
        )
    try:
        adapters = adapters_from_json(parse_json(checkpoint.document(PEFT), PEFT))
    except FormatError as error:
        raise FormatError(f"{where}, {PEFT}: {error}") from None
    selected = [a for a in adapters if adapter in (None, a.name) and prefix in (None, a.prefix)]
    listed = ", ".join(f"{a.name!r} of the model {a.prefix!r}" for a in adapters)
    if not selected:
        raise FormatError(f"{where} has no adapter {adapter!r} of a model {prefix or 'any'!r}; it has {listed}")
    if len({a.prefix for a in selected}) > 1:
        raise FormatError(f"{where} has adapters of several models, {listed}: choose one with prefix")
    return selected


def _plan_weights(name: str, folder: str, adapter: Adapter, components: Mapping[str, Component]) -> OutputFile:
    """Return the plan of the file with an adapter's weights."""
    model = components.get("model", Component({}))
    names = adapter.names({**model.tensors, **model.aliases}.keys())
    if not any(".lora_" in name or name.startswith("lora_") for name in names):
        raise FormatError(f"checkpoint {folder!r} has no tensors of adapter {adapter.name!r} below {adapter.prefix!r}")
    keys = {peft_name: model.aliases.get(stored, stored) for peft_name, stored in names.items()}
    specs = {peft_name: model.tensors[key] for peft_name, key in keys.items()}
    tensors = [OutputTensor(name, spec.dtype, spec.shape, ("model", keys[name])) for name, spec in specs.items()]
    return plan_file(name, tensors, {"format": "pt"})
