"""Tensors in archives of ``torch.save``, read by ``torch.load(weights_only=True)``, which executes no code.

torch's distributed checkpoint concatenates many such archives in a file, one for every chunk of a tensor.
"""

from __future__ import annotations

import io
import struct
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from zipfile import ZipFile

import torch

from lightning_shardckpt.errors import CorruptionError, FormatError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.value_checks import bytes_in, shown
from lightning_shardckpt.sources.dcp_metadata import FilePart
from lightning_shardckpt.state.tensor_bytes import DTYPES, host_bytes
from lightning_shardckpt.storage.local.local_reader import LocalReader

_LOCAL = struct.Struct("<4s22x2H")  # of a zip entry: signature, lengths of name and extra field
_SMALL_BYTES = 8 << 10  # of a value that is kept, since the settings of most parameters are equal
_WHOLE_BYTES = 256 << 10  # an archive of at most this size is read at once
_MAX_VALUE_BYTES = 64 << 20  # of a value, for which Python needs a multiple of it


def check_parts(reader: LocalReader, parts: list[FilePart]) -> None:
    """Raise CorruptionError if a file is missing or shorter than a part of it."""
    ends: dict[str, FilePart] = {}
    for part in parts:
        if part.file not in ends or part.begin + part.nbytes > ends[part.file].begin + ends[part.file].nbytes:
            ends[part.file] = part
    for file, last in ends.items():
        try:
            size = reader.size(file)
        except FileNotFoundError:
            raise CorruptionError(f"file {file}: the file is missing") from None
        if last.begin + last.nbytes > size:
            raise CorruptionError(f"file {last} are wanted, it has {size}")


def read_value(reader: LocalReader, part: FilePart) -> Any:
    """Return the value in an archive, which the caller must not change."""
    if part.nbytes > _MAX_VALUE_BYTES:
        raise FormatError(f"file {part}: a value of more than {_MAX_VALUE_BYTES} bytes")
    content = _PartFile(reader, part).read()
    load = _load_small if part.nbytes < _SMALL_BYTES else _load_value
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
        memory = memoryview(target).cast("B")
        memory = memory[: max(self._part.nbytes - self._at, 0)]
        self._reader.read_into(self._part.file, self._part.begin + self._at, memory)
        self._at += len(memory)
        return len(memory)


def _open(reader: LocalReader, part: FilePart) -> io.BufferedReader:
    return io.BufferedReader(_PartFile(reader, part))


class ArchivedTensor(NamedTuple):
    """The only tensor of an archive; its dtype is named as in safetensors."""

    dtype: str
    shape: Shape
    part: FilePart


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
