"""A directory of ``torch.distributed.checkpoint`` as a source: Lightning's sharded checkpoints, OLMo-core's and others.

No code from it is executed: ``.metadata`` and the pickles of tensors are read as data, values by
``torch.load(weights_only=True)``, and Lightning's ``meta.pt`` as well, unless the user passes ``weights_only=False``.
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
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import (
    bytes_in,
    check_file_name,
    check_shape,
    check_size,
    check_text,
    shown,
)
from lightning_shardckpt.sources.detect import DCP_NAME, find_dcp_directory
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignSource, ForeignTensor, ForeignTensors
from lightning_shardckpt.sources.safe_unpickler import Called, Known, Record, make_ordered, record, text, unpickle
from lightning_shardckpt.sources.torch_pickle import (
    KNOWN_DTYPES,
    FilePart,
    load_or_raise,
    read_bytes,
    size_of,
    tensor_in,
    value_in,
)
from lightning_shardckpt.state.json_tree import encode_small, tensor_from_bytes
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.optimizer import optimizer_leaves
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


KeyPath = tuple[str | int, ...]

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


# ── metadata ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# ``.metadata`` is a pickle that is parsed as data and never executed.
#
# Source: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` and ``_nested_dict.py``, torch 2.0 to 2.13;
# ``olmo_core/distributed/checkpoint/filesystem.py``, OLMo-core 1.9 to 3.0, whose ``_StorageInfo`` has the same fields.


_MAX_METADATA_BYTES = 1 << 29

_CLASSES = {
    "Metadata": "metadata",
    "TensorStorageMetadata": "tensor",
    "BytesStorageMetadata": "value",
    "ChunkStorageMetadata": "chunk",
    "MetadataIndex": "index",
    "TensorProperties": "properties",
    "StorageMeta": "about",
}
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KNOWN: Known = {
    **KNOWN_DTYPES,
    **{f"torch.distributed.checkpoint.metadata.{name}": record(kind) for name, kind in _CLASSES.items()},
    "torch.distributed.checkpoint.filesystem._StorageInfo": record("place"),
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": record("place"),
    **{f"{module}.{name}": record("path") for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES},
    "torch.Size": Called(lambda lengths=(): tuple(lengths)),
    "torch.serialization._get_layout": Called(text),
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": Called(int),
    # until torch 2.2
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": record("properties"),
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": Called(int),
    "collections.OrderedDict": Called(make_ordered),
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """A region of a tensor, and the archive that holds it."""

    box: Box
    piece: FilePart


@dataclass(frozen=True, slots=True)
class DCPTensor:
    """A tensor: its dtype, named as in safetensors, its shape, and its distinct non-empty chunks."""

    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class DCPMetadata:
    """The stored entries by flat key, and the path of each in the state dict."""

    tensors: dict[str, DCPTensor]
    values: dict[str, FilePart]
    paths: dict[str, KeyPath]


def parse_metadata(content: bytes, where: str) -> DCPMetadata:
    """Parse the content of the file; ``where`` names it in messages.

    Raises:
        FormatError: if it is malformed, or has content that torch does not write.
    """
    unpickled = unpickle(content, _KNOWN, where)
    try:
        state = _state(unpickled, "metadata")
        places = _places(state["storage_data"])
        tensors, values = dict[str, DCPTensor](), dict[str, FilePart]()
        for key, stored in _items(state["state_dict_metadata"]):
            if stored.kind == "value":
                values[key] = _place(places, key, None)
            else:
                tensors[key] = _tensor(key, _state(stored, "tensor"), places)
        nested = state.get("planner_data")
        paths = {key: _path(key, nested.get(key) if isinstance(nested, dict) else None) for key in (*tensors, *values)}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: {shown(str(error))}") from None
    return DCPMetadata(tensors, values, paths)


_Places = Mapping[tuple[str, Shape | None], FilePart]


def _state(value: Any, kind: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind != kind or not isinstance(value.state, dict):
        raise FormatError(f"{shown(value)} where a {kind} is expected")
    return value.state


def _items(value: Any) -> list[tuple[str, Record]]:
    if not isinstance(value, dict):
        raise FormatError(f"{shown(value)} is not a dict")
    return [(check_text(key), stored) for key, stored in value.items()]


def _places(value: dict[Record, Record]) -> _Places:
    places: dict[tuple[str, Shape | None], FilePart] = {}
    for index, place in value.items():
        key, at = _state(index, "index"), _state(place, "place")
        if at.get("transform_descriptors"):
            raise FormatError(f"{shown(key['fqn'])} is stored through {shown(at['transform_descriptors'])}")
        file, begin, nbytes = check_file_name(at["relative_path"]), check_size(at["offset"]), check_size(at["length"])
        offset = key.get("offset")
        places[check_text(key["fqn"]), None if offset is None else check_shape(offset)] = FilePart(file, begin, nbytes)
    return places


def _place(places: _Places, key: str, offset: Shape | None) -> FilePart:
    place = places.get((key, offset))
    if place is None:
        raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
    return place


def _tensor(key: str, state: dict[str, Any], places: _Places) -> DCPTensor:
    properties = state["properties"]
    if not isinstance(properties, Record) or properties.kind != "properties":
        raise FormatError(f"{shown(key)}: {shown(properties)} where its properties are expected")
    fields = properties.state  # a tuple, or without __getstate__ a dict
    dtype = fields["dtype"] if isinstance(fields, dict) else fields[0]
    if dtype not in KNOWN_DTYPES.values():
        raise FormatError(f"{shown(key)}: dtype {shown(dtype)} is not supported")
    shape = check_shape(state["size"])
    bytes_in(shape, dtype)
    chunks: dict[Shape, Chunk] = {}
    for one in state["chunks"]:
        chunk = _state(one, "chunk")
        start, lengths = check_shape(chunk["offsets"]), check_shape(chunk["sizes"])
        if 0 not in lengths and start not in chunks:
            box = Box(start, tuple(a + b for a, b in zip(start, lengths, strict=True)))
            chunks[start] = Chunk(box, _place(places, key, start))
    return DCPTensor(dtype, shape, tuple(chunks.values()))


def _path(key: str, path: Any) -> KeyPath:
    """Return the path of a key in the state dict; the key alone if it was not nested, or another planner saved it."""
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        return (key,)
    return path


# ── directories ───────────────────────────────────────────────────────────────────────────────────────────────────────


META = "meta.pt"
_SMALL_BYTES = 64 << 20  # limit of tensors that are read as values: settings, and state without a parameter's shape


def open_dcp(path: str, weights_only: bool = True) -> ForeignSource:
    """Open the checkpoint in a directory; a checkpoint of a Lightning Trainer has all its state."""
    directory = find_dcp_directory(path)
    if directory is None:
        raise CheckpointNotFoundError(f"{path!r} has no {DCP_NAME}: it is not a checkpoint of torch.distributed")
    try:
        reader = LocalReader(directory)
    except FileNotFoundError:
        raise CheckpointNotFoundError(f"no checkpoint at {path!r}: it was removed just now") from None
    try:
        return _Directory(directory, reader).source(_meta(directory, weights_only))
    except (FormatError, CorruptionError) as error:
        reader.close()
        has_path = str(error).startswith(repr(directory))
        raise type(error)(str(error) if has_path else f"{directory!r}: {error}") from None
    except BaseException:
        reader.close()
        raise


class _Directory:
    """An open directory: its entries by key, and the places of their chunks in files."""

    def __init__(self, path: str, reader: LocalReader) -> None:
        self._path, self._reader = path, reader
        size = size_of(reader, DCP_NAME)
        if size > _MAX_METADATA_BYTES:
            raise FormatError(f"{DCP_NAME} has {size} bytes, more than {_MAX_METADATA_BYTES}")
        self._stored = parse_metadata(read_bytes(reader, DCP_NAME, 0, size), DCP_NAME)
        self._boxes: dict[str, list[ForeignBox]] = {key: [] for key in self._stored.tensors}
        self._values: dict[str, Any] = {}

    def source(self, meta: dict[str, Any] | None) -> ForeignSource:
        """Return the checkpoint; ``meta`` is the content of ``meta.pt``."""
        layout = layout_of(self._stored.paths, self._stored.tensors, extended=meta is not None)
        self._locate()
        model, documents = self._model(layout)
        optimizer: dict[str, ForeignTensor] = {}
        if layout.optimizers:
            states = [self._optimizer(i, keys, layout, optimizer) for i, keys in enumerate(layout.optimizers)]
            _, documents["optimizer"] = optimizer_leaves(states)
        rest = self._rest(layout) | (meta or {})
        if not layout.optimizers and "lr_schedulers" in rest:  # of a Trainer whose optimizers had no state and groups
            documents["optimizer"] = {}
        tensors = ForeignTensors(self._path, self._reader, {"model": model, "optimizer": optimizer})
        return ForeignSource(tensors, documents, rest)

    def _locate(self) -> None:
        """Locate all chunks and read all values, in the order of the files."""
        wanted: list[tuple[str, int, str, int]] = []
        for key, tensor in self._stored.tensors.items():
            wanted += [(c.piece.file, c.piece.begin, key, i) for i, c in enumerate(tensor.chunks)]
        wanted += [(piece.file, piece.begin, key, -1) for key, piece in self._stored.values.items()]
        for _, _, key, number in sorted(wanted):
            if number < 0:
                self._values[key] = value_in(self._reader, self._stored.values[key])
                continue
            tensor = self._stored.tensors[key]
            chunk = tensor.chunks[number]
            pickled, begin = tensor_in(self._reader, chunk.piece)
            if (pickled.dtype, pickled.shape) != (tensor.dtype, chunk.box.shape):
                raise FormatError(
                    f"file {chunk.piece.file}: {pickled.dtype} {pickled.shape} is stored at byte {chunk.piece.begin} "
                    f"of {shown(key)}, expected {tensor.dtype} {chunk.box.shape}"
                )
            self._boxes[key].append(ForeignBox(chunk.box, chunk.piece.file, begin))

    def _tensor(self, key: str) -> ForeignTensor:
        tensor = self._stored.tensors[key]
        return ForeignTensor(tensor.dtype, tensor.shape, tuple(self._boxes[key]))

    def _value(self, key: str) -> Any:
        """Return an entry as a Python value; a tensor must have a single chunk and be small."""
        if key in self._values:
            return deepcopy(self._values[key])
        tensor = self._tensor(key)
        whole = ForeignTensors(self._path, self._reader, {"trainer": {key: tensor}}).boxes("trainer", key)
        nbytes = sum(box.place.nbytes for box in whole)
        if len(whole) > 1 or nbytes > _SMALL_BYTES:
            raise FormatError(f"{shown(key)} is a tensor of shape {tensor.shape}, where a small one is expected")
        content = read_bytes(self._reader, tensor.boxes[0].file, tensor.boxes[0].begin, nbytes) if whole else b""
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
        """Return the state dict of an optimizer without tensors shaped like parameters, which go into ``tensors``."""
        state, groups = dict[str | int, dict[str, Any]](), self._groups(keys)
        numbers = {f"{param}": param for group in groups for param in group["params"] if type(param) is int}
        for name, entries in keys.state.items():
            param, small = numbers.get(name, clean_fqn(name)), dict[str, Any]()
            for entry, key in entries.items():
                if self._is_leaf(entry, key, layout.model.get(name)):
                    tensors[f"{number}/{f'#{name}' if name in numbers else param}/{entry}"] = self._tensor(key)
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


def _meta(directory: str, weights_only: bool) -> dict[str, Any] | None:
    """Return the content of Lightning's ``meta.pt``; None if there is no such file."""
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
        meta = load_or_raise(lambda: torch.load(opened, map_location="cpu", weights_only=weights_only), _refusal)
    if not isinstance(meta, dict):
        raise FormatError(f"file {META} holds a {type(meta).__name__}, not a dict")
    return meta


def _refusal(reason: str) -> FormatError:
    return FormatError(
        f"file {META} is not read: {reason}. If you trust its author, pass weights_only=False to the Trainer's method, "
        "which then executes code from the file."
    )


def step_of(path: str, *, weights_only: bool = True) -> tuple[int, bool]:
    """Return the step of a sharded checkpoint of Lightning, and True if it has optimizer state.

    Raises:
        ShardCkptError: if it is not a complete sharded checkpoint of Lightning.
    """
    with suppress(OSError):
        content = Path(path, DCP_NAME).read_bytes()
        stored = parse_metadata(content, f"{path!r}, {DCP_NAME}")
        meta = _meta(path, weights_only)
        if meta is not None and type(meta.get("global_step")) is int:
            layout = layout_of(stored.paths, stored.tensors, extended=True)
            return meta["global_step"], bool(layout.optimizers)
    raise CheckpointNotFoundError(f"{path!r} is not a complete sharded checkpoint of Lightning")
