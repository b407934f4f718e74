"""A directory of ``torch.distributed.checkpoint`` as a source: Lightning's sharded checkpoints, OLMo-core's and others.

No code from it is executed: ``.metadata`` is read as data, all else by ``torch.load(weights_only=True)``; Lightning's
``meta.pt`` as well, unless the user passes ``weights_only=False``. Only the chunks that a rank reads are opened.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, shown
from lightning_shardckpt.sources.dcp_files import (
    ArchiveReader,
    KeyPath,
    check_parts,
    load_file,
    read_metadata,
    read_value,
)
from lightning_shardckpt.sources.detect import DCP_NAME, find_dcp_directory
from lightning_shardckpt.sources.foreign_source import ForeignTensor, ForeignTensors, foreign_source
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.storage.local.local_reader import LocalReader

# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
# The model, the optimizers and the names of parameters, told by the keys of a distributed checkpoint.
#
# Entries have paths of a nested state dict, whose keys depend on the program:
#
# - Lightning's Trainer: ``model`` (FSDPStrategy) or ``state_dict`` (ModelParallelStrategy), ``optimizer_0`` and so on;
# - Lightning's Fabric: the user's names of the model and the optimizers;
# - OLMo-core: ``model`` and ``optim``; torchtitan: the model's entries at the top, ``optimizer`` beside them.
#
# An optimizer has ``param_groups``, as in the result of ``get_optimizer_state_dict``, nested or flattened.


_MODELS = ("model", "state_dict")
_STATE, _GROUPS = "state", "param_groups"


@dataclass(slots=True)
class OptimizerKeys:
    """The keys of an optimizer.

    Attributes:
        state: by parameter and name of the state.
        groups: nested param groups, by number and setting.
        settings: flattened param groups, by parameter and setting.
        listed: the key of a single entry with all param groups.
    """

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    listed: str | None = None


@dataclass(frozen=True, slots=True)
class DCPKeys:
    """Keys of the model's entries by name, of the optimizers in order, and paths of all other entries by key."""

    model: dict[str, str]
    optimizers: list[OptimizerKeys]
    rest: dict[str, KeyPath]


def layout_of(paths: Mapping[str, KeyPath], tensors: Collection[str], *, extended: bool) -> DCPKeys:
    """Assign the entries to the model, the optimizers and the rest.

    Args:
        paths: by key.
        tensors: keys of tensors; other entries are values.
        extended: whether Lightning's ``meta.pt`` is beside them, so that a single dict of tensors is a model.

    Raises:
        FormatError: naming a key, if an optimizer is not laid out as torch does.
    """
    by_top: dict[str, dict[str, KeyPath]] = {}
    for key, path in paths.items():
        by_top.setdefault(str(path[0]), {})[key] = path[1:]
    optimizers = {top: entries for top, entries in by_top.items() if _is_optimizer(entries.values())}
    others = {top: inner for top, inner in by_top.items() if top not in optimizers and inner.keys() & set(tensors)}
    model = _model_keys(others, has_objects=extended or bool(optimizers))
    ordered = sorted(optimizers, key=_number)
    assigned = {*model.values(), *(key for entries in optimizers.values() for key in entries)}
    rest = {key: path for key, path in paths.items() if key not in assigned}
    return DCPKeys(model, [_optimizer_keys(optimizers[top], model) for top in ordered], rest)


def _is_optimizer(paths: Iterable[KeyPath]) -> bool:
    return any(path and str(path[0]).partition(".")[0] == _GROUPS for path in paths)


def _number(top: str) -> tuple[str, int]:
    """Return a key that sorts ``optimizer_10`` after ``optimizer_9``, and others by name."""
    name, _, number = top.rpartition("_")
    return (name, int(number)) if number.isdecimal() and number.isascii() and len(number) < 10 else (top, -1)


def _model_keys(others: Mapping[str, Mapping[str, KeyPath]], *, has_objects: bool) -> dict[str, str]:
    """Return the keys of the model's entries by name: entries below one key without it, or all tensors by key."""
    nested = [top for top, entries in others.items() if all(entries.values())]
    named = [top for top in nested if top in _MODELS]
    chosen = named if len(named) == 1 else nested if has_objects and len(nested) == len(others) == 1 else []
    names: dict[str, str] = {}
    for top, entries in others.items():
        for key, path in entries.items():
            name = ".".join(map(str, path)) if top in chosen else key
            if name in names:
                raise FormatError(f"{shown(names[name])} and {shown(key)} are both an entry {shown(name)} of the model")
            names[name] = key
    return names


