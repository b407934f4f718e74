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
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple
from zipfile import ZipFile

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
from lightning_shardckpt.state.tensor_bytes import DTYPES, host_bytes
from lightning_shardckpt.storage.local.local_reader import LocalReader

KeyPath = tuple[str | int, ...]

_LOCAL = struct.Struct("<4s22x2H")  # of a zip entry: signature, lengths of name and extra field
_SMALL_BYTES = 8 << 10  # of a value that is kept, since the settings of most parameters are equal
_WHOLE_BYTES = 256 << 10  # an archive of at most this size is read at once
_MAX_METADATA_BYTES = 1 << 29
_MAX_VALUE_BYTES = 64 << 20  # of a value, for which Python needs a multiple of it


class FilePart(NamedTuple):
    """A part of a file: an archive of ``torch.save``."""

    file: str
    begin: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.file}, bytes {self.begin} to {self.begin + self.nbytes}"


class ArchivedTensor(NamedTuple):
    """The only tensor of an archive; its dtype is named as in safetensors."""

    dtype: str
    shape: Shape
    part: FilePart


class DCPMetadata(NamedTuple):
    """The stored entries by flat key, and the path of each in the state dict.

    The boxes of tensors are in "files" of ``chunks``, one for each chunk that is not empty.
    """

    tensors: dict[str, ForeignTensor]
    chunks: dict[str, ArchivedTensor]
    values: dict[str, FilePart]
    paths: dict[str, KeyPath]


# ── metadata ──────────────────────────────────────────────────────────────────────────────────────────────────────


def read_metadata(reader: LocalReader, name: str) -> DCPMetadata:
    """Read the file of a directory.

    Raises:
        FormatError: if it is malformed, or has content that torch does not write.
    """
    size = reader.size(name)
    if size > _MAX_METADATA_BYTES:
        raise FormatError(f"{name} has {size} bytes, more than {_MAX_METADATA_BYTES}")
    return parse_metadata(_read(reader, FilePart(name, 0, size)), name)


def parse_metadata(content: bytes, where: str) -> DCPMetadata:
    """Parse the content of the file; ``where`` names it in messages. Raises like ``read_metadata``."""
    unpickled = unpickle(content, where)
    try:
        return _entries(_check_type(unpickled, "Metadata"))
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where}: {shown(str(error))}") from None


def _entries(stored: Record) -> DCPMetadata:
    parts, nested = _parts(stored.storage_data), stored.planner_data
    found = DCPMetadata({}, {}, {}, {})
    for key, entry in stored.state_dict_metadata.items():
        path = nested.get(check_text(key)) if isinstance(nested, dict) else None
        if not isinstance(path, tuple) or not path or not all(type(part) in (str, int) for part in path):
            path = (key,)  # it was not nested, or another planner saved it
        found.paths[key] = path
        if isinstance(entry, _CLASSES["BytesStorageMetadata"]):
            found.values[key] = _part(parts, key, None)
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
                part = _part(parts, key, start)
                found.chunks[str(part)] = ArchivedTensor(dtype, lengths, part)
                boxes[start] = ForeignBox(Box.whole(lengths).shift(start), str(part), 0)
        found.tensors[key] = ForeignTensor(dtype, shape, tuple(boxes.values()))
    return found


_Parts = Mapping[tuple[str, Shape | None], FilePart]


def _parts(storage_data: Mapping[Record, Record]) -> _Parts:
    """Return the archive of each chunk, by key and offset in the tensor; None as the offset of a value."""
    parts: dict[tuple[str, Shape | None], FilePart] = {}
    for index, info in storage_data.items():
        if transforms := info.state.get("transform_descriptors"):
            raise FormatError(f"{shown(index.fqn)} is stored through {shown(transforms)}")
        file, offset = check_file_name(info.relative_path), index.state.get("offset")
        part = FilePart(file, check_size(info.offset), check_size(info.length))
        parts[check_text(index.fqn), None if offset is None else check_shape(offset)] = part
    return parts


def _part(parts: _Parts, key: str, offset: Shape | None) -> FilePart:
    part = parts.get((key, offset))
    if part is None:
        raise FormatError(f"{shown(key)}: there is no storage info of the chunk at {offset}")
    return part


