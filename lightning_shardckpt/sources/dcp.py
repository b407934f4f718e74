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
from copy import deepcopy
from functools import lru_cache
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
from lightning_shardckpt.sources.torch_save import source_of_dicts
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.protocol import Reader

META = "meta.pt"
_SMALL_BYTES = 8 << 10  # of a value that is kept, since the settings of most parameters are equal
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
            return _source(directory, reader, _meta(reader, weights_only))
        except (FormatError, CorruptionError) as error:
            has_path = str(error).startswith(repr(directory))
            raise type(error)(str(error) if has_path else f"{directory!r}: {error}") from None


def _meta(reader: LocalReader, weights_only: bool) -> dict[str, Any] | None:
    """Return the content of Lightning's ``meta.pt``; None if there is no such file."""
    try:
        meta = _load(reader, Archive(META, 0, reader.size(META)), weights_only=weights_only)
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


def _source(path: str, reader: LocalReader, meta: dict[str, Any] | None) -> Source:
    stored = _Stored(reader)
    model, optimizers, rest = assign_entries(stored.paths, stored.tensors, has_meta=meta is not None)
    state_dict = {name: stored.value(key) if is_extra_state(name) else stored.get(key) for name, key in model.items()}
    others = stored.nested(rest) | (meta or {})
    if optimizers or "lr_schedulers" in others:  # of a Trainer whose optimizers may have had no state and groups
        others["optimizer_states"] = [stored.optimizer(paths, model) for paths in optimizers]

    def load(name: str) -> torch.Tensor:
        try:
            return stored.chunk(name)
        except FormatError as error:
            raise FormatError(f"checkpoint {path!r}, {error}") from None

    def locate(_: str, stand_in: torch.Tensor) -> ForeignTensor:
        return stored.located[id(stand_in)][1]

    return source_of_dicts(path, reader, load, state_dict, others, locate)


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
    """A part of a file: what ``torch.save`` wrote."""

    file: str
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.begin + self.nbytes}"


class Chunk(NamedTuple):
    """An archive of a single tensor, a chunk of a stored one; its dtype is named as in safetensors."""

    archive: Archive
    dtype: str
    shape: Shape


class _Stored:
    """The entries of a directory as values, and as stand-ins for tensors.

    Raises the errors of ``_read_metadata``, and a CorruptionError if a file is missing or too short.

    Attributes:
        paths: of the entries, by key.
        tensors: by key; their boxes are in the "files" of ``chunks``.
        chunks: by name.
        located: stand-ins and the stored tensors that they stand for, by ``id`` of the stand-in.
    """

    def __init__(self, reader: LocalReader) -> None:
        self._reader, self._values = reader, dict[str, Archive]()
        self.paths, self.tensors = dict[str, KeyPath](), dict[str, ForeignTensor]()
        self.chunks = dict[str, Chunk]()
        self.located: dict[int, tuple[torch.Tensor, ForeignTensor]] = {}
        try:
            self._take(_read_metadata(reader))
        except FormatError as error:
            raise FormatError(f"{DCP_NAME}: {error}") from None
        except _MALFORMED as error:
            raise FormatError(f"{DCP_NAME}: a malformed pickle: {shown(str(error))}") from None
        archives = [*(chunk.archive for chunk in self.chunks.values()), *self._values.values()]
        for archive in {a.file: a for a in sorted(archives, key=lambda a: a.begin + a.nbytes)}.values():
            try:
                size = reader.size(archive.file)
            except FileNotFoundError:
                raise CorruptionError(f"file {archive.file}: the file is missing") from None
            if archive.begin + archive.nbytes > size:
                raise CorruptionError(f"file {archive} are wanted, it has {size}")

    def _take(self, stored: Metadata) -> None:
        places, planner_data = stored.storage_data or {}, stored.planner_data

        def archive(key: str, offset: Shape | None) -> Archive:
            place = places.get(MetadataIndex(key, offset))
            if place is None:
                raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
            if transforms := place.transform_descriptors:
                raise FormatError(f"{shown(key)} is stored through {shown(transforms)}")
            return Archive(check_file_name(place.relative_path), check_size(place.offset), check_size(place.length))

        for key, entry in stored.state_dict_metadata.items():
            path = planner_data.get(check_text(key)) if isinstance(planner_data, dict) else None
            if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
                path = (key,)  # it was not nested, or another planner saved it
            self.paths[key] = path
            if isinstance(entry, BytesStorageMetadata):
                self._values[key] = archive(key, None)
                continue
            dtype, shape, boxes = DTYPES.get(entry.properties.dtype), check_shape(entry.size), list[ForeignBox]()
            if dtype is None:
                raise FormatError(f"{shown(key)}: dtype {shown(entry.properties.dtype)} is not supported")
            bytes_in(shape, dtype)
            for start, lengths in {check_shape(c.offsets): check_shape(c.sizes) for c in entry.chunks}.items():
                if 0 not in lengths:
                    chunk = Chunk(archive(key, start), dtype, lengths)
                    self.chunks[str(chunk.archive)] = chunk
                    boxes.append(ForeignBox(Box.whole(lengths).shift(start), str(chunk.archive), 0))
            self.tensors[key] = ForeignTensor(dtype, shape, tuple(boxes))

    def get(self, key: str, min_ndim: int = 0) -> Any:
        """Return a stand-in for a tensor that has enough dims, else the value."""
        tensor = self.tensors.get(key)
        if tensor is None or len(tensor.shape) < min_ndim:
            return self.value(key)
        stand_in = torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device="meta")
        self.located[id(stand_in)] = stand_in, tensor
        return stand_in

    def value(self, key: str) -> Any:
        """Return an entry as a Python value; a tensor must have a single chunk."""
        if key in self._values:
            return _load(self._reader, self._values[key])
        tensor = self.tensors[key]
        if not bytes_in(tensor.shape, tensor.dtype):
            return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
        if [box.box for box in tensor.boxes] != [Box.whole(tensor.shape)]:
            raise FormatError(f"{shown(key)} is a tensor of shape {tensor.shape}, where a small one is expected")
        return self.chunk(tensor.boxes[0].file)

    def chunk(self, name: str) -> torch.Tensor:
        """Return the tensor of a chunk. Raises a FormatError if it is not in the archive."""
        archive, *expected = self.chunks[name]
        loaded = _load(self._reader, archive)
        if not isinstance(loaded, torch.Tensor) or loaded.layout is not torch.strided:
            raise FormatError(f"file {archive}: a {type(loaded).__name__}, not a dense tensor")
        if (stored := [DTYPES.get(loaded.dtype), tuple(loaded.shape)]) != expected:
            raise FormatError(f"file {archive}: {stored} is stored, expected {expected}")
        return loaded.resolve_conj().resolve_neg()

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


