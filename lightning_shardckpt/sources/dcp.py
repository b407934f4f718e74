"""A directory of ``torch.distributed.checkpoint`` as a source: Lightning's sharded checkpoints, OLMo-core's and others.

The entries become the dicts that a file of ``torch.save`` would have, with stand-ins on the meta device for tensors, of
which only the chunks that a rank reads are loaded. No code is executed: ``.metadata``, a pickle, is read into plain
records, by the unpickler in Python, since the one in C allocates gigabytes for a pickle of ten bytes; all else by
``torch.load(weights_only=True)``, Lightning's ``meta.pt`` as well, unless the user passes ``weights_only=False``.

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
from collections.abc import Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.layout import Box, Shape
from lightning_shardckpt.format.value_checks import bytes_in, check_file_name, check_shape, check_size, shown
from lightning_shardckpt.sources.open_source import DCP_NAME
from lightning_shardckpt.sources.source import MALFORMED, ForeignBox, ForeignTensor, Source
from lightning_shardckpt.sources.torch_save import DictTensors, source_of_dicts
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.local_tensors import DTYPES, TORCH_DTYPES
from lightning_shardckpt.state.model import is_extra_state
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.protocol import read_all

_META = "meta.pt"
_ADVICE = ". If you trust its author, pass weights_only=False to the Trainer's method, which executes code from it."
_STATE, _GROUPS = "state", "param_groups"

_Paths = dict[str, tuple[str | int, ...]]
"""Paths of entries in a nested state dict, by key."""


def open_path(path: str, weights_only: bool = True) -> Source:
    """Open the checkpoint in a directory; ``weights_only`` is for Lightning's ``meta.pt``."""
    stored, by_top, meta = _Stored(path), dict[str, _Paths](), None
    with suppress(FileNotFoundError):
        meta = dict(stored.load(_Place(_META, 0, stored.size(_META)), weights_only=weights_only))
    for key, place in stored.paths.items():
        by_top.setdefault(str(place[0]), {})[key] = place[1:]
    optimizers = [top for top, of in by_top.items() if _GROUPS in {_split(place)[0] for place in of.values()}]
    others = [top for top, of in by_top.items() if top not in optimizers and any(map(stored.is_tensor, of))]
    nested = [top for top in others if all(by_top[top].values())]
    chosen = [top for top in nested if top in ("model", "state_dict")]
    if len(chosen) != 1:  # a single dict of tensors beside meta.pt or an optimizer is a model, whatever its name
        chosen = nested if len(nested) == len(others) == 1 and (meta is not None or optimizers) else []
    keys = dict[str, str]()
    for top in others:
        for key, place in by_top[top].items():
            name = clean_fqn(".".join(map(str, place)) if top in chosen else key)
            if (other := keys.setdefault(name, key)) != key:
                raise FormatError(f"{shown(other)} and {shown(key)} are both an entry {shown(name)} of the model")
    state_dict = {n: stored.value(key) if is_extra_state(n) else stored.get(key) for n, key in keys.items()}
    rest = dict[Any, Any]()
    for key, place in stored.paths.items():
        if str(place[0]) not in (*optimizers, *others):
            inner = rest
            for part in place[:-1]:
                inner = inner.setdefault(part, {})
            inner[place[-1]] = stored.value(key)
    checkpoint = rest | (meta or {})
    if optimizers or "lr_schedulers" in checkpoint:  # of a Trainer whose optimizers may have had no state
        tops = sorted(optimizers, key=lambda top: (len(top), top))  # "optimizer_10" comes after "optimizer_9"
        checkpoint["optimizer_states"] = [_optimizer(stored, by_top[top]) for top in tops]
    return source_of_dicts(path, stored.tensors, state_dict, checkpoint)


