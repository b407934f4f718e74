"""A directory of ``torch.distributed.checkpoint`` as a source: Lightning's sharded checkpoints, OLMo-core's and others.

Nothing in it is executed: ``.metadata`` and the pickles of tensors are read as data, values by
``torch.load(weights_only=True)``, and so is Lightning's ``meta.pt`` unless the user says otherwise.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.sources import dcp_metadata
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignSource, ForeignTensor, ForeignTensors
from lightning_shardckpt.sources.paths import DCP_NAME, dcp_place
from lightning_shardckpt.sources.torch_pickle import CoalescedReads, load_or_raise, tensor_in, value_in
from lightning_shardckpt.state.json_tree import encode_small, tensor_from_bytes
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.storage.local.local_reader import LocalReader

# ── keys ──────────────────────────────────────────────────────────────────────────────────────────────────────────────
# Tell the model from the optimizers in a distributed checkpoint by its keys, and find the names of parameters.
#
# Entries lie at paths of a nested state dict whose keys whoever saved it chose. What is known:
#
# - Lightning's Trainer: ``model`` (FSDPStrategy) or ``state_dict`` (ModelParallelStrategy), ``optimizer_0`` and so on;
# - Lightning's Fabric: what the user called the model and the optimizers;
# - OLMo-core: ``model`` and ``optim``; torchtitan: the model's entries at the top, ``optimizer`` beside them.
#
# An optimizer is what has ``param_groups``, as ``get_optimizer_state_dict`` returns it, nested or flattened. No torch.


KeyPath = tuple[str | int, ...]

_MODELS = ("model", "state_dict")
_STATE, _GROUPS = "state", "param_groups"


@dataclass(slots=True)
class OptimizerKeys:
    """The keys of an optimizer.

    ``state``: by parameter and name of the state. ``groups``: by number of the param group and setting, where they are
    nested; ``settings``: by parameter and setting, where they are flattened. ``listed``: of all groups in one.
    """

    state: dict[str, dict[str, str]] = field(default_factory=dict)
    groups: dict[int, dict[str, str]] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    listed: str | None = None


@dataclass(frozen=True, slots=True)
class DCPKeys:
    """By name of the model's entries their keys; the optimizers in order; keys and paths of what is neither."""

    model: dict[str, str]
    optimizers: list[OptimizerKeys]
    rest: dict[str, KeyPath]


def layout_of(paths: Mapping[str, KeyPath], tensors: Collection[str], *, extended: bool) -> DCPKeys:
    """Return what the entries are.

    Args:
        paths: by key.
        tensors: keys of those that are tensors; others are values.
        extended: whether Lightning's ``meta.pt`` lies beside them, so that a single dict of tensors is a model.

    Raises:
        FormatError: naming a key, if an optimizer is not as torch lays it out.
    """
    by_top: dict[str, dict[str, KeyPath]] = {}
    for key, path in paths.items():
        by_top.setdefault(str(path[0]), {})[key] = path[1:]
    optimizers = {top: found for top, found in by_top.items() if _is_optimizer(found.values())}
    others = {top: found for top, found in by_top.items() if top not in optimizers and found.keys() & set(tensors)}
    model = _model(others, known=extended or bool(optimizers))
    ordered = sorted(optimizers, key=_number)
    taken = {*model.values(), *(key for found in optimizers.values() for key in found)}
    rest = {key: path for key, path in paths.items() if key not in taken}
    return DCPKeys(model, [_optimizer(optimizers[top], model) for top in ordered], rest)


def _is_optimizer(paths: Iterable[KeyPath]) -> bool:
    return any(path and str(path[0]).partition(".")[0] == _GROUPS for path in paths)


def _number(top: str) -> tuple[str, int]:
    """Sort ``optimizer_10`` after ``optimizer_9``, and others by their names."""
    name, _, number = top.rpartition("_")
    return (name, int(number)) if number.isdecimal() and number.isascii() and len(number) < 10 else (top, -1)


