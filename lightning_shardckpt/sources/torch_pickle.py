"""Tensors and values in archives of ``torch.save``, located without executing pickles.

A tensor is described by its pickle, which names a storage: a record of the archive with its bytes. Values have plain
types, or are loaded by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.value_checks import (
    DTYPE_BYTES,
    LEGACY_STORAGES,
    TORCH_NAMES,
    check_shape,
    check_size,
    shown,
)
from lightning_shardckpt.sources.safe_unpickler import Called, Known, make_ordered, unpickle
from lightning_shardckpt.storage.protocol import Reader

# ── records of an archive ─────────────────────────────────────────────────────────────────────────────────────────────
# A file of ``torch.save`` is an uncompressed zip archive. torch's distributed checkpoint concatenates many of them in a
# file, one for every tensor. Source: ``caffe2/serialize/inline_container.cc``, torch 2.13.


_LOCAL = struct.Struct("<4s22x2H")  # of a record: signature, lengths of name and extra field
_DIRECTORY_BYTES = 16 << 20


def size_of(reader: Reader, file: str) -> int:
    """Return the length of a file. Raises CorruptionError if it is missing."""
    try:
        return reader.size(file)
    except FileNotFoundError:
        raise CorruptionError(f"file {file}: the file is missing") from None


def check_range(reader: Reader, file: str, begin: int, nbytes: int) -> None:
    """Raise CorruptionError if a file is missing, or does not have these bytes."""
    size = size_of(reader, file)
    if begin < 0 or begin + nbytes > size:
        raise CorruptionError(f"file {file}: bytes {begin} to {begin + nbytes} are wanted, it has {size}")


def read_bytes(reader: Reader, file: str, begin: int, nbytes: int) -> bytes:
    """Return ``nbytes`` of a file from ``begin`` on. Raises CorruptionError if it is missing or too short."""
    check_range(reader, file, begin, nbytes)
    content = bytearray(nbytes)
    try:
        reader.read_into(file, begin, memoryview(content))
    except EOFError as error:  # truncated meanwhile
        raise CorruptionError(f"file {file}: {error}") from None
    return bytes(content)


@dataclass(frozen=True, slots=True)
class FilePart:
    """A part of a file that is an archive."""

    file: str
    begin: int
    nbytes: int


class _PartAsFile:
    """A part of a file with the interface that zipfile needs."""

    def __init__(self, reader: Reader, piece: FilePart) -> None:
        self._reader, self._piece, self._at = reader, piece, 0

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(offset + (0, self._at, self._piece.nbytes)[whence], 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        left = max(self._piece.nbytes - self._at, 0)
        nbytes = left if nbytes < 0 else min(nbytes, left)
        if nbytes > _DIRECTORY_BYTES:
            raise ValueError(f"its directory has {nbytes} bytes")
        content = read_bytes(self._reader, self._piece.file, self._piece.begin + self._at, nbytes) if nbytes else b""
        self._at += nbytes
        return content


class ZipArchive:
    """An archive of ``torch.save``.

    Attributes:
        sizes: of its records, by name without their common folder.

    Raises:
        FormatError: naming file and byte, if it is malformed.
        CorruptionError: if the file is missing or too short.
    """

    def __init__(self, reader: Reader, piece: FilePart) -> None:
        self._reader, self._piece, self._file = reader, piece, _PartAsFile(reader, piece)
        check_range(reader, piece.file, piece.begin, piece.nbytes)
        try:
            with ZipFile(self._file) as archive:
                self._directory_at, records = archive.start_dir, archive.infolist()
        except (BadZipFile, NotImplementedError, struct.error, ValueError) as error:
            raise self.malformed(str(error)) from None
        self._records = {record.filename.partition("/")[2]: record for record in records}
        folders = {record.filename.partition("/")[0] for record in records}
        if len(folders) > 1 or any(r.compress_type or r.file_size != r.compress_size for r in records):
            raise self.malformed("its records are compressed, or in several folders")
        self.sizes = {name: record.file_size for name, record in self._records.items()}

    def malformed(self, problem: str) -> FormatError:
        """Return an error that names file and bytes."""
        piece = self._piece
        where = f"file {piece.file}, bytes {piece.begin} to {piece.begin + piece.nbytes}"
        return FormatError(f"{where}: not an archive of torch.save: {problem}")

    def begin(self, name: str) -> int:
        """Return the offset of a record's bytes in the file, after its local header."""
        if name not in self._records:
            raise self.malformed(f"there is no record {name!r}")
        at = self._file.seek(self._records[name].header_offset)
        header = self._file.read(_LOCAL.size)
        signature, name_bytes, extra_bytes = _LOCAL.unpack(header) if len(header) == _LOCAL.size else (b"", 0, 0)
        begin = at + _LOCAL.size + int(name_bytes) + int(extra_bytes)
        if signature != b"PK\3\4" or begin + self.sizes[name] > self._directory_at:
            raise self.malformed(f"record {name!r} is not where the directory says")
        return self._piece.begin + begin

    def content(self, name: str, limit: int) -> bytes:
        """Return the bytes of a record; refuse one of more than ``limit`` bytes."""
        begin = self.begin(name)
        if self.sizes[name] > limit:
            raise self.malformed(f"record {name!r} has {self.sizes[name]} bytes, more than {limit}")
        return read_bytes(self._reader, self._piece.file, begin, self.sizes[name])