def _optimizer(stored: _Stored, paths: _Paths) -> dict[str, Any]:
    """Return the state dict of an optimizer, given the paths of its entries."""
    state, settings, groups = dict[str, Any](), dict[str, Any](), list[dict[str, Any]]()
    for key, path in paths.items():
        kind, owner, name = _split(path)
        if kind == _STATE and owner:
            state.setdefault(owner, {})[name] = stored.get(key, min_ndim=1)
        elif kind == _GROUPS and owner:
            settings.setdefault(owner, {})[name] = stored.value(key)
        elif kind == _GROUPS and not name:
            groups += stored.value(key)
        else:
            raise FormatError(f"{shown(key)} is not an entry of an optimizer of torch")
    if any(len(path) > 1 and path[0] == _GROUPS for path in paths.values()):  # they are numbered
        groups += [settings[number] for number in sorted(settings, key=int)]
    else:  # settings are stored for each parameter, and equal ones are a group
        joined = dict[str, dict[str, Any]]()
        for name, group in settings.items():
            text = json.dumps(encode_small(group, name), sort_keys=True)
            joined.setdefault(text, {**group, "params": []})["params"].append(name)
        groups += joined.values()
    for group in groups:
        group["params"] = [clean_fqn(name) if isinstance(name, str) else int(name) for name in group["params"]]
    numbers = {f"{param}": param for group in groups for param in group["params"]}
    return {"state": {numbers.get(n := clean_fqn(name), n): of for name, of in state.items()}, _GROUPS: groups}


def _split(path: tuple[str | int, ...]) -> tuple[str, str, str]:
    """Return the kind of an optimizer's entry, nested or flattened, its parameter or group's number, and its name."""
    kind, _, rest = ".".join(map(str, path)).partition(".")
    owner, _, name = rest.rpartition(".")
    return kind, owner, name


# ── entries ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Place(NamedTuple):
    """A part of a file, which ``torch.save`` wrote."""

    file: str
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.begin + self.nbytes}"


class _Stored:
    """The entries of a directory as values, and as stand-ins for tensors.

    Attributes:
        tensors: each "file" is a chunk of a stored tensor.
        paths: of the entries, by key.
        size: returns the bytes of a file.
    """

    def __init__(self, path: str) -> None:
        self._path, self._reader = path, LocalReader(path)
        self.size, self.tensors = cache(self._reader.size), DictTensors(self._reader)
        self.paths, self._entries = _Paths(), dict[str, _Place | ForeignTensor]()
        try:
            metadata: Any = _Unpickler(io.BytesIO(read_all(self._reader, DCP_NAME))).load()
        except (*MALFORMED, struct.error, pickle.UnpicklingError) as error:
            raise FormatError(f"{DCP_NAME}: a malformed pickle: {str(error)[:500]}") from None
        if type(metadata).__name__ != "Metadata":
            raise FormatError(f"{DCP_NAME}: {shown(metadata)} where a Metadata is expected")
        infos = {(i.fqn, i.offset and tuple(i.offset)): info for i, info in (metadata.storage_data or {}).items()}
        for key, entry in metadata.state_dict_metadata.items():
            self._entries[key] = self._tensor(key, entry, infos) if "chunks" in vars(entry) else self._place(key, infos)
            keys: Any = metadata.planner_data.get(key) if isinstance(metadata.planner_data, dict) else None
            is_path = isinstance(keys, tuple) and keys and all(type(part) in (str, int) for part in keys)
            self.paths[key] = keys if is_path else (key,)  # it was not nested, or another planner saved it

    def _tensor(self, key: str, entry: Any, infos: Mapping[Any, Any]) -> ForeignTensor:
        dtype, shape, boxes = DTYPES.get(entry.properties.state[0]), check_shape(entry.size), list[ForeignBox]()
        if dtype is None:
            raise FormatError(f"{shown(key)}: dtype {shown(entry.properties.state[0])} is not supported")
        bytes_in(shape, dtype)  # or it raises an error
        for start, lengths in {check_shape(c.offsets): check_shape(c.sizes) for c in entry.chunks}.items():
            if 0 not in lengths:
                place = self._place(key, infos, start)
                self.tensors.loads[str(place)] = partial(self._load_chunk, place, dtype, lengths)
                boxes.append(ForeignBox(Box.whole(lengths).shift(start), str(place), 0))
        return ForeignTensor(dtype, shape, tuple(boxes))

    def _place(self, key: str, infos: Mapping[Any, Any], offset: Shape | None = None) -> _Place:
        """Return the place of an entry, or of the chunk of a tensor at an offset."""
        if (info := infos.get((key, offset))) is None:
            raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
        if transforms := info.transform_descriptors:
            raise FormatError(f"{shown(key)} is stored through {shown(transforms)}")
        place = _Place(check_file_name(info.relative_path), check_size(info.offset), check_size(info.length))
        try:
            size = self.size(place.file)
        except FileNotFoundError:
            raise CorruptionError(f"file {place.file}: the file is missing") from None
        if place.begin + place.nbytes > size:
            raise CorruptionError(f"file {place} are wanted, it has {size}")
        return place

    def load(self, place: _Place, *, weights_only: bool = True) -> Any:
        """Return a value that ``torch.save`` wrote."""
        content = io.BytesIO(bytes(place.nbytes))
        with content.getbuffer() as memory:
            self._reader.read_into(place.file, place.begin, memory)
        try:
            return torch.load(content, "cpu", weights_only=weights_only)
        except Exception as error:  # torch raises a dozen kinds
            reason = shown(str(error).partition("\n")[0] or type(error).__name__)
            reason += _ADVICE if place.file == _META else ""
            raise FormatError(f"{self._path!r}, file {place}: torch.load does not read it: {reason}") from None

    def _load_chunk(self, place: _Place, dtype: str, shape: Shape) -> torch.Tensor:
        tensor: torch.Tensor = self.load(place)
        is_dense = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not is_dense or (DTYPES.get(tensor.dtype), tuple(tensor.shape)) != (dtype, shape):
            raise FormatError(f"{self._path!r}, file {place}: {shown(tensor)} is stored, expected {dtype} {shape}")
        return tensor

    def is_tensor(self, key: str) -> bool:
        """Return whether an entry is a tensor; others are values."""
        return isinstance(self._entries[key], ForeignTensor)

    def get(self, key: str, min_ndim: int = 0) -> Any:
        """Return a stand-in for a tensor that has enough dims, else the value."""
        entry = self._entries[key]
        if isinstance(entry, ForeignTensor) and len(entry.shape) >= min_ndim:
            return self.tensors.stand_in(entry)
        return self.value(key)

    def value(self, key: str) -> Any:
        """Return an entry as a Python value; a tensor must have a single chunk."""
        entry = self._entries[key]
        if isinstance(entry, _Place):
            return self.load(entry)
        dtype, shape, boxes = entry
        if 0 in shape:
            return torch.empty(shape, dtype=TORCH_DTYPES[dtype])
        if [box.box for box in boxes] != [Box.whole(shape)]:
            raise FormatError(f"{shown(key)} is a tensor of shape {shape}, where a small one is expected")
        return self.tensors.loads[boxes[0].file]()


