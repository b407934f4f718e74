"""Weights in files of safetensors, and directories of Hugging Face, as sources. Only files of torch.save need torch.

A directory has one file of weights, or several that an index names, or an adapter of PEFT. Its older files of
``torch.save`` are read as such.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from functools import partial

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.format.safetensors_header import SHARDING_INFO, parse_header, read_header
from lightning_shardckpt.format.value_checks import check_file_name, check_text, parse_json, shown
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, close_on_error, list_tensors
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

    def existing(names: tuple[str, ...]) -> list[str]:
        return [name for name in names if os.path.lexists(os.path.join(path, name))][:1]

    return existing(_WEIGHTS) or sorted(filter(_INDEX.fullmatch, os.listdir(path))) or existing(_ADAPTERS)


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory, an index file, or a file of safetensors; files of ``torch.save`` always with ``weights_only``.
    """
    folder, found = path if os.path.isdir(path) else os.path.dirname(os.path.abspath(path)), _weights_in(path)
    if len(found) > 1:
        raise FormatError(f"it holds {' and '.join(found)}. Give the path of one of these files.")
    name = found[0]
    weight_map = _weight_map_in(folder, name) if _INDEX.fullmatch(name) else {}
    files = list(dict.fromkeys(weight_map.values())) or [name]
    if not (name.startswith(SAFE) if weight_map else is_safetensors(os.path.join(folder, name))):
        from lightning_shardckpt.sources.torch_save import open_path as open_torch_files  # imports torch

        return open_torch_files(folder, files=files)
    tensors: dict[str, ForeignTensor] = {}
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        for file in files:
            for key, tensor in _tensors_of(reader, file).items():
                is_wanted = weight_map.get(key, file) == file
                if is_wanted and tensors.setdefault(clean_fqn(key), tensor) is not tensor:
                    raise FormatError(f"two tensors are called {shown(clean_fqn(key))}")
        lost = [(key, file) for key, file in weight_map.items() if clean_fqn(key) not in tensors]
        if lost:
            listed = list_some([f"{shown(key)} should be in {file}" for key, file in lost], 5)
            raise CorruptionError(f"not all tensors of the index are in the files\n  {listed}")
        table = {"model": list_tensors(reader, tensors)}
        return Source(path, reader, table, lambda role, rank=0: None, lambda tensor: {}, has_weights_only=True)


def _weight_map_in(path: str, index: str) -> dict[str, str]:
    """Return the file of each tensor, from the index."""
    with closing(LocalReader(path, follow_links=True)) as reader:
        content = parse_json(read_all(reader, index), f"file {index}")
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError(f"file {index} has no weight_map that names files")
    return {check_text(key): check_file_name(name) for key, name in weight_map.items()}


def _tensors_of(reader: Reader, name: str) -> dict[str, ForeignTensor]:
    """Return the tensors of a safetensors file by name."""
    where = f"file {name}"
    try:
        content = read_header(partial(reader.read_into, name), reader.size(name))
    except FileNotFoundError:
        raise CorruptionError(f"{where}: the file is missing") from None
    except EOFError as error:
        raise CorruptionError(f"{where}: not a safetensors file, or cut off: {error}") from None
    header = parse_header(content, where)
    if SHARDING_INFO in header.metadata:
        raise FormatError(f"{where}: it has one rank's slices of tensors, which torch's HuggingFaceStorageReader reads")
    return {
        key: ForeignTensor(tensor.dtype, tensor.shape, (ForeignBox(Box.whole(tensor.shape), name, tensor.begin),))
        for key, tensor in header.tensors.items()
    }
