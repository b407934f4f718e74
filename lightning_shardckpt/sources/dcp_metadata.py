"""The ``.metadata`` of torch's distributed checkpoint: a pickle that is parsed as data and never executed.

Source: ``torch/distributed/checkpoint/metadata.py``, ``filesystem.py`` and ``_nested_dict.py``, torch 2.0 to 2.13;
``olmo_core/distributed/checkpoint/filesystem.py``, OLMo-core 1.9 to 3.0, whose ``_StorageInfo`` has the same fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.value_checks import (
    bytes_in,
    check_file_name,
    check_shape,
    check_size,
    check_text,
    shown,
)
from lightning_shardckpt.sources.safe_unpickler import Called, Known, Record, make_ordered, record, text, unpickle
from lightning_shardckpt.sources.torch_pickle import KNOWN_DTYPES, FilePart

MAX_BYTES = 1 << 29
Path = tuple[str | int, ...]

_CLASSES = {
    "Metadata": "metadata",
    "TensorStorageMetadata": "tensor",
    "BytesStorageMetadata": "value",
    "ChunkStorageMetadata": "chunk",
    "MetadataIndex": "index",
    "TensorProperties": "properties",
    "StorageMeta": "about",
}
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_KNOWN: Known = {
    **KNOWN_DTYPES,
    **{f"torch.distributed.checkpoint.metadata.{name}": record(kind) for name, kind in _CLASSES.items()},
    "torch.distributed.checkpoint.filesystem._StorageInfo": record("place"),
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": record("place"),
    **{f"{module}.{name}": record("path") for module in ("pathlib", "pathlib._local") for name in _PATHS},
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
    paths: dict[str, Path]


def parse(content: bytes, where: str) -> DCPMetadata:
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


def _path(key: str, path: Any) -> Path:
    """Return the path of a key in the state dict; the key alone if it was not nested, or another planner saved it."""
    if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
        return (key,)
    return path
