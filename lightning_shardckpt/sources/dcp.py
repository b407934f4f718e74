"""A directory of ``torch.distributed.checkpoint`` as a source: Lightning's sharded checkpoints, OLMo-core's and others.

The entries become the dicts that a file of ``torch.save`` would have, with stand-ins on the meta device for tensors, of
which only the chunks that a rank reads are loaded, one after another. No code is executed: ``.metadata``, a pickle, is
read with an allow-list of torch's own classes, by the unpickler in Python, since the one in C allocates gigabytes for a
pickle of ten bytes; all else by ``torch.load(weights_only=True)``. Lightning's ``meta.pt`` as well, unless the user
passes ``weights_only=False``.

Entries have paths of a nested state dict, whose keys depend on the program:

- Lightning's Trainer: ``model`` (FSDPStrategy) or ``state_dict`` (ModelParallelStrategy), ``optimizer_0`` and so on;
- Lightning's Fabric: the user's names of the model and the optimizers;
- OLMo-core: ``model`` and ``optim``; torchtitan: the model's entries at the top, ``optimizer`` beside them.

An optimizer has ``param_groups``, as in the result of ``get_optimizer_state_dict``, nested or flattened.
"""

from __future__ import annotations

import io
import json
import pickle
import struct
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.value_checks import (
    bytes_in,
    check_file_name,
    check_shape,
    check_size,
    check_text,
    shown,
)
from lightning_shardckpt.sources.open_source import DCP_NAME, find_dcp_directory
from lightning_shardckpt.sources.source import ForeignBox, ForeignTensor, Source, close_on_error
from lightning_shardckpt.sources.torch_save import DictTensors, source_of_dicts
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all

META = "meta.pt"
_MODELS = ("model", "state_dict")
_STATE, _GROUPS = "state", "param_groups"

KeyPath = tuple[str | int, ...]
Entries = Mapping[str, KeyPath]
"""Paths by flat key."""


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open the checkpoint in a directory; a checkpoint of a Lightning Trainer has all its state."""
    directory = find_dcp_directory(path)
    if directory is None:
        raise CheckpointNotFoundError(f"{path!r} has no {DCP_NAME}: it is not a checkpoint of torch.distributed")
    with close_on_error(LocalReader(directory)) as reader:
        try:
            stored, meta = _Stored(directory, reader), _meta(directory, reader, weights_only)
            model, optimizers, rest = assign_entries(stored.paths, stored.located, has_meta=meta is not None)
            state_dict = {n: stored.value(key) if is_extra_state(n) else stored.get(key) for n, key in model.items()}
            others = stored.nested(rest) | (meta or {})
            if optimizers or "lr_schedulers" in others:  # of a Trainer whose optimizers may have had no state
                others["optimizer_states"] = [stored.optimizer(paths, model) for paths in optimizers]
            return source_of_dicts(directory, stored.tensors, state_dict, others)
        except (FormatError, CorruptionError) as error:
            has_path = str(error).startswith(repr(directory))
            raise type(error)(str(error) if has_path else f"{directory!r}: {error}") from None


def _meta(path: str, reader: Reader, weights_only: bool) -> dict[str, Any] | None:
    """Return the content of Lightning's ``meta.pt``; None if there is no such file."""
    try:
        meta = _load(path, reader, Archive(META, 0, reader.size(META)), weights_only=weights_only)
    except FileNotFoundError:
        return None
    except FormatError as error:
        raise FormatError(
            f"{error}. If you trust its author, pass weights_only=False to the Trainer's method, which then executes "
            "code from the file."
        ) from None
    if not isinstance(meta, dict):
        raise FormatError(f"file {META} holds a {type(meta).__name__}, not a dict")
    return meta


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


# ── entries ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Archive(NamedTuple):
    """A part of a file, which ``torch.save`` wrote: a value, or a tensor if it has a dtype (as in safetensors)."""

    file: str
    begin: int
    nbytes: int
    dtype: str | None = None
    shape: Shape = ()

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.begin + self.nbytes}"


