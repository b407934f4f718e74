"""A directory of ``torch.distributed.checkpoint`` as a source: Lightning's sharded checkpoints, OLMo-core's and others.

The entries become the dicts that a file of ``torch.save`` would have, with stand-ins on the meta device for tensors, of
which only the chunks that a rank reads are loaded, one after another. No code is executed: ``.metadata`` is read as
data, all else by ``torch.load(weights_only=True)``; Lightning's ``meta.pt`` as well, unless the user passes
``weights_only=False``.

Entries have paths of a nested state dict, whose keys depend on the program:

- Lightning's Trainer: ``model`` (FSDPStrategy) or ``state_dict`` (ModelParallelStrategy), ``optimizer_0`` and so on;
- Lightning's Fabric: the user's names of the model and the optimizers;
- OLMo-core: ``model`` and ``optim``; torchtitan: the model's entries at the top, ``optimizer`` beside them.

An optimizer has ``param_groups``, as in the result of ``get_optimizer_state_dict``, nested or flattened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from copy import deepcopy
from threading import Lock
from typing import Any

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import bytes_in, shown
from lightning_shardckpt.sources.dcp_files import (
    Archive,
    DCPMetadata,
    KeyPath,
    load_archive,
    load_chunk,
    read_metadata,
    read_value,
)
from lightning_shardckpt.sources.detect import DCP_NAME, find_dcp_directory
from lightning_shardckpt.sources.foreign_source import ForeignTensor, close_on_error
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.torch_save import LoadedTensors, source_of_dicts
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.storage.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader

META = "meta.pt"
_MAX_SMALL_BYTES = 64 << 20  # of a tensor that is read as a value: a setting, or state without dims
_HELD_CHUNKS = 2  # two threads are rarely further apart
_MODELS = ("model", "state_dict")
_STATE, _GROUPS = "state", "param_groups"

Entries = Mapping[str, KeyPath]
"""Paths by flat key."""


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open the checkpoint in a directory; a checkpoint of a Lightning Trainer has all its state."""
    directory = find_dcp_directory(path)
    if directory is None:
        raise CheckpointNotFoundError(f"{path!r} has no {DCP_NAME}: it is not a checkpoint of torch.distributed")
    with close_on_error(_open(directory)) as reader:
        try:
            return _source(directory, reader, _meta(reader, weights_only))
        except (FormatError, CorruptionError) as error:
            has_path = str(error).startswith(repr(directory))
            raise type(error)(str(error) if has_path else f"{directory!r}: {error}") from None


def _open(directory: str) -> LocalReader:
    try:
        return LocalReader(directory)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"no checkpoint at {directory!r}: it was removed just now") from None


def _meta(reader: LocalReader, weights_only: bool) -> dict[str, Any] | None:
    """Return the content of Lightning's ``meta.pt``; None if there is no such file."""
    try:
        archive = Archive(META, 0, reader.size(META))
    except FileNotFoundError:
        return None
    try:
        meta = load_archive(reader, archive, weights_only=weights_only)
    except FormatError as error:
        raise FormatError(
            f"{error}. If you trust its author, pass weights_only=False to the Trainer's method, which then executes "
            "code from the file."
        ) from None
    if not isinstance(meta, dict):
        raise FormatError(f"file {META} holds a {type(meta).__name__}, not a dict")
    return meta


def step_of(path: str, *, weights_only: bool = True) -> tuple[int, bool]:
    """Return the step of a sharded checkpoint of Lightning, and True if it has optimizer state.

    Raises:
        ShardCkptError: if it is not a complete sharded checkpoint of Lightning.
    """
    try:
        with closing(LocalReader(path)) as reader:
            stored, meta = read_metadata(reader, DCP_NAME), _meta(reader, weights_only)
    except OSError:
        meta = None
    if meta is None or type(meta.get("global_step")) is not int:
        raise CheckpointNotFoundError(f"{path!r} is not a complete sharded checkpoint of Lightning")
    return meta["global_step"], _is_optimizer(path[1:] for path in stored.paths.values())


