"""The file ``.metadata`` of ``torch.distributed.checkpoint``: a pickle that is read as data. No torch.

Python's unpickler in C allocates gigabytes for a pickle of ten bytes, so this one is based on the one in Python. It
gets only the operations with which Python writes data, and makes objects of an allow-list of classes; of these only the
state is kept. So no code of the pickle runs, and memory is proportional to its length.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``, torch 2.0 to 2.13;
``olmo_core/distributed/checkpoint/filesystem.py``, OLMo-core 1.9 to 3.0, whose ``_StorageInfo`` has the same fields.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.value_checks import (
    TORCH_NAMES,
    bytes_in,
    check_file_name,
    check_shape,
    check_size,
    check_text,
    shown,
)

KeyPath = tuple[str | int, ...]

_DTYPES = {f"torch.{of_torch}": name for name, of_torch in TORCH_NAMES.items()}


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file: an archive of ``torch.save``."""

    file: str
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.begin + self.nbytes}"


@dataclass(frozen=True, slots=True)
class DCPTensor:
    """A tensor: its dtype, named as in safetensors, its shape, and its non-empty chunks with their archives."""

    dtype: str
    shape: Shape
    chunks: tuple[tuple[Box, FilePart], ...]


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
    unpickled = unpickle(content, where)
    try:
        state = _state(unpickled, "Metadata")
        parts = _parts(state["storage_data"])
        tensors, values = dict[str, DCPTensor](), dict[str, FilePart]()
        for key, stored in state["state_dict_metadata"].items():
            if isinstance(stored, _CLASSES["BytesStorageMetadata"]):
                values[check_text(key)] = _part(parts, key, None)
            else:
                tensors[check_text(key)] = _tensor(key, _state(stored, "TensorStorageMetadata"), parts)
        nested = state.get("planner_data")
        paths = {key: _path(key, nested.get(key) if isinstance(nested, dict) else None) for key in (*tensors, *values)}
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: {shown(str(error))}") from None
    return DCPMetadata(tensors, values, paths)


def _state(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, _CLASSES[name]) or not isinstance(value.state, dict):
        raise FormatError(f"{shown(value)} where a {name} is expected")
    return value.state


_Parts = Mapping[tuple[str, Shape | None], FilePart]


def _parts(value: dict[Record, Record]) -> _Parts:
    """Return the archive of each chunk, by key and offset in the tensor; None as the offset of a value."""
    parts: dict[tuple[str, Shape | None], FilePart] = {}
    for index, stored in value.items():
        key, place = _state(index, "MetadataIndex"), _state(stored, "_StorageInfo")
        if place.get("transform_descriptors"):
            raise FormatError(f"{shown(key['fqn'])} is stored through {shown(place['transform_descriptors'])}")
        file, offset = check_file_name(place["relative_path"]), key.get("offset")
        part = FilePart(file, check_size(place["offset"]), check_size(place["length"]))
        parts[check_text(key["fqn"]), None if offset is None else check_shape(offset)] = part
    return parts


def _part(parts: _Parts, key: str, offset: Shape | None) -> FilePart:
    part = parts.get((key, offset))
    if part is None:
        raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
    return part


def _tensor(key: str, state: dict[str, Any], parts: _Parts) -> DCPTensor:
    properties = state["properties"]
    if not isinstance(properties, _CLASSES["TensorProperties"]):
        raise FormatError(f"{shown(key)}: {shown(properties)} where its properties are expected")
    fields = properties.state  # a tuple, or without __getstate__ a dict
    dtype = fields["dtype"] if isinstance(fields, dict) else fields[0]
    if dtype not in TORCH_NAMES:
        raise FormatError(f"{shown(key)}: dtype {shown(dtype)} is not supported")
    shape = check_shape(state["size"])
    bytes_in(shape, dtype)
    chunks: dict[Shape, tuple[Box, FilePart]] = {}
    for stored in state["chunks"]:
        chunk = _state(stored, "ChunkStorageMetadata")
        start, lengths = check_shape(chunk["offsets"]), check_shape(chunk["sizes"])
        if 0 not in lengths and start not in chunks:
            box = Box(start, tuple(a + b for a, b in zip(start, lengths, strict=True)))
            chunks[start] = box, _part(parts, key, start)
    return DCPTensor(dtype, shape, tuple(chunks.values()))


