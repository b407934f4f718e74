"""A directory as Hugging Face's ``save_pretrained`` writes it, or a file of safetensors, as a source of weights.

They are in ``model.safetensors``, or in the files that ``model.safetensors.index.json`` names; in older directories in
``pytorch_model.bin`` or the files of its index. Where both kinds are there, safetensors are taken, as transformers
does.
"""

from __future__ import annotations

import os

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import check_file_name, check_text, shown
from lightning_shardckpt.sources.foreign_source import (
    ForeignSource,
    ForeignTensor,
    ForeignTensors,
    close_on_error,
    tensors_of,
)
from lightning_shardckpt.sources.paths import BIN, HUB_WEIGHTS, INDEX, SAFE, only_index
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.torch_save import TorchFileSource
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import count_text

_LISTED = 5


def open_file(path: str) -> Source:
    """A single file of safetensors."""
    folder, name = os.path.split(os.path.abspath(path))
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        return _safe(path, reader, {name: tensors_of(reader, name, folder)}, {})


def open_directory(path: str, index: str | None = None) -> Source:
    """A directory with weights; of several variants in one, that of an index.

    Raises:
        FormatError: if it holds two versions of them, or an index says what cannot be.
        CorruptionError: if a file that the index names is missing, truncated, or has not what the index says.
    """
    single, index = _choose(path) if index is None else (None, index)
    with close_on_error(LocalReader(path, follow_links=True)) as reader:
        weight_map = {} if single is not None else _weight_map_in(reader, path, index)
        names = [single] if single is not None else list(dict.fromkeys(weight_map.values()))
        if index.startswith(SAFE):
            return _safe(path, reader, {name: tensors_of(reader, name, path) for name in names}, weight_map)
    reader.close()
    missing = [name for name in names if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise CorruptionError(f"{path!r}, file {missing[0]}: the file is missing, as named in {index}")
    return TorchFileSource(path, files=names)


def _choose(path: str) -> tuple[str | None, str]:
    """The single file if there is one, and the name of what would be its index."""
    there = {name for name in HUB_WEIGHTS if os.path.lexists(os.path.join(path, name))}
    for name in (SAFE, BIN):
        if {name, name + INDEX} <= there:
            raise FormatError(
                f"{path!r} holds two versions of the weights: {name}, and those of {name + INDEX}. Remove one, or "
                "give the path of the file."
            )
        if there & {name, name + INDEX}:
            return (name if name in there else None), name + INDEX
    return None, only_index(path)


def _weight_map_in(reader: Reader, path: str, index: str) -> dict[str, str]:
    """Return which file of the directory has which tensor.

    Raises:
        FormatError: if the index is malformed or too long.
        CorruptionError: if it is missing.
    """
    where = f"{path!r}, file {index}"
    try:
        found = parse_json(read_all(reader, index), where)
    except FileNotFoundError:
        raise CorruptionError(f"{where}: a link to nothing") from None
    except FormatError:
        raise
    except ValueError as error:  # too long
        raise FormatError(f"{where}: {error}") from None
    weight_map = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{where}: it has no weight_map that names files")
    try:
        return {check_text(key): check_file_name(name) for key, name in weight_map.items()}
    except FormatError as error:
        raise FormatError(f"{where}: {error}; files must be in the same directory") from None


def _safe(
    path: str, reader: Reader, files: dict[str, dict[str, ForeignTensor]], weight_map: dict[str, str]
) -> ForeignSource:
    """Return all tensors of the files; of those that are in several, the one that the index means."""
    tensors: dict[str, ForeignTensor] = {}
    for name, found in files.items():
        for key, tensor in found.items():
            if weight_map.get(key, name) != name:
                continue
            if key in tensors:
                raise FormatError(f"{path!r}: {shown(key)} is in {tensors[key].boxes[0].file} and in {name}")
            tensors[key] = tensor
    lost = [key for key in weight_map if key not in tensors]
    if lost:
        listed = "\n  ".join(f"{shown(key)} should be in {weight_map[key]}" for key in lost[:_LISTED])
        raise CorruptionError(f"{path!r}: {count_text(len(lost), 'tensor')} of the index not in the files\n  {listed}")
    return ForeignSource(ForeignTensors(path, reader, {"model": tensors}))
