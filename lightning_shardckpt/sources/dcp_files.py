"""Files of ``torch.distributed.checkpoint``: ``.metadata``, a pickle, and files of many archives of ``torch.save``.

The pickle is read with an allow-list of names by the unpickler in Python, since the one in C allocates gigabytes for a
pickle of ten bytes; archives are read by ``torch.load(weights_only=True)``. No code from either runs, and memory is
proportional to the length of the content.

Source: ``torch/distributed/checkpoint/metadata.py`` and ``filesystem.py``, torch 2.0 to 2.13;
``olmo_core/distributed/checkpoint/filesystem.py``, OLMo-core 1.9 to 3.0, whose ``_StorageInfo`` has the same fields.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.value_checks import (
    bytes_in,
    check_file_name,
    check_shape,
    check_size,
    check_text,
    shown,
)
from lightning_shardckpt.sources.foreign_source import ForeignBox, ForeignTensor
from lightning_shardckpt.state.tensor_bytes import DTYPES
from lightning_shardckpt.storage.local_reader import LocalReader
from lightning_shardckpt.storage.protocol import Reader

KeyPath = tuple[str | int, ...]

_SMALL_BYTES = 8 << 10  # of a value that is kept, since the settings of most parameters are equal
_MAX_METADATA_BYTES = 1 << 29
_MAX_VALUE_BYTES = 64 << 20  # of a value, for which Python needs a multiple of it


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


class DCPMetadata(NamedTuple):
    """The stored entries by flat key: tensors, whose boxes are in the "files" of ``chunks``; values; paths of both."""

    tensors: dict[str, ForeignTensor]
    chunks: dict[str, Chunk]
    values: dict[str, Archive]
    paths: dict[str, KeyPath]


# ── metadata ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read_metadata(reader: LocalReader, name: str) -> DCPMetadata:
    """Read the file of a directory, and check that the files that it names are long enough.

    Raises:
        FormatError: for a name that is not in the allow-list, an opcode that torch does not use, a malformed pickle, or
            content that torch does not write.
        CorruptionError: if a file is missing or too short.
    """
    size = reader.size(name)
    if size > _MAX_METADATA_BYTES:
        raise FormatError(f"{name} has {size} bytes, more than {_MAX_METADATA_BYTES}")
    try:
        unpickled = _Unpickler(io.BytesIO(_read(reader, Archive(name, 0, size)))).load()
        stored = _entries(_check_type(unpickled, "Metadata"))
    except FormatError as error:
        raise FormatError(f"{name}: {error}") from None
    except _MALFORMED as error:
        raise FormatError(f"{name}: a malformed pickle: {shown(str(error))}") from None
    archives = [*(chunk.archive for chunk in stored.chunks.values()), *stored.values.values()]
    for archive in {a.file: a for a in sorted(archives, key=lambda a: a.begin + a.nbytes)}.values():
        try:
            size = reader.size(archive.file)
        except FileNotFoundError:
            raise CorruptionError(f"file {archive.file}: the file is missing") from None
        if archive.begin + archive.nbytes > size:
            raise CorruptionError(f"file {archive} are wanted, it has {size}")
    return stored


def _entries(stored: _Record) -> DCPMetadata:
    archives = dict[tuple[str, Shape | None], Archive]()  # by key and offset in the tensor; None as that of a value
    for index, info in stored.storage_data.items():
        if transforms := info.state.get("transform_descriptors"):
            raise FormatError(f"{shown(index.fqn)} is stored through {shown(transforms)}")
        offset = index.state.get("offset")
        at = check_text(index.fqn), None if offset is None else check_shape(offset)
        archives[at] = Archive(check_file_name(info.relative_path), check_size(info.offset), check_size(info.length))

    def archive_at(key: str, offset: Shape | None) -> Archive:
        if (key, offset) not in archives:
            raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
        return archives[key, offset]

    found = DCPMetadata({}, {}, {}, {})
    for key, entry in stored.state_dict_metadata.items():
        path = stored.planner_data.get(check_text(key)) if isinstance(stored.planner_data, dict) else None
        if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
            path = (key,)  # it was not nested, or another planner saved it
        found.paths[key] = path
        if isinstance(entry, _CLASSES["BytesStorageMetadata"]):
            found.values[key] = archive_at(key, None)
            continue
        state = _check_type(_check_type(entry, "TensorStorageMetadata").properties, "TensorProperties").state
        stored_dtype = state["dtype"] if isinstance(state, dict) else state[0]  # a tuple, if it has __getstate__
        dtype = DTYPES.get(stored_dtype) if isinstance(stored_dtype, torch.dtype) else None
        if dtype is None:
            raise FormatError(f"{shown(key)}: dtype {shown(stored_dtype)} is not supported")
        shape, boxes = check_shape(entry.size), dict[Shape, ForeignBox]()
        bytes_in(shape, dtype)
        for chunk in entry.chunks:
            start, lengths = check_shape(chunk.offsets), check_shape(chunk.sizes)
            if 0 not in lengths and start not in boxes:
                archive = archive_at(key, start)
                found.chunks[str(archive)] = Chunk(archive, dtype, lengths)
                boxes[start] = ForeignBox(Box.whole(lengths).shift(start), str(archive), 0)
        found.tensors[key] = ForeignTensor(dtype, shape, tuple(boxes.values()))
    return found


# ── pickle ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Record:
    """The state of an object, in place of the object; the entries of a dict are attributes, too."""

    state: Any = {}  # noqa: RUF012  # never changed

    def __new__(cls, *_: Any) -> _Record:  # not __init__, which pickle may skip
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        return self.state[name]


def _check_type(value: Any, name: str) -> _Record:
    if not isinstance(value, _CLASSES[name]):
        raise FormatError(f"{shown(value)} where a {name} is expected")
    return value


_OF_METADATA = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_RECORDS = (*_OF_METADATA, "TensorProperties", "StorageMeta", "_StorageInfo", "Other")
_CLASSES: dict[str, type[_Record]] = {name: type(name, (_Record,), {}) for name in _RECORDS}
_PATH_CLASSES = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
_SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.metadata"  # until torch 2.2
_KNOWN: dict[str, Any] = {
    **{str(dtype): dtype for dtype in DTYPES},
    **{f"torch.distributed.checkpoint.metadata.{name}": record for name, record in _CLASSES.items()},
    **{f"{module}.{name}": _CLASSES["Other"] for module in ("pathlib", "pathlib._local") for name in _PATH_CLASSES},
    "torch.distributed.checkpoint.filesystem._StorageInfo": _CLASSES["_StorageInfo"],
    "olmo_core.distributed.checkpoint.filesystem._StorageInfo": _CLASSES["_StorageInfo"],
    "torch.Size": tuple,
    "torch.serialization._get_layout": _CLASSES["Other"],
    "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING": _CLASSES["Other"],
    f"{_SHARDED_TENSOR}.TensorProperties": _CLASSES["TensorProperties"],
    f"{_SHARDED_TENSOR}.MEM_FORMAT_ENCODING": _CLASSES["Other"],
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
    """Python's unpickler with an allow-list of names, which sets the state of records only."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class or function by name."""
        full = f"{module}.{name}"
        if full not in _KNOWN:
            raise FormatError(f"it names {shown(full)}, which is not data that torch writes there, so it is not read")
        return _KNOWN[full]

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], _Record):  # not a class or a function of the allow-list
            self.stack[-1].__setstate__(state)

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in _PythonUnpickler.dispatch.items() if code not in _LEFT_OUT},
        pickle.BUILD[0]: _build,
    }


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

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        memory = memoryview(target).cast("B")[: max(self._archive.nbytes - self._at, 0)]
        self._reader.read_into(self._archive.file, self._archive.begin + self._at, memory)
        self._at += len(memory)
        return len(memory)