def _model(others: Mapping[str, Mapping[str, KeyPath]], *, known: bool) -> dict[str, str]:
    """The model's entries by name: those below one key, without that, or all tensors by their own keys."""
    nested = [top for top, found in others.items() if all(found.values())]
    named = [top for top in nested if top in _MODELS]
    chosen = named if len(named) == 1 else nested if known and len(nested) == len(others) == 1 else []
    names: dict[str, str] = {}
    for top, found in others.items():
        for key, path in found.items():
            name = ".".join(map(str, path)) if top in chosen else key
            if name in names:
                raise FormatError(f"{shown(names[name])} and {shown(key)} are both an entry {shown(name)} of the model")
            names[name] = key
    return names


def _optimizer(found: Mapping[str, KeyPath], model: Collection[str]) -> OptimizerKeys:
    keys = OptimizerKeys()
    for key, path in found.items():
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
            raise FormatError(f"{shown(key)} is nothing that torch stores of an optimizer")
    if sorted(keys.groups) != list(range(len(keys.groups))):
        raise FormatError(f"param groups {sorted(keys.groups)} are stored, expected 0 to {len(keys.groups) - 1}")
    return keys


def _split(key: str, flat: str, model: Collection[str]) -> tuple[str, str]:
    """Parameter and name of what is stored for it, from ``layers.0.weight.exp_avg``."""
    name, dot, _ = flat.rpartition(".")
    while dot:
        if name in model:
            return name, flat[len(name) + 1 :]
        name, dot, _ = name.rpartition(".")
    raise FormatError(f"{shown(key)} is of no parameter that is stored")


META = "meta.pt"
_SMALL_BYTES = 64 << 20  # a tensor that is a setting or a state of no parameter's shape


def mark(path: str) -> str:
    """Return text that is equal wherever the same checkpoint is seen."""
    return checksum(Path(dcp_place(path) or path, DCP_NAME).read_bytes())


def open_dcp(path: str, weights_only: bool = True) -> ForeignSource:
    """The checkpoint in a directory; of a Lightning Trainer with all its state.

    Args:
        path: the directory with ``.metadata``, or OLMo-core's directory above it.
        weights_only: for ``meta.pt``, as in ``torch.load``.

    Raises:
        FormatError: naming the file, if it is malformed, has what would have to be executed, or what is not supported.
        CorruptionError: if a file is missing, or too short for what should be in it.
    """
    directory = dcp_place(path)
    if directory is None:
        raise CheckpointNotFoundError(f"{path!r} has no {DCP_NAME}: no checkpoint of torch.distributed")
    try:
        reader = LocalReader(directory)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"no checkpoint at {path!r}: it was removed just now") from None
    try:
        return _Directory(directory, reader).source(_meta(directory, weights_only))
    except (FormatError, CorruptionError) as error:
        reader.close()
        known = str(error).startswith(repr(directory))
        raise type(error)(str(error) if known else f"{directory!r}: {error}") from None
    except BaseException:
        reader.close()
        raise


