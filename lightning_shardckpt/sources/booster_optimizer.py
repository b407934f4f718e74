"""Optimizers that ColossalAI's Booster saved, as sources: directories with an index, and files of asynchronous saves.

- ``pytorch_optim.bin.index.json`` says which file has the state of which parameter, and in which file the param groups
  are; all are files of ``torch.save``. With a prefix ``ema`` it is ``pytorch_optim.bin.index.ema.json``.
- ``optimizer.safetensors.index.json``, of asynchronous saves: tensors have names such as ``state-3-exp_avg``, before
  2025 ``state.3.exp_avg``; what is no tensor is a pickle in a tensor of bytes, and named in the header.

Parameters are numbered in the order of the param groups, as torch does; FSDP's have their names. A file of
``torch.save``, of ``shard=False``, is read as any other, by ``torch_save``.

Source: ``colossalai/checkpoint_io`` and ``colossalai/utils/safetensors.py``, until 0.5.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from math import prod
from typing import Any, TypeAlias

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.strict_json import parse_json
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, check_file_name, shown
from lightning_shardckpt.sources.foreign_source import (
    ForeignSource,
    ForeignTensor,
    ForeignTensors,
    closed_on_error,
    metadata_of,
    tensors_of,
)
from lightning_shardckpt.sources.huggingface import json_in, weight_map_in
from lightning_shardckpt.sources.paths import OPTIMIZER_BIN, OPTIMIZERS, only_index
from lightning_shardckpt.sources.safe_unpickler import unpickle
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.torch_save import CheckpointAndWeights, TorchFileSource, mapped
from lightning_shardckpt.state.json_tree import tensor_from_bytes
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.system.text import count_text

_PICKLED, _GROUPS = "non_tensor_keys", "param_groups"
_SMALL_BYTES = 64 << 20  # what is no tensor, and tensors without dims
_LISTED = 5


def open_optimizer(path: str, weights_only: bool = True, index: str | None = None) -> Source:
    """An optimizer's directory; of several variants in one, that of an index.

    Raises:
        FormatError: if it says what cannot be, or holds several.
        CorruptionError: if a file is missing, or has not what the index says.
    """
    index = only_index(path, OPTIMIZERS) if index is None else index
    with closed_on_error(LocalReader(path, follow_links=True)) as reader:
        files = weight_map_in(reader, path, index, may_be_empty=True)  # SGD has no state
        found = json_in(reader, path, index).get("metadata")
        named = found.get(_GROUPS) if isinstance(found, dict) else None
        if named is None:
            raise FormatError(f"{path!r}, file {index}: its metadata names no file with param_groups")
        groups = os.path.basename(check_file_name(named))
        missing = [n for n in (*dict.fromkeys(files.values()), groups) if not os.path.isfile(os.path.join(path, n))]
        if missing:
            raise CorruptionError(f"{path!r}, file {missing[0]}: the file is missing, as named in {index}")
        if not index.startswith(OPTIMIZER_BIN):
            states = _states(reader, path, dict.fromkeys(files.values()))
            _check_complete(path, index, files, {str(param): names for param, (names, _) in states.items()})
            return _source(path, reader, states, mapped(os.path.join(path, groups), weights_only))
    reader.close()
    return TorchFileSource(path, weights_only, [*dict.fromkeys(files.values()), groups], _parts_of(index, files))


def is_optimizer_file(path: str) -> bool:
    """Return whether a file of safetensors is an optimizer of an asynchronous save that was not sharded."""
    folder, name = os.path.split(os.path.abspath(path))
    with closing(LocalReader(folder, follow_links=True)) as reader:
        return _GROUPS in _pickled(reader, folder, name)


def open_optimizer_file(path: str) -> Source:
    """Open an optimizer of an asynchronous save that was not sharded, as a source."""
    folder, name = os.path.split(os.path.abspath(path))
    with closed_on_error(LocalReader(folder, follow_links=True)) as reader:
        groups = _value(reader, folder, tensors_of(reader, name, folder)[_GROUPS], _GROUPS, pickled=True)
        return _source(path, reader, _states(reader, folder, {name: None}), groups)


# ── files of torch.save ───────────────────────────────────────────────────────────────────────────────────────────


def _parts_of(index: str, files: Mapping[str, str]) -> Any:
    """Return the function that puts the contents of the files together, see ``TorchFileSource``."""

    def parts(found: list[Any], path: str) -> CheckpointAndWeights:
        *shards, groups = found
        state: dict[Any, Any] = {}
        for name, shard in zip(dict.fromkeys(files.values()), shards, strict=True):
            if not isinstance(shard, dict) or not all(isinstance(entry, dict) for entry in shard.values()):
                raise FormatError(f"{path!r}, file {name}: no dict of optimizer state by parameter")
            state |= {_param(str(key)): entry for key, entry in shard.items() if files.get(str(key)) == name}
        _check_complete(path, index, files, {str(key): entry for key, entry in state.items()})
        return {"optimizer_states": [{"state": state, _GROUPS: _checked(groups, path)}]}, None

    return parts


def _param(key: str) -> int | str:
    """A parameter by number, or of FSDP by name."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key


