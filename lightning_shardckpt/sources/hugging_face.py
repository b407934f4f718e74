"""Weights in files of safetensors, and directories of Hugging Face, as sources.

A directory has one file of weights, or several that an index names, or files with the slices of each rank, or an
adapter of PEFT. Its older files of ``torch.save`` are read as such.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import closing

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import check_file_name, check_text, parse_json, shown
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
    close_on_error,
    foreign_source,
    tensors_of,
)
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.torch_save import open_path as open_torch_files
from lightning_shardckpt.storage.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import read_all
from lightning_shardckpt.system.text import list_some


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open a directory, an index file, or a file of safetensors; files of ``torch.save`` always with ``weights_only``.
    """
    folder, name = (path, _choose(path)) if os.path.isdir(path) else os.path.split(os.path.abspath(path))
    if name is None:
        return _open(path, folder, files_of_slices(folder), {}, are_slices=True)
    weight_map = _weight_map_in(folder, name) if is_index_name(name) else {}
    names = list(dict.fromkeys(weight_map.values())) or [name]
    if name.startswith(SAFE) if weight_map else is_safetensors(os.path.join(folder, name)):
        return _open(path, folder, names, weight_map, are_slices=False)
    if missing := [one for one in names if not os.path.isfile(os.path.join(folder, one))]:
        raise CorruptionError(f"{path!r}, file {missing[0]}: the file is missing, as named in {name}")
    return open_torch_files(folder, files=names)


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


def _open(
    path: str, folder: str, names: Sequence[str], weight_map: Mapping[str, str], *, are_slices: bool
) -> Source:
    """Open files of safetensors.

    Args:
        path: for messages.
        folder: of the files.
        names: of the files.
        weight_map: the file of each tensor, which chooses among several of the same name.
        are_slices: whether each file has a rank's slices, at offsets in its header.
    """
    parts: dict[str, list[tuple[str, ForeignTensor]]] = {}
    with close_on_error(LocalReader(folder, follow_links=True)) as reader:
        for file in names:
            for key, part in tensors_of(reader, file, folder).items():
                if weight_map.get(key, file) == file:
                    parts.setdefault(clean_fqn(key), []).append((f"{shown(key)} in {file}", part))
        lost = [f"{shown(key)} should be in {file}" for key, file in weight_map.items() if clean_fqn(key) not in parts]
        if lost:
            raise CorruptionError(f"{path!r}: not all tensors of the index are in the files\n  {list_some(lost, 5)}")
        tensors = {name: _joined(of_name, path, are_slices=are_slices) for name, of_name in parts.items()}
        return foreign_source(path, reader, {"model": tensors})


def _joined(parts: Sequence[tuple[str, ForeignTensor]], path: str, *, are_slices: bool) -> ForeignTensor:
    """Return the tensor of parts, each with its name and file; only slices have several parts."""
    (where, first), *others = parts
    if not are_slices and any(first.boxes[0].box.start):
        raise FormatError(f"{path!r} has one rank's slices of tensors: give the path of a directory with all files")
    for other_where, other in others:
        if not are_slices:
            raise FormatError(f"{path!r}: {where} and {other_where} are two tensors of that name")
        if (other.dtype, len(other.shape)) != (first.dtype, len(first.shape)):
            raise FormatError(f"{path!r}: {other_where} has another dtype or number of dims than {where}")
    shape = tuple(map(max, zip(*(part.shape for _, part in parts), strict=True)))
    return ForeignTensor(first.dtype, shape, tuple(box for _, part in parts for box in part.boxes))


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