# ── archives ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _ArchiveFile(io.RawIOBase):
    """An archive, opened for reading."""

    def __init__(self, reader: Reader, archive: Archive) -> None:
        self._reader, self._archive, self._at = reader, archive, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, self._archive.nbytes)[whence], 0)
        return self._at

    def readinto(self, target: Any) -> int:
        memory = memoryview(target).cast("B")[: max(self._archive.nbytes - self._at, 0)]
        self._reader.read_into(self._archive.file, self._archive.begin + self._at, memory)
        self._at += len(memory)
        return len(memory)


def _load(reader: Reader, archive: Archive, *, weights_only: bool = True) -> Any:
    """Return the content of an archive. Raises a FormatError that names file and bytes, if ``torch.load`` fails."""
    file = _ArchiveFile(reader, archive)
    try:
        if archive.nbytes <= _SMALL_BYTES and weights_only:
            return deepcopy(_load_small(file.readall()))
        return torch.load(io.BufferedReader(file), "cpu", weights_only=weights_only)
    except (MemoryError, FormatError, CorruptionError):
        raise
    except Exception as error:  # torch raises a dozen kinds
        reason = shown(str(error).partition("\n")[0] or type(error).__name__)
        raise FormatError(f"file {archive}: torch.load does not read it: {reason}") from None


@lru_cache(maxsize=1024)
def _load_small(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), "cpu", weights_only=True)


# ── metadata ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.0 to 2.13;
# olmo_core/distributed/checkpoint/filesystem.py, OLMo-core 1.9 to 3.0, whose _StorageInfo has the same fields.


def _read_metadata(reader: LocalReader) -> Metadata:
    """Read ``.metadata``.

    Raises:
        FormatError: for a name that is not in the allow-list, or another content.
        Exception: one of ``_MALFORMED``, for an opcode that torch does not use, or a malformed pickle.
    """
    file = _ArchiveFile(reader, Archive(DCP_NAME, 0, reader.size(DCP_NAME)))
    stored = _Unpickler(io.BytesIO(file.readall())).load()
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
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_KNOWN: dict[str, Any] = {
    **{str(dtype): dtype for dtype in DTYPES},
    **{f"{_METADATA}.{kind.__name__}": kind for kind in _OF_TORCH},
    **{f"{one}.distributed.checkpoint.filesystem._StorageInfo": _Place for one in ("torch", "olmo_core")},
    **{f"{module}.TensorProperties": _Properties for module in (_METADATA, _SHARDED_TENSOR)},
    **dict.fromkeys((f"{_METADATA}._MEM_FORMAT_ENCODING", f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING"), _ignored),
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