def _source(path: str, reader: LocalReader, meta: dict[str, Any] | None) -> Source:
    stored = read_metadata(reader, DCP_NAME)
    entries = _Entries(stored, reader)
    model, optimizers, rest = assign_entries(stored.paths, stored.tensors, has_meta=meta is not None)
    state_dict = {name: entries.value(key) if is_extra_state(name) else entries.get(key) for name, key in model.items()}
    others = entries.nested(rest) | (meta or {})
    if optimizers or "lr_schedulers" in others:  # of a Trainer whose optimizers may have had no state and groups
        others["optimizer_states"] = [entries.optimizer(paths, model) for paths in optimizers]
    nbytes = {name: bytes_in(chunk.shape, chunk.dtype) for name, chunk in stored.chunks.items()}
    held, lock = dict[str, torch.Tensor](), Lock()

    def load(files: Reader, name: str) -> torch.Tensor:
        with lock:  # threads read near ranges, most often of the same chunk
            if name not in held:
                while len(held) >= _HELD_CHUNKS:
                    del held[next(iter(held))]
                try:
                    held[name] = load_chunk(files, stored.chunks[name])
                except FormatError as error:
                    raise FormatError(f"checkpoint {path!r}, {error}") from None
            return held[name]

    def locate(_: str, stand_in: torch.Tensor) -> ForeignTensor:
        return entries.located[id(stand_in)][1]

    return source_of_dicts(path, LoadedTensors(reader, nbytes, load), state_dict, others, locate)


def assign_entries(
    paths: Entries, tensors: Collection[str], *, has_meta: bool
) -> tuple[dict[str, str], list[Entries], Entries]:
    """Assign the entries to the model, the optimizers and the rest.

    Args:
        paths: by key.
        tensors: keys of tensors; other entries are values.
        has_meta: whether Lightning's ``meta.pt`` is beside them, so that a single dict of tensors is a model.

    Returns:
        Keys of the model's entries by name; the entries of each optimizer, with paths inside it, in the order of their
        numbers; all other entries.

    Raises:
        FormatError: if two entries of the model have the same name.
    """
    by_top: dict[str, dict[str, KeyPath]] = {}
    for key, path in paths.items():
        by_top.setdefault(str(path[0]), {})[key] = path[1:]
    optimizers = {top: entries for top, entries in by_top.items() if _is_optimizer(entries.values())}
    others = {top: inner for top, inner in by_top.items() if top not in optimizers and inner.keys() & {*tensors}}
    nested = [top for top, entries in others.items() if all(entries.values())]
    chosen = [top for top in nested if top in _MODELS]
    if len(chosen) != 1:
        is_one_dict = len(nested) == len(others) == 1 and (has_meta or bool(optimizers))
        chosen = nested if is_one_dict else []
    model: dict[str, str] = {}
    for top, entries in others.items():
        for key, path in entries.items():
            name = clean_fqn(".".join(map(str, path)) if top in chosen else key)
            if name in model:
                raise FormatError(f"{shown(model[name])} and {shown(key)} are both an entry {shown(name)} of the model")
            model[name] = key
    assigned = {*model.values(), *(key for entries in optimizers.values() for key in entries)}
    rest = {key: path for key, path in paths.items() if key not in assigned}
    return model, [optimizers[top] for top in sorted(optimizers, key=_number)], rest


def _is_optimizer(paths: Iterable[KeyPath]) -> bool:
    return any(path and str(path[0]).partition(".")[0] == _GROUPS for path in paths)


def _number(top: str) -> tuple[str, int]:
    """Return a key that sorts ``optimizer_10`` after ``optimizer_9``, and others by name."""
    name, _, number = top.rpartition("_")
    return (name, int(number)) if number.isdecimal() and number.isascii() and len(number) < 10 else (top, -1)