def _optimizer_keys(entries: Mapping[str, KeyPath], model: Collection[str]) -> OptimizerKeys:
    keys = OptimizerKeys()
    for key, path in entries.items():
        kind, _, flat = str(path[0]).partition(".") if path else ("", "", "")
        if kind == _STATE and (flat or len(path) == 3):
            name, state = _split(key, flat, model) if flat else (str(path[1]), str(path[2]))
            keys.state.setdefault(name, {})[state] = key
        elif kind == _GROUPS and flat:
            name, setting = _split(key, flat, model)
            keys.settings.setdefault(name, {})[setting] = key
        elif kind == _GROUPS and len(path) == 3 and type(path[1]) is int:
            keys.groups.setdefault(path[1], {})[str(path[2])] = key
        elif kind == _GROUPS and len(path) == 1:
            keys.listed = key
        else:
            raise FormatError(f"{shown(key)} is not an entry of an optimizer of torch")
    if sorted(keys.groups) != list(range(len(keys.groups))):
        raise FormatError(f"param groups {sorted(keys.groups)} are stored, expected 0 to {len(keys.groups) - 1}")
    return keys


def _split(key: str, flat: str, model: Collection[str]) -> tuple[str, str]:
    """Return the parameter and the name of its state or setting, from ``layers.0.weight.exp_avg``."""
    name, dot, _ = flat.rpartition(".")
    while dot:
        if name in model:
            return name, flat[len(name) + 1 :]
        name, dot, _ = name.rpartition(".")
    raise FormatError(f"{shown(key)} belongs to no stored parameter")


# ── directories ───────────────────────────────────────────────────────────────────────────────────────────────────────