class _Directory:
    """An opened directory: its entries by key, and where the bytes of their chunks are."""

    def __init__(self, path: str, reader: LocalReader) -> None:
        self._path, self._reader, self._windows = path, reader, CoalescedReads(reader)
        size = self._windows.size(DCP_NAME)
        if size > dcp_metadata.MAX_BYTES:
            raise FormatError(f"{DCP_NAME} has {size} bytes, more than {dcp_metadata.MAX_BYTES}")
        content = bytearray(size)
        reader.read_into(DCP_NAME, 0, memoryview(content))
        self._stored = dcp_metadata.parse(bytes(content), DCP_NAME)
        self._boxes: dict[str, list[ForeignBox]] = {key: [] for key in self._stored.tensors}
        self._values: dict[str, Any] = {}

    def source(self, meta: dict[str, Any] | None) -> ForeignSource:
        """The checkpoint; ``meta`` is what was in ``meta.pt``."""
        layout = layout_of(self._stored.paths, self._stored.tensors, extended=meta is not None)
        self._locate()
        model, documents = self._model(layout)
        optimizer: dict[str, ForeignTensor] = {}
        if layout.optimizers:
            states = [self._optimizer(i, keys, layout, optimizer) for i, keys in enumerate(layout.optimizers)]
            _, documents["optimizer"] = optimizer_leaves(states)
        rest = self._rest(layout) | (meta or {})
        if not layout.optimizers and "lr_schedulers" in rest:  # the optimizers that it had have no state and no groups
            documents["optimizer"] = {}
        tensors = ForeignTensors(self._path, self._reader, {"model": model, "optimizer": optimizer})
        return ForeignSource(tensors, documents, rest)

    def _locate(self) -> None:
        """Find the bytes of all chunks and read all values, in the order of the files."""
        wanted: list[tuple[str, int, str, int]] = []
        for key, tensor in self._stored.tensors.items():
            wanted += [(c.piece.file, c.piece.begin, key, i) for i, c in enumerate(tensor.chunks)]
        wanted += [(piece.file, piece.begin, key, -1) for key, piece in self._stored.values.items()]
        for _, _, key, number in sorted(wanted):
            if number < 0:
                self._values[key] = value_in(self._windows, self._stored.values[key])
                continue
            tensor = self._stored.tensors[key]
            chunk = tensor.chunks[number]
            found, begin = tensor_in(self._windows, chunk.piece)
            if (found.dtype, found.shape) != (tensor.dtype, chunk.box.shape):
                raise FormatError(
                    f"file {chunk.piece.file}: {found.dtype} {found.shape} is stored at byte {chunk.piece.begin} of "
                    f"{shown(key)}, expected {tensor.dtype} {chunk.box.shape}"
                )
            self._boxes[key].append(ForeignBox(chunk.box, chunk.piece.file, begin))

    def _tensor(self, key: str) -> ForeignTensor:
        tensor = self._stored.tensors[key]
        return ForeignTensor(tensor.dtype, tensor.shape, tuple(self._boxes[key]))

    def _value(self, key: str) -> Any:
        """An entry as Python has it; of a tensor, one that is in one piece and not large."""
        if key in self._values:
            return deepcopy(self._values[key])
        tensor = self._tensor(key)
        whole = ForeignTensors(self._path, self._reader, {"trainer": {key: tensor}}).boxes("trainer", key)
        nbytes = sum(box.place.nbytes for box in whole)
        if len(whole) > 1 or nbytes > _SMALL_BYTES:
            raise FormatError(f"{shown(key)} is a tensor of shape {tensor.shape}, where a small one is expected")
        content = self._windows.read(tensor.boxes[0].file, tensor.boxes[0].begin, nbytes) if whole else b""
        return tensor_from_bytes(content, tensor.dtype, list(tensor.shape))

    def _model(self, layout: DCPKeys) -> tuple[dict[str, ForeignTensor], dict[str, Any]]:
        tensors: dict[str, ForeignTensor] = {}
        other: dict[str, Any] = {}
        for name, key in layout.model.items():
            fqn = clean_fqn(name)
            if fqn in tensors or fqn in other:
                raise FormatError(f"two entries have the canonical name {shown(fqn)}")
            if key in self._stored.tensors and not is_extra_state(fqn):
                tensors[fqn] = self._tensor(key)
            else:
                other[fqn] = encode_small(self._value(key), f"state_dict/{fqn}")
        return tensors, {"model": other}

    def _optimizer(
        self, number: int, keys: OptimizerKeys, layout: DCPKeys, tensors: dict[str, ForeignTensor]
    ) -> dict[str, Any]:
        """The state dict of an optimizer without its tensors of a parameter's kind, which go into ``tensors``."""
        state, groups = dict[str | int, dict[str, Any]](), self._groups(keys)
        numbers = {f"{param}": param for group in groups for param in group["params"] if type(param) is int}
        for name, entries in keys.state.items():
            param, small = numbers.get(name, clean_fqn(name)), dict[str, Any]()
            for what, key in entries.items():
                if self._is_leaf(what, key, layout.model.get(name)):
                    tensors[f"{number}/{f'#{name}' if name in numbers else param}/{what}"] = self._tensor(key)
                else:
                    small[what] = self._value(key)
            state[param] = small
        return {"state": state, "param_groups": groups}

    def _is_leaf(self, what: str, key: str, param: str | None) -> bool:
        """Return whether a state is laid out like its parameter; that can be 0-dim, which a step count always is."""
        tensor, of = self._stored.tensors.get(key), self._stored.tensors.get(param or "")
        return tensor is not None and (bool(tensor.shape) or (of is not None and not of.shape and what != "step"))

    def _groups(self, keys: OptimizerKeys) -> list[dict[str, Any]]:
        """Param groups; flattened ones are told apart by their settings."""
        if keys.listed is not None:
            found = self._value(keys.listed)
        elif keys.groups:
            found = [{k: self._value(key) for k, key in keys.groups[i].items()} for i in sorted(keys.groups)]
        else:
            found, known = [], dict[str, list[str]]()
            for fqn, settings in keys.settings.items():
                group = {k: self._value(key) for k, key in settings.items()}
                text = json.dumps(encode_small(group, fqn), sort_keys=True)
                if text not in known:
                    known[text] = []
                    found.append({**group, "params": known[text]})
                known[text].append(fqn)
        groups: list[Any] = found if isinstance(found, list) else [found]
        kinds = set[type]()
        for number, group in enumerate(groups):
            found_names = group.get("params") if isinstance(group, dict) else None
            names: list[Any] = found_names if isinstance(found_names, list) else [None]
            kinds.update(map(type, names))
            if kinds not in ({str}, {int}, set()):
                raise FormatError(f"param group {number} of an optimizer has no list of parameters")
            group["params"] = [clean_fqn(name) if isinstance(name, str) else name for name in names]
        return groups

    def _rest(self, layout: DCPKeys) -> dict[str, Any]:
        """Return what is neither model nor optimizer, nested as it was."""
        found: dict[str, Any] = {}
        for key, path in layout.rest.items():
            inner: Any = found
            for part in path[:-1]:
                inner = inner.setdefault(part, {})
            inner[path[-1]] = self._value(key)
        return found


