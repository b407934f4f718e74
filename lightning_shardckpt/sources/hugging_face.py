"""Weights in files of safetensors, and directories of Hugging Face, as sources.

A directory has one file of weights, or several that an index names, or files with the slices of each rank, or an
adapter of PEFT. Its older files of ``torch.save`` are read as such.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import check_file_name, check_text, shown
from lightning_shardckpt.sources.detect import (
    ADAPTERS,
    BIN,
    INDEX,
    SAFE,
    files_of_slices,
    indexes,
    is_index_name,
    is_safetensors,
)
from lightning_shardckpt.sources.foreign_source import (
    ForeignTensor,
    ForeignTensors,
    close_on_error,
    foreign_source,
    tensors_of,
)
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.torch_save import open_path as open_torch_files
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.text import count_text

_LISTED = 5


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory, an index file, or a file of safetensors; files of ``torch.save`` always with ``weights_only``.
    """
    if not os.path.isdir(path):
        return _open(path, *os.path.split(os.path.abspath(path)))
    if (chosen := _choose(path)) is not None:
        return _open(path, path, chosen)
    return _open_slices(path, files_of_slices(path))


def _choose(path: str) -> str | None:
    """Return the name of the file or of the index of a directory; None if it has slices."""
    for name in (SAFE, BIN):
        existing = [one for one in (name, name + INDEX) if os.path.lexists(os.path.join(path, one))]
        if len(existing) == 2:
            raise FormatError(
                f"{path!r} holds two versions of the weights: {name}, and the files of {name + INDEX}. Remove one, or "
                "give the path of the file."
            )
        if existing:
            return existing[0]
    found = indexes(path)
    if len(found) > 1:
        raise FormatError(f"{path!r} holds {' and '.join(found)}. Give the path of one of these files.")
    if not found and not files_of_slices(path):
        found = [name for name in ADAPTERS if os.path.isfile(os.path.join(path, name))]
    return found[0] if found else None


def _open(path: str, folder: str, name: str) -> Source:
    """Open a file of weights, or the files that an index names; messages name ``path``."""
    if is_index_name(name):
        weight_map = _weight_map_in(folder, name)
        names, is_safe = list(dict.fromkeys(weight_map.values())), name.startswith(SAFE)
    else:
        weight_map, names, is_safe = {}, [name], is_safetensors(os.path.join(folder, name))
    missing = [one for one in names if not os.path.isfile(os.path.join(folder, one))]
    if not is_safe and missing:
        raise CorruptionError(f"{path!r}, file {missing[0]}: the file is missing, as named in {name}")
    if not is_safe:
        return open_torch_files(folder, files=names)
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        files = {name: tensors_of(reader, name, folder) for name in names}
        if any(any(box.start) for of in files.values() for tensor in of.values() for box, _, _ in tensor.boxes):
            raise FormatError(f"{path!r} has one rank's slices of tensors: give the path of a directory with all files")
        return _weights(path, reader, _pick(path, files, weight_map))


def _pick(
    path: str, files: Mapping[str, Mapping[str, ForeignTensor]], weight_map: Mapping[str, str]
) -> dict[str, ForeignTensor]:
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
    return tensors


def _open_slices(path: str, names: list[str]) -> Source:
    """Open a directory in which each file has a rank's slices, at offsets in its header."""
    tensors: dict[str, ForeignTensor] = {}
    with close_on_error(LocalReader(path, follow_links=True)) as reader:
        for name in names:
            for key, part in tensors_of(reader, name, path).items():
                first = tensors.get(key, part)
                if (first.dtype, len(first.shape)) != (part.dtype, len(part.shape)):
                    raise FormatError(f"{path!r}: {shown(key)} has another dtype or number of dims in {name}")
                shape = tuple(map(max, first.shape, part.shape))
                boxes = part.boxes if first is part else first.boxes + part.boxes
                tensors[key] = ForeignTensor(part.dtype, shape, boxes)
        return _weights(path, reader, tensors)


def _weight_map_in(path: str, index: str) -> dict[str, str]:
    """Return the file of each tensor, from the index."""
    where = f"{path!r}, file {index}"
    try:
        with closing(LocalReader(path, follow_links=True)) as reader:
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


def _weights(path: str, reader: Reader, tensors: dict[str, ForeignTensor]) -> Source:
    """Return a model's tensors under their names without the components that wrappers such as torch.compile add."""
    named = {clean_fqn(key): tensor for key, tensor in tensors.items()}
    if len(named) < len(tensors):
        again = next(key for key in tensors if tensors[key] is not named[clean_fqn(key)])
        raise FormatError(f"{path!r}: {shown(again)} and {shown(clean_fqn(again))} are two tensors of that name")
    return foreign_source(ForeignTensors(path, reader, {"model": named}))