META = "meta.pt"
_MAX_SMALL_BYTES = 64 << 20  # of a tensor that is read as a value: a setting, or state without a parameter's shape


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open the checkpoint in a directory; a checkpoint of a Lightning Trainer has all its state."""
    directory = find_dcp_directory(path)
    if directory is None:
        raise CheckpointNotFoundError(f"{path!r} has no {DCP_NAME}: it is not a checkpoint of torch.distributed")
    reader = _open(directory)
    try:
        return _Directory(directory, reader).source(_meta(reader, weights_only))
    except (FormatError, CorruptionError) as error:
        reader.close()
        has_path = str(error).startswith(repr(directory))
        raise type(error)(str(error) if has_path else f"{directory!r}: {error}") from None
    except BaseException:
        reader.close()
        raise


def _open(directory: str) -> LocalReader:
    try:
        return LocalReader(directory)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"no checkpoint at {directory!r}: it was removed just now") from None


class _Directory:
    """An open directory: its entries by key. Each chunk of a tensor is a file of ``_archives``."""

    def __init__(self, path: str, reader: LocalReader) -> None:
        self._path, self._files, self._stored = path, reader, read_metadata(reader, DCP_NAME)
        check_parts(reader, [*(of.part for of in self._stored.chunks.values()), *self._stored.values.values()])
        self._archives = ArchiveReader(path, reader, self._stored.chunks)

    def source(self, meta: dict[str, Any] | None) -> Source:
        """Return the checkpoint; ``meta`` is the content of ``meta.pt``."""
        layout = layout_of(self._stored.paths, self._stored.tensors, extended=meta is not None)
        model, documents = self._model(layout)
        optimizer: dict[str, ForeignTensor] = {}
        if layout.optimizers:
            states = [self._optimizer(i, keys, layout, optimizer) for i, keys in enumerate(layout.optimizers)]
            _, documents["optimizer"] = optimizer_leaves(states)
        rest = self._rest(layout) | (meta or {})
        if not layout.optimizers and "lr_schedulers" in rest:  # of a Trainer whose optimizers had no state and groups
            documents["optimizer"] = {}
        tensors = ForeignTensors(self._path, self._archives, {"model": model, "optimizer": optimizer})
        return foreign_source(tensors, documents, rest)

    def _value(self, key: str) -> Any:
        """Return an entry as a Python value; a tensor must have a single chunk and be small."""
        if key in self._stored.values:
            return deepcopy(read_value(self._files, self._stored.values[key]))
        tensor = self._stored.tensors[key]
        if not prod(tensor.shape):
            return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        if len(tensor.boxes) != 1 or prod(tensor.shape) * DTYPE_BYTES[tensor.dtype] > _MAX_SMALL_BYTES:
            raise FormatError(f"{shown(key)} is a tensor of shape {tensor.shape}, where a small one is expected")
        value = read_value(self._files, self._stored.chunks[tensor.boxes[0].file].part)
        found = (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else type(value)
        if found != (TORCH_DTYPES[tensor.dtype], tensor.shape):
            raise FormatError(f"{shown(key)}: {found} is stored, expected {tensor.dtype} {tensor.shape}")
        return value

    def _model(self, layout: DCPKeys) -> tuple[dict[str, ForeignTensor], dict[str, Any]]:
        tensors: dict[str, ForeignTensor] = {}
        other: dict[str, Any] = {}
        for name, key in layout.model.items():
            fqn = clean_fqn(name)
            if fqn in tensors or fqn in other:
                raise FormatError(f"two entries have the canonical name {shown(fqn)}")
            if key in self._stored.tensors and not is_extra_state(fqn):
                tensors[fqn] = self._stored.tensors[key]
            else:
                other[fqn] = encode_small(self._value(key), f"state_dict/{fqn}")
        return tensors, {"model": other}

    def _optimizer(
        self, number: int, keys: OptimizerKeys, layout: DCPKeys, tensors: dict[str, ForeignTensor]
    ) -> dict[str, Any]:
        """Return the state dict of an optimizer without tensors shaped like parameters, which go into ``tensors``."""
        state, groups = dict[str | int, dict[str, Any]](), self._groups(keys)
        numbers = {f"{param}": param for group in groups for param in group["params"] if type(param) is int}
        for name, entries in keys.state.items():
            param, small = numbers.get(name, clean_fqn(name)), dict[str, Any]()
            for entry, key in entries.items():
                if self._is_leaf(entry, key, layout.model.get(name)):
                    tensors[f"{number}/{f'#{name}' if name in numbers else param}/{entry}"] = self._stored.tensors[key]
                else:
                    small[entry] = self._value(key)
            state[param] = small
        return {"state": state, "param_groups": groups}

    def _is_leaf(self, entry: str, key: str, param: str | None) -> bool:
        """Return whether a state is shaped like its parameter. Both may be 0-dim, except for the step count."""
        tensor, of = self._stored.tensors.get(key), self._stored.tensors.get(param or "")
        return tensor is not None and (bool(tensor.shape) or (of is not None and not of.shape and entry != "step"))

    def _groups(self, keys: OptimizerKeys) -> list[dict[str, Any]]:
        """Return the param groups; flattened parameters with equal settings form a group."""
        if keys.listed is not None:
            stored = self._value(keys.listed)
        elif keys.groups:
            stored = [{k: self._value(key) for k, key in keys.groups[i].items()} for i in sorted(keys.groups)]
        else:
            stored, params = [], dict[str, list[str]]()
            for fqn, settings in keys.settings.items():
                group = {k: self._value(key) for k, key in settings.items()}
                text = json.dumps(encode_small(group, fqn), sort_keys=True)
                if text not in params:
                    params[text] = []
                    stored.append({**group, "params": params[text]})
                params[text].append(fqn)
        groups: list[Any] = stored if isinstance(stored, list) else [stored]
        kinds = set[type]()
        for number, group in enumerate(groups):
            listed = group.get("params") if isinstance(group, dict) else None
            names: list[Any] = listed if isinstance(listed, list) else [None]
            kinds.update(map(type, names))
            if kinds not in ({str}, {int}, set()):
                raise FormatError(f"param group {number} of an optimizer has no list of parameters")
            group["params"] = [clean_fqn(name) if isinstance(name, str) else name for name in names]
        return groups

    def _rest(self, layout: DCPKeys) -> dict[str, Any]:
        """Return the entries of neither model nor optimizers, nested by path."""
        rest: dict[str, Any] = {}
        for key, path in layout.rest.items():
            inner: Any = rest
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = self._value(key)
        return rest


def _meta(reader: LocalReader, weights_only: bool) -> dict[str, Any] | None:
    """Return the content of Lightning's ``meta.pt``; None if there is no such file."""
    try:
        reader.size(META)
    except FileNotFoundError:
        return None
    try:
        meta = load_file(reader, META, weights_only)
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
    return meta["global_step"], bool(layout_of(stored.paths, stored.tensors, extended=True).optimizers)