class _Entries:
    """The entries of a directory as values, and as stand-ins for tensors.

    Attributes:
        located: stand-ins and the stored tensors that they stand for, by ``id`` of the stand-in.
    """

    def __init__(self, stored: DCPMetadata, reader: LocalReader) -> None:
        self._stored, self._reader = stored, reader
        self.located: dict[int, tuple[torch.Tensor, ForeignTensor]] = {}

    def get(self, key: str, min_ndim: int = 0) -> Any:
        """Return a stand-in for a tensor that has enough dims, else the value."""
        tensor = self._stored.tensors.get(key)
        if tensor is None or len(tensor.shape) < min_ndim:
            return self.value(key)
        stand_in = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        self.located[id(stand_in)] = stand_in, tensor
        return stand_in

    def value(self, key: str) -> Any:
        """Return an entry as a Python value; a tensor must have a single chunk and be small."""
        if key in self._stored.values:
            return deepcopy(read_value(self._reader, self._stored.values[key]))
        tensor = self._stored.tensors[key]
        nbytes = bytes_in(tensor.shape, tensor.dtype)
        if not nbytes:
            return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        chunk = self._stored.chunks[tensor.boxes[0].file] if len(tensor.boxes) == 1 else None
        if chunk is None or chunk.shape != tensor.shape or nbytes > _MAX_SMALL_BYTES:
            raise FormatError(f"{shown(key)} is a tensor of shape {tensor.shape}, where a small one is expected")
        return load_chunk(self._reader, chunk)

    def nested(self, paths: Entries) -> dict[str, Any]:
        """Return the values of entries, nested by path."""
        nested: dict[Any, Any] = {}
        for key, path in paths.items():
            inner = nested
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = self.value(key)
        return nested

    def optimizer(self, paths: Entries, params: Collection[str]) -> dict[str, Any]:
        """Return the state dict of an optimizer.

        Args:
            paths: of its entries.
            params: names in the model.

        Raises:
            FormatError: naming a key, if the optimizer is not laid out as torch does.
        """
        state, numbered, settings = dict[str, Any](), dict[int, Any](), dict[str, Any]()
        groups: Any = None
        for key, path in paths.items():
            kind, _, flat = str(path[0]).partition(".") if path else ("", "", "")
            if kind == _STATE and (flat or len(path) == 3):
                name, entry = _split(key, flat, params) if flat else (str(path[1]), str(path[2]))
                state.setdefault(name, {})[entry] = self.get(key, min_ndim=1)
            elif kind == _GROUPS and flat:
                name, setting = _split(key, flat, params)
                settings.setdefault(name, {})[setting] = self.value(key)
            elif kind == _GROUPS and len(path) == 3 and type(path[1]) is int:
                numbered.setdefault(path[1], {})[str(path[2])] = self.value(key)
            elif kind == _GROUPS and len(path) == 1:
                groups = self.value(key)
            else:
                raise FormatError(f"{shown(key)} is not an entry of an optimizer of torch")
        if sorted(numbered) != list(range(len(numbered))):
            raise FormatError(f"param groups {sorted(numbered)} are stored, expected 0 to {len(numbered) - 1}")
        if groups is None:
            groups = [numbered[number] for number in sorted(numbered)] or _joined(settings)
        groups = _checked(groups if isinstance(groups, list) else [groups])
        numbers = {f"{param}": param for group in groups for param in group["params"] if type(param) is int}
        named = {numbers.get(name, clean_fqn(name)): entries for name, entries in state.items()}
        return {"state": named, "param_groups": groups}


def _split(key: str, flat: str, params: Collection[str]) -> tuple[str, str]:
    """Return the parameter and the name of its state or setting, from ``layers.0.weight.exp_avg``."""
    name, dot, _ = flat.rpartition(".")
    while dot:
        if clean_fqn(name) in params:
            return name, flat[len(name) + 1 :]
        name, dot, _ = name.rpartition(".")
    raise FormatError(f"{shown(key)} belongs to no stored parameter")


def _joined(settings: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the param groups of flattened settings: parameters with equal settings form a group."""
    groups = dict[str, dict[str, Any]]()
    for name, group in settings.items():
        text = json.dumps(encode_small(group, name), sort_keys=True)
        groups.setdefault(text, {**group, "params": []})["params"].append(name)
    return [*groups.values()]


def _checked(groups: list[Any]) -> list[dict[str, Any]]:
    """Return param groups with canonical names, after checking that each lists parameters, all by name or number."""
    kinds = set[type]()
    for number, group in enumerate(groups):
        listed = group.get("params") if isinstance(group, dict) else None
        names: list[Any] = listed if isinstance(listed, list) else [None]
        kinds.update(map(type, names))
        if kinds not in ({str}, {int}, set()):
            raise FormatError(f"param group {number} of an optimizer has no list of parameters")
        group["params"] = [clean_fqn(name) if isinstance(name, str) else name for name in names]
    return groups
