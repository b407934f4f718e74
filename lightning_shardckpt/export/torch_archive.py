"""Layout of a file for ``torch.load`` that may be larger than memory: all offsets are known before a tensor is read.

``torch.save`` writes a zip archive of uncompressed records: ``data.pkl``, in which tensors refer to storages by number,
and ``data/<number>`` with the bytes (``torch/serialization.py``, torch 2.13). Here, ``ArchivedTensor`` stands for a
tensor whose bytes may be stored elsewhere; the pickle equals the one of ``torch.save`` byte for byte. torch's own
``skip_data`` is not used, since its archives have no checksums.
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch

from lightning_shardckpt.compat.torch_tensors import rebuilding
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.value_checks import LEGACY_STORAGES, TORCH_NAMES, bytes_in
from lightning_shardckpt.state.json_tree import Dropped, Pickled
from lightning_shardckpt.state.tensor_bytes import dtype_name, host_bytes
from lightning_shardckpt.transfer.file_filler import Region

_ALIGNMENT = 64  # of the data of a record, as torch.save aligns it: torch.load(mmap=True) uses it in place
_LOCAL_HEADER, _ZIP64_FIELD = 30, 20
_VERSIONS = "_metadata"  # attribute of a state dict: the versions of modules, which ``Module.load_state_dict`` reads
_READABLE = 0o600 << 16  # the mode that zipfile and torch.save give a record
_MAX_INT_BITS = 2000  # weights_only=True reads no integer of 256 bytes or more
ZIP64_BYTES = 1 << 30
"""Records of this size or more get zip64 fields, long before zip requires them."""


@dataclass(frozen=True, slots=True, eq=False)
class ArchivedTensor:
    """A tensor of the file to write, which gets a record of its own.

    ``dtype`` is torch's name; ``content`` is the bytes, or (component, key) of a stored tensor.
    """

    dtype: str
    shape: Shape
    nbytes: int
    content: memoryview | tuple[str, str]


_LOADABLE = (type(None), bool, float, str, complex, bytes, ArchivedTensor)  # exactly these classes, not subclasses
_TORCH_TYPES = (torch.Tensor, torch.dtype, torch.device)


def archive_stored(dtype: str, shape: Shape, content: tuple[str, str]) -> ArchivedTensor:
    """Return the archived tensor for a stored one that is written with ``dtype``, a name of the format."""
    return ArchivedTensor(TORCH_NAMES.get(dtype, dtype), shape, bytes_in(shape, dtype), content)


# ── the pickle ────────────────────────────────────────────────────────────────────────────────────────────────────


def pickle_value(value: Any) -> tuple[bytes, list[ArchivedTensor]]:
    """Return the pickle that ``torch.save`` writes for a value, and its tensors in the order of their storages."""
    file = io.BytesIO()
    pickler = _Pickler(file, 2)
    pickler.tensors = []
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


class _Storage:
    def __init__(self, identifier: tuple[Any, ...]) -> None:
        self.identifier = identifier


class _Pickler(pickle.Pickler):
    """The pickler of ``torch.save``, for archived tensors in place of tensors."""

    tensors: list[ArchivedTensor]

    def persistent_id(self, value: Any) -> Any:
        return value.identifier if isinstance(value, _Storage) else None

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            value = _archive(value)
        if not isinstance(value, ArchivedTensor):
            return NotImplemented
        legacy = LEGACY_STORAGES.get(value.dtype)
        storage_type = torch.storage.UntypedStorage if legacy is None else getattr(torch, legacy)
        numel = value.nbytes if legacy is None else prod(value.shape)
        storage = _Storage(("storage", storage_type, str(len(self.tensors)), "cpu", numel))
        self.tensors.append(value)
        shape = (*value.shape,)  # a new tuple, since a pickle would refer to one that it already contains
        return rebuilding(storage, shape, strides_of(shape), getattr(torch, value.dtype) if legacy is None else None)


def _archive(tensor: torch.Tensor) -> ArchivedTensor:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        dtype_name(tensor, "beside the model and the optimizers")  # raises the error
    content = host_bytes(tensor)
    return ArchivedTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), len(content), content)


def strides_of(shape: Shape) -> tuple[int, ...]:
    """Return the strides of a new contiguous tensor.

    >>> strides_of((5, 0, 3, 2))
    (6, 6, 2, 1)
    """
    strides = [1]
    for length in reversed(shape[1:]):
        strides.append(strides[-1] * max(length, 1))
    return tuple(reversed(strides)) if shape else ()


# ── the archive ───────────────────────────────────────────────────────────────────────────────────────────────────


class TorchFileLayout:
    """The layout of the file that ``torch.save(value, file)`` writes: ``regions`` to fill, their heads, and the end.

    Args:
        value: a result of ``Simplifier.simplify``, else ``torch.load`` refuses the file.
        zip64_bytes: records of this size or more get zip64 fields.
    """

    def __init__(self, value: Any, zip64_bytes: int = ZIP64_BYTES) -> None:
        self.regions: list[Region] = []
        self._zip64_bytes = zip64_bytes
        self._records: list[zipfile.ZipInfo] = []
        pickled, tensors = pickle_value(value)
        # without .format_version, torch.load looks offsets up instead of deriving them from torch.save's order
        self._add("data.pkl", memoryview(pickled))
        self._add("byteorder", memoryview(sys.byteorder.encode()))
        for number, tensor in enumerate(tensors):
            self._add(f"data/{number}", tensor.content, tensor.nbytes)
        self._add("version", memoryview(b"3\n"))

    def _add(self, name: str, content: memoryview | tuple[str, str], nbytes: int | None = None) -> None:
        nbytes = len(content) if nbytes is None else nbytes
        info = zipfile.ZipInfo(f"archive/{name}")
        info.external_attr, info.file_size, info.compress_size = _READABLE, nbytes, nbytes
        info.header_offset = self.regions[-1].end if self.regions else 0
        head_nbytes = _LOCAL_HEADER + len(info.filename) + (_ZIP64_FIELD if nbytes >= self._zip64_bytes else 0)
        info.extra = _padding(info.header_offset + head_nbytes)
        head_nbytes += len(info.extra)
        self.regions.append(Region(info.header_offset + head_nbytes, nbytes, head_nbytes, content))
        self._records.append(info)

    def head(self, number: int, crc: int) -> bytes:
        """Return the local header of a record; the ``head`` argument of ``file_filler.fill``."""
        info = self._records[number]
        info.CRC = crc
        return info.FileHeader(zip64=info.file_size >= self._zip64_bytes)

    def end(self) -> Region:
        """Return the last region, the central directory; call it after the others are filled."""
        begin, file = self.regions[-1].end, _FileTail()
        file.begin = begin
        with zipfile.ZipFile(file, "w") as archive:
            archive.filelist += self._records
            archive.start_dir = begin
        content = file.getbuffer()
        return Region(begin, len(content), 0, content)


class _FileTail(io.BytesIO):
    """The part of a file from ``begin`` on, with the positions of the whole file."""

    begin = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset in the file."""
        return super().seek(max(offset - self.begin, 0), whence)

    def tell(self) -> int:
        """Return the position in the file."""
        return super().tell() + self.begin