# ── metadata ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Source: torch/distributed/checkpoint/metadata.py and filesystem.py, torch 2.3 to 2.13;
# olmo_core/distributed/checkpoint/filesystem.py, OLMo-core 1.9 to 3.0, whose _StorageInfo has the same fields.


class _Record:
    """In place of an instance of a class that a pickle names, or of a function's result: its attributes."""

    offset: Any = None
    transform_descriptors: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state if isinstance(state, dict) else {"state": state})


_OF_TORCH = (
    *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex"),
    *("StorageMeta", "TensorProperties", "_MEM_FORMAT_ENCODING"),
)
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_RECORDS = {
    *(f"torch.distributed.checkpoint.metadata.{name}" for name in _OF_TORCH),
    *(f"{one}.distributed.checkpoint.filesystem._StorageInfo" for one in ("torch", "olmo_core")),
    *(f"{one}.{name}" for one in ("pathlib", "pathlib._local") for name in _PATHS),
    "torch.serialization._get_layout",
}
_VALUES = {str(dtype): dtype for dtype in DTYPES} | {"torch.Size": tuple, "collections.OrderedDict": dict}

_PythonUnpickler: Any = pickle._Unpickler  # typeshed has none of its methods
_LEFT_OUT = (0x82, 0x83, 0x84, 0x96)  # numbered classes, and a bytearray, which is allocated before it is read


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # of Any
    """Python's unpickler, which makes records of known names, and imports nothing."""

    dispatch: ClassVar[dict[int, Any]] = {
        code: load for code, load in _PythonUnpickler.dispatch.items() if code not in _LEFT_OUT
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return what takes the place of a class or function: a class of its own, so that a pickle changes no other."""
        full = f"{module}.{name}"
        if full not in _RECORDS and full not in _VALUES:
            raise FormatError(f"it names {shown(full)}, which is not data that torch writes there, so it is not read")
        return type(name, (_Record,), {}) if full in _RECORDS else _VALUES[full]