def _check_type(value: Any, name: str) -> Record:
    if not isinstance(value, _CLASSES[name]):
        raise FormatError(f"{shown(value)} where a {name} is expected")
    return value


# ── pickle ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Record:
    """The state of an object, in place of the object; the entries of a dict are attributes, too."""

    state: Any = {}  # noqa: RUF012  # never changed

    def __new__(cls, *_: Any) -> Record:  # not __init__, which pickle may skip
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        return self.state[name]


def _record(name: str) -> type[Record]:
    return type(name, (Record,), {})


_OF_METADATA = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex")
_CLASSES = {name: _record(name) for name in (*_OF_METADATA, "TensorProperties", "StorageMeta", "_StorageInfo", "Other")}
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


def unpickle(content: bytes, where: str) -> Any:
    """Return the value of a pickle of any protocol; ``where`` names it in messages.

    Raises:
        FormatError: for a name that is not in the allow-list, an opcode that torch does not use, or a malformed pickle.
    """
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except _MALFORMED as error:
        raise FormatError(f"{where}: a malformed pickle: {shown(str(error))}") from None


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
        if isinstance(self.stack[-1], Record):  # not a class or a function of the allow-list
            self.stack[-1].__setstate__(state)

    dispatch: ClassVar[dict[int, Any]] = {
        **{code: load for code, load in _PythonUnpickler.dispatch.items() if code not in _LEFT_OUT},
        pickle.BUILD[0]: _build,
    }