def _checked(groups: Any, path: str) -> list[dict[str, Any]]:
    if isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups):
        return groups
    raise FormatError(f"{path!r}: its param groups are no list of dicts with params: {shown(groups)}")


def _check_complete(path: str, index: str, files: Mapping[str, str], found: Mapping[str, Any]) -> None:
    lost = [key for key in files if key not in found]
    if lost:
        listed = "\n  ".join(f"parameter {shown(key)} should be in {files[key]}" for key in lost[:_LISTED])
        count = count_text(len(lost), "parameter")
        raise CorruptionError(f"{path!r}: the state of {count} of {index} is not there\n  {listed}")


# ── files of safetensors ──────────────────────────────────────────────────────────────────────────────────────────

_States: TypeAlias = dict[int | str, tuple[dict[str, ForeignTensor], dict[str, Any]]]
"""By parameter: tensors, and what is small, by name of the state."""


def _states(reader: Reader, folder: str, files: Mapping[str, None]) -> _States:
    states: _States = {}
    for name in files:
        pickled = _pickled(reader, folder, name)
        for key, tensor in tensors_of(reader, name, folder).items():
            if key == _GROUPS and key in pickled:
                continue
            kind, mark, rest = key[:5], key[5:6], key[6:]
            param, _, state = rest.rpartition(mark or "-")
            if kind != "state" or mark not in ("-", ".") or not param or not state:
                raise FormatError(f"{folder!r}, file {name}: {shown(key)} is not what Booster calls a state")
            tensors, small = states.setdefault(_param(param), ({}, {}))
            if state in tensors or state in small:
                raise FormatError(f"{folder!r}, file {name}: {shown(key)} is there twice")
            if key in pickled or not tensor.shape:
                small[state] = _value(reader, folder, tensor, key, pickled=key in pickled)
            else:
                tensors[state] = tensor
    return states


def _pickled(reader: Reader, folder: str, name: str) -> frozenset[str]:
    """Return which entries are pickles."""
    said = metadata_of(reader, name, folder).get(_PICKLED, "[]")
    found = parse_json(said.encode(), f"{folder!r}, file {name}, {_PICKLED}") if isinstance(said, str) else None
    if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
        raise FormatError(f"{folder!r}, file {name}: {_PICKLED} is no list of names: {shown(said)}")
    return frozenset(found)


def _value(reader: Reader, folder: str, tensor: ForeignTensor, key: str, *, pickled: bool) -> Any:
    """A small tensor; or what is pickled in one of bytes, as data: nothing in it is executed."""
    (box,) = tensor.boxes
    nbytes = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
    where = f"{folder!r}, file {box.file}: {shown(key)}"
    if nbytes > _SMALL_BYTES or (pickled and tensor.dtype != "U8"):
        raise FormatError(f"{where} is {tensor.dtype} {tensor.shape}, where a small value is expected")
    content = bytearray(nbytes)
    try:
        reader.read_into(box.file, box.begin, memoryview(content))
    except EOFError as error:
        raise CorruptionError(f"{where}: {error}") from None
    if pickled:
        return unpickle(bytes(content), {}, where)
    return tensor_from_bytes(bytes(content), tensor.dtype, list(tensor.shape))


def _source(path: str, reader: Reader, states: _States, groups: Any) -> ForeignSource:
    small = {param: found for param, (_, found) in states.items()}
    _, document = optimizer_leaves([{"state": small, _GROUPS: _checked(groups, path)}])
    tensors = {
        f"0/{param if isinstance(param, str) else f'#{param}'}/{name}": tensor
        for param, (found, _) in states.items()
        for name, tensor in found.items()
    }
    return ForeignSource(ForeignTensors(path, reader, {"optimizer": tensors}), {"optimizer": document})