def _padding(position: int) -> bytes:
    """Return an extra field of a zip header that aligns the data, which would begin at ``position`` without it."""
    length = -(position + 4) % _ALIGNMENT
    return struct.pack("<2sH", b"FB", length) + bytes(length)


# ── values ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Simplifier:
    """Converts values to types that ``torch.load`` reads by default; ``changed`` describes the values that differ."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def simplify(self, value: Any, path: str = "") -> Any:
        """Return a value converted to types that ``weights_only=True`` allows.

        Paths, dates, ranges and other objects become text; frozensets become sets, deques lists, namespaces dicts, and
        numpy arrays tensors. Values that the checkpoint lacks are left out; in a list, None replaces them.
        """
        if type(value) in _LOADABLE or isinstance(value, _TORCH_TYPES):
            return value
        if type(value) is int:
            return value if value.bit_length() < _MAX_INT_BITS else self._record_change(str(value), value, path)
        if isinstance(value, dict):
            return self._mapping(value, path)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._sequence(value, path)
        return self._other(value, path)

    def _sequence(self, value: Any, path: str) -> Any:
        items = [(item, f"{path}/{i}") for i, item in enumerate(value)]
        if isinstance(value, set | frozenset):
            members = [self._key(item, where) for item, where in items if not self._is_dropped(item, where)]
            self._record_merged(len(members) - len({*members}), path)
            return {*members} if type(value) is set else self._record_change({*members}, value, path)
        kept = [None if self._is_dropped(item, where) else self.simplify(item, where) for item, where in items]
        return type(value)(kept) if type(value) in (list, tuple) else self._record_change(kept, value, path)

    def _key(self, value: Any, path: str) -> Any:
        """Return a simplified value that is hashable."""
        key = self.simplify(value, path)
        try:
            hash(key)
        except TypeError:  # a frozenset that became a set
            return self._record_change(str(value), value, path)
        return key

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        kept: dict[Any, Any] = {}
        for key, item in value.items():
            where = f"{path}/{key}" if path else str(key)
            if not self._is_dropped(item, where):
                new_key = self._key(key, where)
                self._record_merged(int(new_key in kept), path)
                kept[new_key] = self.simplify(item, where)
        if type(value) is OrderedDict and (versions := vars(value).get(_VERSIONS)) is not None:
            kept = OrderedDict(kept)  # a module's state dict
            vars(kept)[_VERSIONS] = self.simplify(versions, f"{path}/{_VERSIONS}")
            return kept
        return type(value)(kept) if type(value) in (Counter, OrderedDict) else kept

    def _is_dropped(self, item: Any, where: str) -> bool:
        if isinstance(item, Dropped):
            reason = "as it is pickled" if isinstance(item, Pickled) else "as it was when the checkpoint was saved"
            self.changed.append(f"{where}: left out, {reason}: {item.type_name}")
        return isinstance(item, Dropped)

    def _record_merged(self, count: int, path: str) -> None:
        if count:
            self.changed.append(f"{path}: {count} of it left out, since others have become the same")

    def _other(self, value: Any, path: str) -> Any:
        if isinstance(value, Namespace):
            return self._record_change(self._mapping(vars(value), path), value, path)
        if type(value).__module__ == "numpy":
            return self._record_change(_from_numpy(value), value, path) if value.shape else _number(value)
        return self._record_change(str(value), value, path)

    def _record_change(self, new: Any, old: Any, path: str) -> Any:
        self.changed.append(f"{path}: {type(old).__name__} became {type(new).__name__}")
        return new


def _from_numpy(value: Any) -> Any:
    """Return a tensor for an array; a list of lower precision if torch has no dtype of its width."""
    value = np.array(value, value.dtype.newbyteorder("="), order="C")
    try:
        return torch.from_numpy(value)
    except TypeError:
        return value.astype("c16" if value.dtype.kind == "c" else "f8").tolist()


def _number(value: Any) -> Any:
    """Return a Python number for a numpy scalar; types wider than Python's lose precision."""
    number = value.item()
    if type(number).__module__ != "numpy":
        return number
    return complex(number) if number.dtype.kind == "c" else float(number)