def _path(key: str, path: Any) -> KeyPath:
    """Return the path of a key in the state dict; the key alone if it was not nested, or another planner saved it."""
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        return (key,)
    return path


# ── pickle ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class Record:
    """The state of an object, in place of the object."""

    __slots__ = ("state",)

    def __new__(cls, *_: Any) -> Record:  # not __init__, which pickle may skip
        record = super().__new__(cls)
        record.state = {}
        return record

    state: Any


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {"__slots__": ()})


_OF_METADATA = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_CLASSES = {
    name: _record(name) for name in (*_OF_METADATA, "TensorProperties", "StorageMeta", "_StorageInfo", "Other")
}
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KEYS = (str, int, float, bool, bytes, type(None))  # nested tuples could take forever to hash, or overflow the stack


def _make_ordered(items: Any = ()) -> dict[Any, Any]:
    return {_check_key(key): value for key, value in items}


def _check_key(key: Any) -> Any:
    if type(key) not in _KEYS and not isinstance(key, Record):
        raise FormatError(f"a {type(key).__name__} as a key")
    return key


_KNOWN: dict[str, Any] = {
    **_DTYPES,
    **{f"torch.distributed.checkpoint.metadata.{name}": made for name, made in _CLASSES.items()},
    "torch.distributed.checkpoint.filesystem._StorageInfo": _CLASSES["_StorageInfo"],
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": _CLASSES["_StorageInfo"],
    **{f"{module}.{name}": _CLASSES["Other"] for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES},
    "torch.Size": tuple,
    "torch.serialization._get_layout": _CLASSES["Other"],
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": int,
    # until torch 2.2
    "torch.distributed._shard.sharded_tensor.metadata.TensorProperties": _CLASSES["TensorProperties"],
    "torch.distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING": int,
    "collections.OrderedDict": _make_ordered,
}
"""What takes the place of each name that a pickle may mention; it is called with what the pickle says."""

_PythonUnpickler: Any = pickle._Unpickler  # typeshed has none of its methods
_AS_IN_PYTHON = b"N]})G(0tae.cQRJKMXCBqrhj1" + bytes(
    [0x80, 0x81, 0x95, 0x88, 0x89, 0x8F, 0x94, 0x85, 0x86, 0x87, 0x93, 0x8A, 0x8B, 0x8C, 0x8D, 0x8E]
)
"""The opcodes of ``pickletools`` with which Python writes data, and which neither hash nor set attributes."""
_MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, EOFError),
    *(struct.error, pickle.UnpicklingError),
)


def unpickle(content: bytes, where: str) -> Any:
    """Return the value of a pickle of any protocol, with a ``Record`` for each object; ``where`` names it in messages.

    Raises:
        FormatError: for a name that is not in the allow-list, an opcode that torch does not use, or a malformed pickle.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except _MALFORMED as error:
        raise FormatError(f"{where}: a malformed pickle: {shown(str(error))}") from None


def _check_type(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise FormatError(f"a {type(value).__name__} where a {kind.__name__} is expected")
    return value


class _Operations(dict[int, Any]):
    """The methods by opcode."""

    def __missing__(self, code: int) -> Any:
        raise FormatError(f"operation {bytes([code])!r} is none that torch writes")


class _Unpickler(_PythonUnpickler):  # type: ignore[misc]  # of Any
    """Python's unpickler with fewer operations and names."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what takes the place of a name."""
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise FormatError(f"it names {shown(full)}, which is not data that torch writes there, so it is not read")
        return _KNOWN[full]

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):  # not a class or a function of the allow-list
            self.stack[-1].state = state

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        _check_type(dict, self.stack[-1])[_check_key(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        _check_type(dict, self.stack[-1]).update(zip(map(_check_key, items[::2]), items[1::2], strict=True))

    def _add_items(self) -> None:
        items = self.pop_mark()
        _check_type(set, self.stack[-1]).update(map(_check_key, items))

    dispatch = _Operations({code: _PythonUnpickler.dispatch[code] for code in _AS_IN_PYTHON})
    dispatch |= {ord("b"): _build, ord("s"): _set_item, ord("u"): _set_items, 0x90: _add_items}
