"""Weights in files of safetensors, and directories of Hugging Face, as sources. Only files of torch.save need torch.

A directory has one file of weights, or several that an index names, or an adapter of PEFT.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.format.safetensors_header import SHARDING_INFO, parse_header, read_header
from lightning_shardckpt.format.value_checks import check_file_name, parse_json, shown
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, list_tensors
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import list_some

SAFE, BIN, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
_WEIGHTS = (SAFE, SAFE + INDEX, BIN, BIN + INDEX)  # the preferred first, as in transformers
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")  # of PEFT, the preferred first
_INDEX = re.compile(rf"({re.escape(SAFE)}|{re.escape(BIN)})\.index(\..+)?\.json")  # such as ….index.ema.json


def find(path: str) -> str | None:
    """Return the path if it is a directory of Hugging Face, the index of one, or a file of safetensors; else None."""
    return path if _weights_in(path) else None


def is_safetensors(path: str) -> bool:
    """Return whether a path is a safetensors file, by its name or its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return path.endswith(".safetensors") or (start[8:] == b"{" and start[4:8] == bytes(4))


def _weights_in(path: str) -> list[str]:
    """Return the name of the file or of the index at a path; several of the same rank are ambiguous."""
    if not os.path.isdir(path):
        return [os.path.basename(path)] if _INDEX.fullmatch(os.path.basename(path)) or is_safetensors(path) else []
    names = os.listdir(path)
    indexes = sorted(filter(_INDEX.fullmatch, names))
    return [n for n in _WEIGHTS if n in names][:1] or indexes or [n for n in _ADAPTERS if n in names][:1]


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory, an index or a file of safetensors; files of ``torch.save`` always with ``weights_only``."""
    folder, found = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)), _weights_in(path)
    if len(found) > 1:
        raise FormatError(f"it holds {' and '.join(found)}. Give the path of one of these files.")
    (name,), reader = found, LocalReader(folder, follow_links=True)
    weight_map: Any = {}
    if _INDEX.fullmatch(name):
        content = parse_json(read_all(reader, name), f"file {name}")
        weight_map = content.get("weight_map") if isinstance(content, dict) else {}
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"file {name} has no weight_map that names files")
    files = list(dict.fromkeys(map(check_file_name, weight_map.values()))) or [name]
    if not (name.startswith(SAFE) if weight_map else is_safetensors(os.path.join(folder, name))):
        from lightning_shardckpt.sources.torch_save import open_path as open_torch_files  # imports torch

        return open_torch_files(folder, files=files)
    tensors: dict[str, ForeignTensor] = {}
    for file in files:
        for key, tensor in _tensors_of(reader, file).items():
            is_wanted = weight_map.get(key, file) == file
            if is_wanted and tensors.setdefault(clean_fqn(key), tensor) is not tensor:
                raise FormatError(f"two tensors are called {shown(clean_fqn(key))}")
    if lost := [f"{shown(key)} should be in {of}" for key, of in weight_map.items() if clean_fqn(key) not in tensors]:
        raise CorruptionError(f"not all tensors of the index are in the files\n  {list_some(lost, 5)}")
    table = {"model": list_tensors(reader, tensors)}
    return Source(path, reader, table, lambda role, rank=0: None, lambda tensor: {}, has_weights_only=True)


def _tensors_of(reader: Reader, name: str) -> dict[str, ForeignTensor]:
    """Return the tensors of a safetensors file by name."""
    where = f"file {name}"
    try:
        content = read_header(partial(reader.read_into, name), reader.size(name))
    except FileNotFoundError:
        raise CorruptionError(f"{where}: the file is missing") from None
    except EOFError as error:
        raise CorruptionError(f"{where}: not a safetensors file, or cut off: {error}") from None
    tensors, metadata = parse_header(content, where)
    if SHARDING_INFO in metadata:
        raise FormatError(f"{where}: it has one rank's slices of tensors, which torch's HuggingFaceStorageReader reads")
    return {
        key: ForeignTensor(dtype, shape, (ForeignBox(Box.whole(shape), name, begin),))
        for key, (dtype, shape, begin, _) in tensors.items()
    }