def _meta(directory: str, weights_only: bool) -> dict[str, Any] | None:
    """Return what Lightning keeps beside the tensors; None if there is no such file."""
    path = os.path.join(directory, META)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise FormatError(f"file {META}: {os.strerror(error.errno or 0)}; a link?") from None
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise FormatError(f"file {META} is not a regular file")
        found = load_or_raise(lambda: torch.load(opened, map_location="cpu", weights_only=weights_only), _refused)
    if not isinstance(found, dict):
        raise FormatError(f"file {META} holds a {type(found).__name__}, not a dict")
    return found


def _refused(what: str) -> FormatError:
    return FormatError(
        f"file {META} is not read: {what}. If you trust whoever wrote it, pass weights_only=False to the Trainer's "
        "method, which then executes what is in it."
    )


def step_of(path: str, *, weights_only: bool = True) -> tuple[int, bool]:
    """The step that Lightning recorded in a sharded checkpoint, and whether it has optimizer state.

    Raises:
        ShardCkptError: if it is no such checkpoint, or not complete.
    """
    with suppress(OSError):
        content = Path(path, DCP_NAME).read_bytes()
        stored = dcp_metadata.parse(content, f"{path!r}, {DCP_NAME}")
        meta = _meta(path, weights_only)
        if meta is not None and type(meta.get("global_step")) is int:
            layout = layout_of(stored.paths, stored.tensors, extended=True)
            return meta["global_step"], bool(layout.optimizers)
    raise CheckpointNotFoundError(f"{path!r} is no complete sharded checkpoint of Lightning's")