class _Stored:
    """The entries of a directory as values, and as stand-ins for tensors.

    Attributes:
        tensors: each "file" is a chunk of a stored tensor.
        paths: of the entries, by key.
        located: stored tensors by key; other entries are values.

    Raises:
        FormatError: naming what ``.metadata`` has in place of an entry of torch.
        CorruptionError: if a file is missing or too short.
    """

    def __init__(self, path: str, reader: Reader) -> None:
        self._path, self._reader, self.tensors = path, reader, DictTensors(reader)
        self._values, self._sizes = dict[str, Archive](), dict[str, int]()
        self.paths, self.located = dict[str, KeyPath](), dict[str, ForeignTensor]()
        try:
            metadata = _read_metadata(reader)
            for key, entry in metadata.state_dict_metadata.items():
                self._take(check_text(key), entry, metadata)
        except CorruptionError:
            raise
        except FormatError as error:
            raise FormatError(f"{DCP_NAME}: {error}") from None
        except _MALFORMED as error:
            raise FormatError(f"{DCP_NAME}: a malformed pickle: {shown(str(error))}") from None

    def _take(self, key: str, entry: Any, metadata: Metadata) -> None:
        planned = metadata.planner_data
        path: Any = planned.get(key) if isinstance(planned, dict) else None
        is_path = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        self.paths[key] = path if is_path else (key,)  # it was not nested, or another planner saved it
        if isinstance(entry, BytesStorageMetadata):
            self._values[key] = self._archive(metadata, key, None)
            return
        dtype, shape, boxes = DTYPES.get(entry.properties.dtype), check_shape(entry.size), list[ForeignBox]()
        if dtype is None:
            raise FormatError(f"{shown(key)}: dtype {shown(entry.properties.dtype)} is not supported")
        bytes_in(shape, dtype)
        for start, lengths in {check_shape(c.offsets): check_shape(c.sizes) for c in entry.chunks}.items():
            if 0 not in lengths:
                archive = self._archive(metadata, key, start)._replace(dtype=dtype, shape=lengths)
                self.tensors.loads[str(archive)] = partial(_load, self._path, self._reader, archive)
                boxes.append(ForeignBox(Box.whole(lengths).shift(start), str(archive), 0))
        self.located[key] = ForeignTensor(dtype, shape, tuple(boxes))

    def _archive(self, metadata: Metadata, key: str, offset: Shape | None) -> Archive:
        place = (metadata.storage_data or {}).get(MetadataIndex(key, offset))
        if place is None:
            raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
        if transforms := place.transform_descriptors:
            raise FormatError(f"{shown(key)} is stored through {shown(transforms)}")
        archive = Archive(check_file_name(place.relative_path), check_size(place.offset), check_size(place.length))
        if archive.file not in self._sizes:
            try:
                self._sizes[archive.file] = self._reader.size(archive.file)
            except FileNotFoundError:
                raise CorruptionError(f"file {archive.file}: the file is missing") from None
        if archive.begin + archive.nbytes > (size := self._sizes[archive.file]):
            raise CorruptionError(f"file {archive} are wanted, it has {size}")
        return archive

    def get(self, key: str, min_ndim: int = 0) -> Any:
        """Return a stand-in for a tensor that has enough dims, else the value."""
        tensor = self.located.get(key)
        return self.value(key) if tensor is None or len(tensor.shape) < min_ndim else self.tensors.stand_in(tensor)

    def value(self, key: str) -> Any:
        """Return an entry as a Python value; a tensor must have a single chunk."""
        if key in self._values:
            return _load(self._path, self._reader, self._values[key])
        tensor = self.located[key]
        if 0 in tensor.shape:
            return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        if [box.box for box in tensor.boxes] != [Box.whole(tensor.shape)]:
            raise FormatError(f"{shown(key)} is a tensor of shape {tensor.shape}, where a small one is expected")
        return self.tensors.loads[tensor.boxes[0].file]()

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


