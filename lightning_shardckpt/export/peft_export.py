"""Export adapters to a folder that ``PeftModel.from_pretrained`` loads, without torch and PEFT.

The folder has ``adapter_model.safetensors`` and ``adapter_config.json``, with the names that PEFT's own
``save_pretrained`` gives; the configuration was saved with the checkpoint. Memory does not grow with the adapters.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.safetensors_header import build_header
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, bytes_in
from lightning_shardckpt.state.documents import PEFT
from lightning_shardckpt.state.peft_names import Adapter, adapters_from_json
from lightning_shardckpt.storage.protocol import Outputs
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.text import progress
from lightning_shardckpt.transfer.file_filler import fill
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.regions import Region
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, WholeTensors

_log = logging.getLogger(__name__)
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DEFAULT = "default"
_ALIGNMENT = 8


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
    names inside it; a single one that was asked for is in ``output``. Each folder's configuration appears last.

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
        CorruptionError: naming file, tensor and rank of data that is not what was saved.
    """
    folder, output = file_path(checkpoint_folder), file_path(output)
    storage = StorageRouter(storage_options=storage_options)
    outputs = storage.outputs(output)
    with Checkpoint(storage, folder) as checkpoint:
        tensors, model = WholeTensors(checkpoint), checkpoint.root.components.get("model", Component({}))
        chosen = _chosen(checkpoint, adapter, prefix)
        at_top = {_DEFAULT} if adapter is None else {adapter}
        paths = [output if one.name in at_top else os.path.join(output, one.name) for one in chosen]
        files = [(path, one, _plan(folder, one, model)) for path, one in zip(paths, chosen, strict=True)]
        if outputs.kind(output) == "file" or outputs.contents(output).names:
            raise FileExistsError(f"the adapters need a folder that does not exist yet or is empty: {output}")
        with _removed_on_error(outputs, paths):
            for path, one, regions in files:
                _write(outputs, path, one, regions, tensors)
    return [path if is_url(path) else Path(path) for path in paths]


def _chosen(checkpoint: Checkpoint, adapter: str | None, prefix: str | None) -> list[Adapter]:
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


def _plan(folder: str, adapter: Adapter, model: Component) -> list[Region]:
    """The header of the file and all that follows."""
    names = adapter.names({**model.tensors, **model.aliases}.keys())
    if not any(".lora_" in name or name.startswith("lora_") for name in names):
        raise FormatError(f"checkpoint {folder!r} has no tensors of adapter {adapter.name!r} below {adapter.prefix!r}")
    keys = {name: model.aliases.get(stored, stored) for name, stored in names.items()}
    tensors = [(name, model.tensors[key].dtype, model.tensors[key].shape) for name, key in keys.items()]
    tensors.sort(key=lambda tensor: -DTYPE_BYTES[tensor[1]])  # so that all are aligned
    for name, dtype, _ in tensors:
        if dtype == "C128":
            raise FormatError(f"checkpoint {folder!r}: safetensors has no dtype {dtype} as {names[name]!r} has")
    header, begins = build_header(tensors, {"format": "pt"}, alignment=_ALIGNMENT)
    regions = [Region(0, len(header), 0, memoryview(header))]
    for (name, dtype, shape), begin in zip(tensors, begins, strict=True):
        if nbytes := bytes_in(shape, dtype):
            regions.append(Region(begin, nbytes, 0, ("model", keys[name])))
    return regions


@contextmanager
def _removed_on_error(outputs: Outputs, folders: list[str]) -> Iterator[None]:
    """The files of these folders, which had none, and the folders; an error inside is raised."""
    try:
        yield
    except BaseException:
        for folder in reversed(folders):
            outputs.discard(folder, (CONFIG, WEIGHTS))
        raise


def _write(outputs: Outputs, folder: str, adapter: Adapter, regions: list[Region], tensors: StoredTensors) -> None:
    """The weights, then the configuration, without which PEFT does not take a folder for an adapter."""
    config = adapter.config.encode()
    for name, of in ((WEIGHTS, regions), (CONFIG, [Region(0, len(config), 0, memoryview(config))])):
        nbytes = sum(region.nbytes for region in of)
        path = os.path.join(folder, name)
        with outputs.file(path, nbytes, overwrite=False) as (file, notes), progress(nbytes) as advance:
            fill(file, of, tensors, None, advance)
        for note in notes:
            _log.warning(note)
