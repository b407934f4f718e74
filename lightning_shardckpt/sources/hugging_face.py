"""Weights in files of safetensors, and directories of Hugging Face, as sources. Only files of torch.save need torch.

A directory has one file of weights, or several that an index names, or files with the slices of each rank, or an
adapter of PEFT. Its older files of ``torch.save`` are read as such.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.layout import Box
from lightning_shardckpt.format.safetensors_header import parse_header, read_header, starts_of
from lightning_shardckpt.format.value_checks import check_file_name, check_text, parse_json, shown
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, close_on_error, foreign_source
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import list_some

SAFE, BIN, INDEX = "model.safetensors", "pytorch_model.bin", ".index.json"
HUB_WEIGHTS = (SAFE, SAFE + INDEX, BIN, BIN + INDEX)
"""Names of weights in a Hugging Face directory, the preferred first, as in transformers."""
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
"""Names of the files of ``PeftModel.save_pretrained``, the preferred first."""

_INDEX = re.compile(rf"({re.escape(SAFE)}|{re.escape(BIN)})\.index(\..+)?\.json")  # such as ….index.ema.json
_SLICES = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")  # HuggingFaceStorageWriter, save_distributed


def matches(path: str) -> bool:
    """Return whether a path is a directory of Hugging Face, the index of one, or a file of safetensors."""
    if not os.path.isdir(path):
        return _INDEX.fullmatch(os.path.basename(path)) is not None or is_safetensors(path)
    known = any(os.path.lexists(os.path.join(path, name)) for name in (*HUB_WEIGHTS, *ADAPTERS))
    return known or bool(_named(path, _INDEX) or _named(path, _SLICES))


def _named(path: str, pattern: re.Pattern[str]) -> list[str]:
    return sorted(filter(pattern.fullmatch, os.listdir(path)))


def is_safetensors(path: str) -> bool:
    """Return whether a path is a safetensors file, by its name or its first bytes."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        start = file.read(9)
    return path.endswith(".safetensors") or (start[8:] == b"{" and start[4:8] == bytes(4))


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory, an index file, or a file of safetensors; files of ``torch.save`` always with ``weights_only``.
    """
    folder, name = (path, _choose(path)) if os.path.isdir(path) else os.path.split(os.path.abspath(path))
    if name is None:
        return _open(path, folder, _named(folder, _SLICES), {})
    if _SLICES.fullmatch(name):
        raise CheckpointNotFoundError(f"{path!r} has one rank's slices of tensors: give the path of its directory")
    weight_map = _weight_map_in(folder, name) if _INDEX.fullmatch(name) else {}
    names = list(dict.fromkeys(weight_map.values())) or [name]
    if name.startswith(SAFE) if weight_map else is_safetensors(os.path.join(folder, name)):
        return _open(path, folder, names, weight_map)
    from lightning_shardckpt.sources.torch_save import open_path as open_torch_files  # imports torch

    return open_torch_files(folder, files=names)


def _choose(path: str) -> str | None:
    """Return the name of the file or of the index of a directory; None if it has slices."""
    found = [name for name in HUB_WEIGHTS if os.path.lexists(os.path.join(path, name))][:1] or _named(path, _INDEX)
    if len(found) > 1:
        raise FormatError(f"{path!r} holds {' and '.join(found)}. Give the path of one of these files.")
    if not found and not _named(path, _SLICES):
        found = [name for name in ADAPTERS if os.path.isfile(os.path.join(path, name))]
    return found[0] if found else None


def _weight_map_in(path: str, index: str) -> dict[str, str]:
    """Return the file of each tensor, from the index."""
    try:
        with closing(LocalReader(path, follow_links=True)) as reader:
            content = parse_json(read_all(reader, index), f"file {index}")
        weight_map = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError(f"file {index} has no weight_map that names files")
        return {check_text(key): check_file_name(name) for key, name in weight_map.items()}
    except ValueError as error:
        raise FormatError(f"{path!r}: {error}") from None


def _open(path: str, folder: str, names: Sequence[str], weight_map: Mapping[str, str]) -> Source:
    """Open files of safetensors, each with tensors or with a rank's slices of them, at offsets in its header.

    Args:
        path: for messages.
        folder: of the files.
        names: of the files.
        weight_map: the file of each tensor, which chooses among several of the same name.
    """
    parts: dict[str, list[ForeignTensor]] = {}
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        for file in names:
            for key, part in _tensors_of(reader, file, f"{folder!r}, file {file}").items():
                if weight_map.get(key, file) == file:
                    parts.setdefault(clean_fqn(key), []).append(part)
        lost = [f"{shown(key)} should be in {file}" for key, file in weight_map.items() if clean_fqn(key) not in parts]
        if lost:
            raise CorruptionError(f"{path!r}: not all tensors of the index are in the files\n  {list_some(lost, 5)}")
        return foreign_source(path, reader, {"model": {name: _join(path, name, of) for name, of in parts.items()}})


def _join(path: str, name: str, parts: Sequence[ForeignTensor]) -> ForeignTensor:
    """Return the tensor of its slices."""
    if len({(part.dtype, len(part.shape)) for part in parts}) > 1:
        raise FormatError(f"{path!r}: slices of {shown(name)} differ in dtype or number of dims")
    shape = tuple(map(max, zip(*(part.shape for part in parts), strict=True)))
    return ForeignTensor(parts[0].dtype, shape, tuple(box for part in parts for box in part.boxes))


def _tensors_of(reader: Reader, name: str, where: str) -> dict[str, ForeignTensor]:
    """Return the tensors of a safetensors file by name; ``where`` is its path, for messages.

    A slice of a tensor is a tensor with one box, which does not begin at zeros or does not end at the tensor's end.
    """
    try:
        content = read_header(partial(reader.read_into, name), reader.size(name))
    except FileNotFoundError:
        raise CorruptionError(f"{where}: the file is missing") from None
    except EOFError as error:
        raise CorruptionError(f"{where}: not a safetensors file, or cut off: {error}") from None
    header, tensors = parse_header(content, where), dict[str, ForeignTensor]()
    for key, begin in starts_of(header, where).items():
        stored = header.tensors[key]
        box = Box.whole(stored.shape).shift(begin)
        tensors[key] = ForeignTensor(stored.dtype, box.stop, (ForeignBox(box, name, stored.begin),))
    return tensors