def load_archive(reader: Reader, archive: Archive, *, weights_only: bool = True) -> Any:
    """Return the content of an archive.

    Raises:
        FormatError: naming file and bytes, if ``torch.load`` fails.
    """
    with _errors_of_torch(archive):
        return torch.load(io.BufferedReader(_ArchiveFile(reader, archive)), "cpu", weights_only=weights_only)


def read_value(reader: Reader, archive: Archive) -> Any:
    """Return the value in an archive, which the caller must not change."""
    if archive.nbytes > _MAX_VALUE_BYTES:
        raise FormatError(f"file {archive}: a value of more than {_MAX_VALUE_BYTES} bytes")
    if archive.nbytes > _SMALL_BYTES:
        return load_archive(reader, archive)
    with _errors_of_torch(archive):
        return _load_small(_read(reader, archive))


@lru_cache(maxsize=1024)
def _load_small(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), "cpu", weights_only=True)


def _read(reader: Reader, archive: Archive) -> bytes:
    content = bytearray(archive.nbytes)
    reader.read_into(archive.file, archive.begin, memoryview(content))
    return bytes(content)


@contextmanager
def _errors_of_torch(archive: Archive) -> Iterator[None]:
    """Turn errors of ``torch.load`` into a FormatError that names file and bytes."""
    try:
        yield
    except (MemoryError, FormatError, CorruptionError):
        raise
    except Exception as error:  # torch raises a dozen kinds
        reason = shown(str(error).partition("\n")[0] or type(error).__name__)
        raise FormatError(f"file {archive}: torch.load does not read it: {reason}") from None


def load_chunk(reader: Reader, chunk: Chunk) -> torch.Tensor:
    """Return the tensor of a chunk, in row-major order.

    Raises:
        FormatError: if it is not in the archive.
    """
    loaded = load_archive(reader, chunk.archive)
    if not isinstance(loaded, torch.Tensor) or loaded.layout is not torch.strided:
        raise FormatError(f"file {chunk.archive}: a {type(loaded).__name__}, not a dense tensor")
    stored, expected = (DTYPES.get(loaded.dtype), tuple(loaded.shape)), (chunk.dtype, chunk.shape)
    if stored != expected:
        raise FormatError(f"file {chunk.archive}: {stored} is stored, expected {expected}")
    return loaded.resolve_conj().resolve_neg().contiguous()