def _load(path: str, reader: Reader, archive: Archive, *, weights_only: bool = True) -> Any:
    """Return the content of an archive. Raises a FormatError that names file and bytes, if it is another."""
    file = io.BytesIO(bytes(archive.nbytes))
    with file.getbuffer() as memory:
        reader.read_into(archive.file, archive.begin, memory)
    try:
        loaded = torch.load(file, "cpu", weights_only=weights_only)
    except MemoryError:
        raise
    except Exception as error:  # torch raises a dozen kinds
        reason = shown(str(error).partition("\n")[0] or type(error).__name__)
        raise FormatError(f"{path!r}, file {archive}: torch.load does not read it: {reason}") from None
    if archive.dtype is None:
        return loaded
    if not isinstance(loaded, torch.Tensor) or loaded.layout is not torch.strided:
        raise FormatError(f"{path!r}, file {archive}: a {type(loaded).__name__}, not a dense tensor")
    if (stored := (DTYPES.get(loaded.dtype), tuple(loaded.shape))) != archive[-2:]:
        raise FormatError(f"{path!r}, file {archive}: {stored} is stored, expected {archive[-2:]}")
    return loaded.resolve_conj().resolve_neg()


# ── metadata ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.3 to 2.13;
# olmo_core/distributed/checkpoint/filesystem.py, OLMo-core 1.9 to 3.0, whose _StorageInfo has the same fields.


def _read_metadata(reader: Reader) -> Metadata:
    """Read ``.metadata``.

    Raises:
        FormatError: for a name that is not in the allow-list, or another content.
        Exception: one of ``_MALFORMED``, for an opcode that torch does not use, or a malformed pickle.
    """
    stored = _Unpickler(io.BytesIO(read_all(reader, DCP_NAME))).load()
    if not isinstance(stored, Metadata):
        raise FormatError(f"{shown(stored)} where a Metadata is expected")
    return stored


class _Place:
    """The place of a value or a chunk, as ``_StorageInfo``."""

    relative_path: Any
    offset: Any
    length: Any
    transform_descriptors: Any = None


class _Properties:
    """The properties of a tensor, as ``TensorProperties``."""

    dtype: Any

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0]


def _ignored(*_: object) -> None:
    """Stand for what is not needed, such as a path."""


_OF_TORCH = (Metadata, TensorStorageMetadata, BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex, StorageMeta)
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN: dict[str, Any] = {
    **{str(dtype): dtype for dtype in DTYPES},
    **{f"{_METADATA}.{kind.__name__}": kind for kind in _OF_TORCH},
    **{f"{one}.distributed.checkpoint.filesystem._StorageInfo": _Place for one in ("torch", "olmo_core")},
    f"{_METADATA}.TensorProperties": _Properties,
    f"{_METADATA}._MEM_FORMAT_ENCODING": _ignored,
    **dict.fromkeys([f"{one}.{name}" for one in ("pathlib", "pathlib._local") for name in _PATH_CLASSES], _ignored),
    "torch.serialization._get_layout": _ignored,
    "torch.Size": tuple,
    "collections.OrderedDict": dict,
}
"""What takes the place of each name that a pickle may mention; it is called with what the pickle says."""

_PythonUnpickler: Any = pickle._Unpickler  # typeshed has none of its methods
_LEFT_OUT = (0x82, 0x83, 0x84, 0x96)  # numbered classes, and a bytearray, which is allocated before it is read
_MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, EOFError),
    *(struct.error, pickle.UnpicklingError),
)


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # of Any
    """Python's unpickler with an allow-list of names, which sets the state of their instances only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by name."""
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise FormatError(f"it names {shown(full)}, which is not data that torch writes there, so it is not read")
        return _KNOWN[full]

    def _build(self) -> None:
        state = self.stack.pop()
        instance = self.stack[-1]
        if isinstance(instance, _Properties):
            instance.__setstate__(state)
        elif isinstance(instance, (*_OF_TORCH, _Place)):  # not a class or a function of the allow-list
            instance.__dict__.update(state)

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in _PythonUnpickler.dispatch.items() if code not in _LEFT_OUT},
        pickle.BUILD[0]: _build,
    }