# ── archives ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _PartFile(io.RawIOBase):
    """A part of a file, opened for reading."""

    def __init__(self, reader: LocalReader, part: FilePart) -> None:
        self._reader, self._part, self._at = reader, part, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, self._part.nbytes)[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        memory = memoryview(target).cast("B")[: max(self._part.nbytes - self._at, 0)]
        self._reader.read_into(self._part.file, self._part.begin + self._at, memory)
        self._at += len(memory)
        return len(memory)


def _open(reader: LocalReader, part: FilePart) -> io.BufferedReader:
    return io.BufferedReader(_PartFile(reader, part))


def _read(reader: LocalReader, part: FilePart) -> bytes:
    content = bytearray(part.nbytes)
    reader.read_into(part.file, part.begin, memoryview(content))
    return bytes(content)


def check_parts(reader: LocalReader, parts: Iterable[FilePart]) -> None:
    """Raise CorruptionError if a file is missing or shorter than a part of it."""
    for part in {part.file: part for part in sorted(parts, key=lambda part: part.begin + part.nbytes)}.values():
        try:
            size = reader.size(part.file)
        except FileNotFoundError:
            raise CorruptionError(f"file {part.file}: the file is missing") from None
        if part.begin + part.nbytes > size:
            raise CorruptionError(f"file {part} are wanted, it has {size}")


def read_value(reader: LocalReader, part: FilePart) -> Any:
    """Return the value in an archive, which the caller must not change."""
    if part.nbytes > _MAX_VALUE_BYTES:
        raise FormatError(f"file {part}: a value of more than {_MAX_VALUE_BYTES} bytes")
    content, load = _read(reader, part), _load_small if part.nbytes < _SMALL_BYTES else _load_value
    return _load_or_raise(lambda: load(content), f"file {part}")


def load_file(reader: LocalReader, name: str, weights_only: bool) -> Any:
    """Return the content of a file of ``torch.save``."""
    part = FilePart(name, 0, reader.size(name))
    return _load_or_raise(lambda: torch.load(_open(reader, part), "cpu", weights_only=weights_only), f"file {part}")


def _load_value(content: bytes) -> Any:
    return torch.load(io.BytesIO(content), "cpu", weights_only=True)


_load_small = lru_cache(maxsize=1024)(_load_value)


def _load_or_raise(load: Callable[[], Any], place: str) -> Any:
    """Return the result of ``load``, which calls ``torch.load``; ``place`` names file and bytes in the error.

    Raises:
        FormatError: if the call fails.
    """
    try:
        return load()
    except (MemoryError, FormatError, CorruptionError):
        raise
    except Exception as error:  # torch raises a dozen kinds
        reason = shown(str(error).partition("\n")[0] or type(error).__name__)
        raise FormatError(f"{place}: torch.load does not read it: {reason}") from None


class ArchiveReader:
    """A reader for which every archived tensor is a file of its row-major bytes. Opens archives when they are read.

    Implements ``Reader``.

    Args:
        path: of the directory, for messages.
        files: the reader of its files, which have the archives.
        tensors: by the name of the file that a tensor is for callers.
    """

    high_latency = False

    def __init__(self, path: str, files: LocalReader, tensors: Mapping[str, ArchivedTensor]) -> None:
        self._path, self._files, self._tensors = path, files, tensors
        self._begins: dict[str, int | None] = {}
        self._held: tuple[str, memoryview] = ("", memoryview(b""))

    def size(self, name: str) -> int:
        """Return the length of a tensor in bytes."""
        return bytes_in(self._tensors[name].shape, self._tensors[name].dtype)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with a tensor's row-major bytes from ``offset`` on.

        Raises:
            FormatError: if the archive has no such tensor.
        """
        tensor = self._tensors[name]
        if name not in self._begins:
            self._begins[name] = None if tensor.part.nbytes <= _WHOLE_BYTES else self._find(tensor)
        if (begin := self._begins[name]) is not None:
            self._files.read_into(tensor.part.file, begin + offset, target)
            return
        if self._held[0] != name:
            self._held = name, host_bytes(self._load(tensor, "cpu"))
        target[:] = self._held[1][offset : offset + len(target)]

    def _load(self, tensor: ArchivedTensor, device: str) -> torch.Tensor:
        part, place = tensor.part, self._place(tensor.part)
        loaded = _load_or_raise(lambda: torch.load(_open(self._files, part), device, weights_only=True), place)
        if not isinstance(loaded, torch.Tensor) or loaded.layout is not torch.strided:
            raise FormatError(f"{place}: a {type(loaded).__name__}, not a dense tensor")
        stored, expected = (DTYPES.get(loaded.dtype), tuple(loaded.shape)), (tensor.dtype, tensor.shape)
        if stored != expected:
            raise FormatError(f"{place}: {stored} is stored, expected {expected}")
        return loaded

    def _place(self, part: FilePart) -> str:
        return f"checkpoint {self._path!r}, file {part}"

    def _find(self, tensor: ArchivedTensor) -> int | None:
        """Return the offset of the row-major bytes in the file; None if they are in another order."""
        described = self._load(tensor, "meta")
        if not described.is_contiguous() or described.is_conj() or described.is_neg():
            return None
        offset = int(described.storage_offset()) * described.itemsize
        begin: int | None = _load_or_raise(
            lambda: self._bytes_begin(tensor.part, offset, described.nbytes), self._place(tensor.part)
        )
        return begin

    def _bytes_begin(self, part: FilePart, offset: int, nbytes: int) -> int | None:
        """Return where bytes of the only storage in an archive begin in the file; None if they are not there as such.
        """
        with ZipFile(_open(self._files, part)) as archive:
            storages = [entry for entry in archive.infolist() if "/data/" in entry.filename]
            orders = [archive.read(entry) for entry in archive.infolist() if entry.filename.endswith("/byteorder")]
        if len(storages) != 1 or storages[0].compress_type or orders not in ([], [sys.byteorder.encode()]):
            return None
        (entry,), header = storages, bytearray(_LOCAL.size)
        self._files.read_into(part.file, part.begin + entry.header_offset, memoryview(header))
        signature, name_bytes, extra_bytes = _LOCAL.unpack(header)
        begin = int(entry.header_offset + _LOCAL.size + name_bytes + extra_bytes)
        if signature != b"PK\3\4" or offset + nbytes > entry.file_size or begin + entry.file_size > part.nbytes:
            raise ValueError(f"{entry.filename} is not where its directory says, or too short")
        return part.begin + begin + offset

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return sorted(self._tensors)

    def clone(self) -> ArchiveReader:
        """Return a reader of the same files for another thread."""
        return ArchiveReader(self._path, self._files.clone(), self._tensors)

    def close(self) -> None:
        """Close the files."""
        self._files.close()