_PICKLE, _SHORT_BYTES = "data.pkl", 8 << 10  # the limit of a tensor's pickle
_VALUE_BYTES = 64 << 20  # the limit of a value, for which Python needs a multiple of it
_BYTES_STORAGE = "bytes"  # in place of the dtype of an untyped storage


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """The description of a tensor in its pickle; ``record`` has its bytes."""

    record: str
    dtype: str
    shape: Shape
    strides: Shape
    offset: int

    @property
    def is_plain(self) -> bool:
        """True if the record is the tensor in row-major order, from the first byte on."""
        if 0 in self.shape:
            return True
        step = 1
        for length, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if length != 1 and stride != step:
                return False
            step *= length
        return self.offset == 0


def _rebuild(storage: tuple[str, str], offset: int, shape: Shape, strides: Shape, *rest: Any) -> PickledTensor:
    record, dtype = storage
    if dtype == _BYTES_STORAGE:
        dtype = rest[2]
    if any(rest[3 if storage[1] == _BYTES_STORAGE else 2 :]) or dtype not in DTYPE_BYTES:
        raise FormatError("a tensor that is a conjugate or negative view, or of an unknown dtype")
    return PickledTensor(record, dtype, check_shape(shape), check_shape(strides), check_size(offset))


KNOWN_DTYPES = {f"torch.{of_torch}": name for name, of_torch in TORCH_NAMES.items()}
_KNOWN: Known = {
    **KNOWN_DTYPES,
    **{f"torch.{storage}": KNOWN_DTYPES[f"torch.{dtype}"] for dtype, storage in LEGACY_STORAGES.items()},
    "torch.storage.UntypedStorage": _BYTES_STORAGE,
    "torch._utils._rebuild_tensor_v2": Called(_rebuild),
    "torch._utils._rebuild_tensor_v3": Called(_rebuild),
    "torch._utils._rebuild_parameter": Called(lambda tensor, *_: tensor),
    "collections.OrderedDict": Called(make_ordered),
}


def _storage(reference: tuple[Any, ...]) -> tuple[str, str]:
    _, dtype, record, _, _ = reference
    return f"data/{record}", dtype


@lru_cache(maxsize=4096)  # tensors of one shape have the same pickle
def _unpickle_tensor(content: bytes) -> Any:
    return unpickle(content, _KNOWN, _PICKLE, stored=_storage)


def tensor_in(reader: Reader, piece: FilePart) -> tuple[PickledTensor, int]:
    """Return the only tensor of an archive, and the offset of its bytes in the file."""
    archive = ZipArchive(reader, piece)
    try:
        tensor = _unpickle_tensor(archive.content(_PICKLE, _SHORT_BYTES))
    except FormatError as error:
        raise archive.malformed(str(error)) from None
    if not isinstance(tensor, PickledTensor):
        raise archive.malformed(f"a {type(tensor).__name__}, not a tensor")
    expected, size = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype], archive.sizes.get(tensor.record)
    if not tensor.is_plain:
        raise archive.malformed(
            f"a tensor of shape {tensor.shape} with strides {tensor.strides}, not in row-major order"
        )
    if size != expected:
        raise archive.malformed(f"{size} bytes of a tensor of {tensor.dtype} {tensor.shape}, expected {expected}")
    if "byteorder" in archive.sizes and archive.content("byteorder", 16) != b"little":
        raise archive.malformed("a tensor in another byte order than little-endian")
    return tensor, archive.begin(tensor.record)


def value_in(reader: Reader, piece: FilePart) -> Any:
    """Return the value in an archive, as ``torch.load(weights_only=True)`` does."""
    archive = ZipArchive(reader, piece)
    if piece.nbytes > _VALUE_BYTES:
        raise archive.malformed(f"a value of {piece.nbytes} bytes, more than {_VALUE_BYTES}")
    whole = read_bytes(reader, piece.file, piece.begin, piece.nbytes)
    return load_or_raise(lambda: torch.load(io.BytesIO(whole), "cpu", weights_only=True), archive.malformed)


def load_or_raise(load: Callable[[], Any], malformed: Callable[[str], Exception]) -> Any:
    """Return the result of ``load``, a call of ``torch.load``."""
    try:
        return load()
    except MemoryError:
        raise
    except Exception as error:  # torch raises a dozen kinds
        raise malformed(shown(str(error).partition("\n")[0] or type(error).__name__)) from None
