"""Weights that each rank of ColossalAI wrote for itself, as a source: its distributed checkpoint IO.

It was never released. ``pytorch_model-meta-dist-<n>.json``, or ``….index.json``, says for each parameter of a rank
where its block begins in the whole tensor (``offsets``), how long it is (``lengths``), and in which file it is. Buffers
are in the same files, without an entry: a rank has them whole. Optimizers were not saved so.

A file with nothing but buffers is named nowhere, so such buffers are missing here: a file that an earlier save left
would look the same.

Source: ``colossalai/checkpoint_io/distributed_checkpoint_utils.py`` on its branch, from January to February 2025; its
versions differ in the names of the files and in whether ``file`` has the path of the directory in it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, check_file_name, check_shape, check_text, shown
from lightning_shardckpt.sources.foreign_safetensors import tensors_of
from lightning_shardckpt.sources.foreign_source import ForeignSource, closed_on_error
from lightning_shardckpt.sources.foreign_tensors import ForeignBox, ForeignTensor, ForeignTensors
from lightning_shardckpt.sources.huggingface import json_in
from lightning_shardckpt.sources.paths import rank_indexes
from lightning_shardckpt.sources.torch_pickle import loaded
from lightning_shardckpt.sources.torch_save import boxes_in, mapped, mappings
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.tensor_bytes import dtype_name
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader

_VERSION = "1.0"


@dataclass(frozen=True, slots=True)
class _Block:
    """An index's entry for a parameter: its block, the whole shape, and the file."""

    box: Box
    shape: Shape
    file: str


_Held: TypeAlias = dict[str, Any]
"""What is in a file by name: a ``ForeignTensor``, or a value as JSON."""


def open_ranks(path: str) -> ForeignSource:
    """The weights in such a directory.

    Raises:
        FormatError: if an index says what cannot be, or blocks leave a gap, as they do if one rank's index is missing.
        CorruptionError: if a file is missing or too short.
    """
    with closed_on_error(LocalReader(path, follow_links=True)) as reader:
        files: dict[str, _Held] = {}
        blocks: dict[str, list[_Block]] = {}
        for index in rank_indexes(path):
            for name, block in _blocks(reader, path, index).items():
                blocks.setdefault(name, []).append(block)
                if block.file not in files:
                    files[block.file] = _held(reader, path, block.file)
        tensors = {name: _put_together(path, name, found, files) for name, found in blocks.items()}
        buffers, values = _others(reader, path, files, blocks.keys())
        return ForeignSource(ForeignTensors(path, reader, {"model": tensors | buffers}), {"model": values})


def _blocks(reader: Reader, path: str, index: str) -> dict[str, _Block]:
    """The parameters of one rank."""
    found, where = json_in(reader, path, index), f"{path!r}, file {index}"
    version = found.get("checkpoint_version") if isinstance(found, dict) else None
    if version != _VERSION:
        raise FormatError(f"{where}: checkpoint_version {shown(version)}, expected {_VERSION!r}")
    try:
        return {check_text(name): _block(entry) for name, entry in found["metadata"].items()}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: it describes a parameter wrongly: {shown(error)}") from None


def _block(entry: dict[str, Any]) -> _Block:
    start, lengths, shape = (check_shape(entry[key]) for key in ("offsets", "lengths", "global_shape"))
    box = Box(start, tuple(a + b for a, b in zip(start, lengths, strict=True)))
    if len(shape) != len(start) or any(stop > length for stop, length in zip(box.stop, shape, strict=True)):
        raise FormatError(f"offsets {start} and lengths {lengths} leave the global_shape {shape}")
    return _Block(box, shape, check_file_name(os.path.basename(entry["file"])))


def _held(reader: Reader, path: str, file: str) -> _Held:
    if file.endswith(".safetensors"):
        return dict(tensors_of(reader, file, path))
    if not os.path.isfile(os.path.join(path, file)):
        raise CorruptionError(f"{path!r}, file {file}: the file is missing, as named in an index")
    state = loaded(lambda: mapped(os.path.join(path, file)), lambda said: FormatError(f"{path!r}, file {file}: {said}"))
    if not isinstance(state, dict):
        raise FormatError(f"{path!r}, file {file} holds a {type(state).__name__}, not a dict of tensors")
    maps, found = list(mappings(path, file)), dict[str, Any]()
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or is_extra_state(name):
            found[name] = encode_small(value, f"state_dict/{name}")
            continue
        boxes = boxes_in(value, maps)
        if boxes is None:
            raise FormatError(
                f"{path!r}, file {file}: {shown(name)} of shape {tuple(value.shape)} with strides {value.stride()} is "
                "not there in one piece. Write the file anew with contiguous tensors: load it with torch.load"
            )
        found[name] = ForeignTensor(dtype_name(value, name), tuple(value.shape), boxes)
    return found


def _put_together(path: str, name: str, blocks: list[_Block], files: Mapping[str, _Held]) -> ForeignTensor:
    """A whole parameter; of blocks that several ranks wrote, the first one's."""
    whole, boxes = blocks[0], dict[Shape, ForeignBox]()
    dtype = ""
    for block in blocks:
        where, lengths = f"{path!r}, file {block.file}: {shown(name)}", block.box.shape
        held = files[block.file].get(name)
        if not isinstance(held, ForeignTensor):
            raise CorruptionError(f"{where} is not there, as named in an index")
        if held.shape != lengths or held.dtype != (dtype or held.dtype) or block.shape != whole.shape:
            raise FormatError(
                f"{where} is {held.dtype} {held.shape} of {block.shape}, expected {dtype or held.dtype} {lengths} of "
                f"{whole.shape}. If it is padded, save it with gather_dtensor=True instead"
            )
        dtype = held.dtype
        if prod(lengths):
            boxes.setdefault(block.box.start, ForeignBox(block.box, block.file, held.boxes[0].begin))
    return ForeignTensor(dtype, whole.shape, tuple(boxes.values()))


def _others(
    reader: Reader, path: str, files: Mapping[str, _Held], known: Collection[str]
) -> tuple[dict[str, ForeignTensor], dict[str, Any]]:
    """Return what is in the files but no parameter: buffers and other values, the same wherever they are."""
    buffers, values = dict[str, ForeignTensor](), dict[str, Any]()
    for file, held in files.items():
        for name, value in held.items():
            if name in known:
                continue
            first = buffers.get(name, values.get(name, value))
            if value is not first and not _same(reader, first, value):
                raise FormatError(f"{path!r}: {shown(name)}, no parameter, is not the same in file {file}")
            (buffers if isinstance(value, ForeignTensor) else values).setdefault(name, value)
    return buffers, values


def _same(reader: Reader, a: Any, b: Any) -> bool:
    if not isinstance(a, ForeignTensor) or not isinstance(b, ForeignTensor):
        return bool(a == b)
    nbytes, contents = prod(a.shape) * DTYPE_BYTES[a.dtype], []
    if (a.dtype, a.shape) != (b.dtype, b.shape) or not nbytes:
        return (a.dtype, a.shape) == (b.dtype, b.shape)
    for tensor in (a, b):
        content, box = bytearray(nbytes), tensor.boxes[0]
        try:
            reader.read_into(box.file, box.begin, memoryview(content))
        except EOFError as error:
            raise CorruptionError(f"file {box.file}: {error}") from None
        contents.append(content)
    return contents[0] == contents[1]
