"""Directories of Hugging Face's ``save_pretrained``, and single safetensors files, as sources of weights.

The weights are in ``model.safetensors``, or in the files of ``model.safetensors.index.json``; in older directories in
``pytorch_model.bin`` or the files of its index. If both exist, safetensors files are read, as in transformers.
"""

from __future__ import annotations

import os

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import check_file_name, check_text, shown
from lightning_shardckpt.sources.detect import BIN, HUB_WEIGHTS, INDEX, SAFE, only_index
from lightning_shardckpt.sources.foreign_source import (
    ForeignSource,
    ForeignTensor,
    ForeignTensors,
    close_on_error,
    tensors_of,
)
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.torch_save import TorchFileSource
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import count_text

_LISTED = 5


def open_file(path: str) -> Source:
    """Open a single safetensors file."""
    folder, name = os.path.split(os.path.abspath(path))
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        return _safetensors_source(path, reader, {name: tensors_of(reader, name, folder)}, {})


def open_directory(path: str, index: str | None = None) -> Source:
    """Open a directory with weights; ``index`` is the name of an index file, if it has several."""
    single, index = _choose(path) if index is None else (None, index)
    with close_on_error(LocalReader(path, follow_links=True)) as reader:
        weight_map = {} if single is not None else _weight_map_in(reader, path, index)
        names = [single] if single is not None else list(dict.fromkeys(weight_map.values()))
        if index.startswith(SAFE):
            files = {name: tensors_of(reader, name, path) for name in names}
            return _safetensors_source(path, reader, files, weight_map)
    reader.close()
    missing = [name for name in names if not os.path.isfile(os.path.join(path, name))]
    if missing:
        raise CorruptionError(f"{path!r}, file {missing[0]}: the file is missing, as named in {index}")
    return TorchFileSource(path, files=names)


def _choose(path: str) -> tuple[str | None, str]:
    """Return the name of the single file, if it exists, and of its index."""
    existing = {name for name in HUB_WEIGHTS if os.path.lexists(os.path.join(path, name))}
    for name in (SAFE, BIN):
        if {name, name + INDEX} <= existing:
            raise FormatError(
                f"{path!r} holds two versions of the weights: {name}, and those of {name + INDEX}. Remove one, or "
                "give the path of the file."
            )
        if existing & {name, name + INDEX}:
            return (name if name in existing else None), name + INDEX
    return None, only_index(path)


def _weight_map_in(reader: Reader, path: str, index: str) -> dict[str, str]:
    """Return the file of each tensor, from the index."""
    where = f"{path!r}, file {index}"
    try:
        content = parse_json(read_all(reader, index), where)
    except FileNotFoundError:
        raise CorruptionError(f"{where}: a link to nothing") from None
    except FormatError:
        raise
    except ValueError as error:  # too long
        raise FormatError(f"{where}: {error}") from None
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"{where}: it has no weight_map that names files")
    try:
        return {check_text(key): check_file_name(name) for key, name in weight_map.items()}
    except FormatError as error:
        raise FormatError(f"{where}: {error}; files must be in the same directory") from None


def _safetensors_source(
    path: str, reader: Reader, files: dict[str, dict[str, ForeignTensor]], weight_map: dict[str, str]
) -> ForeignSource:
    """Return all tensors of the files; the index chooses among several of the same name."""
    tensors: dict[str, ForeignTensor] = {}
    for name, in_file in files.items():
        for key, tensor in in_file.items():
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
