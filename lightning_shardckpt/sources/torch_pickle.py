"""Tensors and values in archives of ``torch.save``, found without unpickling them.

A tensor is described by its pickle, which names a storage: a record of the archive with its bytes. Values are of plain
types, or else left to ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, check_shape, check_size, shown
from lightning_shardckpt.sources.safe_unpickler import Called, Known, ordered, unpickle
from lightning_shardckpt.sources.torch_zip import CoalescedReads, FilePart, ZipArchive
from lightning_shardckpt.state.dtype_names import LEGACY_STORAGES, TORCH_NAMES

_PICKLE, _SHORT_BYTES = "data.pkl", 8 << 10  # of one tensor
_VALUE_BYTES = 64 << 20  # of what is not a tensor; Python needs a multiple of it
_BYTES_STORAGE = "bytes"  # stands for the storage of a tensor whose dtype is said apart


@dataclass(frozen=True, slots=True)
class Pickled:
    """A tensor as its pickle describes it: the record of its bytes, dtype, shape and strides."""

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


def _rebuilt(storage: tuple[str, str], offset: int, shape: Shape, strides: Shape, *rest: Any) -> Pickled:
    record, dtype = storage
    if dtype == _BYTES_STORAGE:
        dtype = rest[2]
    if any(rest[3 if storage[1] == _BYTES_STORAGE else 2 :]) or dtype not in DTYPE_BYTES:
        raise FormatError("a tensor that is a conjugate or negative view, or of an unknown dtype")
    return Pickled(record, dtype, check_shape(shape), check_shape(strides), check_size(offset))


KNOWN_DTYPES = {f"torch.{of_torch}": name for name, of_torch in TORCH_NAMES.items()}
_KNOWN: Known = {
    **KNOWN_DTYPES,
    **{f"torch.{storage}": KNOWN_DTYPES[f"torch.{dtype}"] for dtype, storage in LEGACY_STORAGES.items()},
    "torch.storage.UntypedStorage": _BYTES_STORAGE,
    "torch._utils._rebuild_tensor_v2": Called(_rebuilt),
    "torch._utils._rebuild_tensor_v3": Called(_rebuilt),
    "torch._utils._rebuild_parameter": Called(lambda tensor, *_: tensor),
    "collections.OrderedDict": Called(ordered),
}


def _storage(reference: tuple[Any, ...]) -> tuple[str, str]:
    _, dtype, record, _, _ = reference
    return f"data/{record}", dtype


@lru_cache(maxsize=4096)  # tensors of one shape have the same pickle
def _pickled(content: bytes) -> Any:
    return unpickle(content, _KNOWN, _PICKLE, stored=_storage)


def tensor_in(windows: CoalescedReads, piece: FilePart) -> tuple[Pickled, int]:
    """The one tensor of an archive, and where its bytes begin in the file.

    Raises:
        FormatError: naming file and byte, if there is something else.
    """
    archive = ZipArchive(windows, piece)
    try:
        found = _pickled(archive.content(_PICKLE, _SHORT_BYTES))
    except FormatError as error:
        raise archive.malformed(str(error)) from None
    if not isinstance(found, Pickled):
        raise archive.malformed(f"a {type(found).__name__}, not a tensor")
    expected = prod(found.shape) * DTYPE_BYTES[found.dtype]
    if not found.is_plain:
        raise archive.malformed(f"a tensor of shape {found.shape} with strides {found.strides}, not in row-major order")
    if archive.sizes.get(found.record) != expected:
        held = archive.sizes.get(found.record)
        raise archive.malformed(f"{held} bytes of a tensor of {found.dtype} {found.shape}, expected {expected}")
    if "byteorder" in archive.sizes and archive.content("byteorder", 16) != b"little":
        raise archive.malformed("a tensor in another byte order than little-endian")
    return found, archive.begin(found.record)


def _plain(content: bytes) -> tuple[bool, Any]:
    """Return whether a pickle has nothing but values of plain types, and the value."""
    try:
        return True, unpickle(content, {}, _PICKLE)
    except FormatError:
        return False, None


_plain_again = lru_cache(maxsize=4096)(_plain)  # hyper-parameters are often the same


def value_in(windows: CoalescedReads, piece: FilePart) -> Any:
    """The value in an archive, as ``torch.load(weights_only=True)`` gives it. It is not to be changed.

    Raises:
        FormatError: naming file and byte, if torch refuses it.
    """
    archive = ZipArchive(windows, piece)
    content = archive.content(_PICKLE, _VALUE_BYTES)
    if list(filter(_is_data, archive.sizes)) == []:
        is_plain, value = (_plain_again if len(content) <= _SHORT_BYTES else _plain)(content)
        if is_plain:
            return value
    if piece.nbytes > _VALUE_BYTES:
        raise archive.malformed(f"a value of {piece.nbytes} bytes, more than {_VALUE_BYTES}")
    whole = windows.read(piece.file, piece.begin, piece.nbytes)
    return loaded(lambda: torch.load(io.BytesIO(whole), map_location="cpu", weights_only=True), archive.malformed)


def loaded(load: Callable[[], Any], malformed: Callable[[str], Exception]) -> Any:
    """Return what ``torch.load`` returns; whatever it makes of a malformed or refused file is one error.

    Raises:
        Exception: of ``malformed``, given what torch said.
    """
    try:
        return load()
    except MemoryError:
        raise
    except Exception as error:  # torch raises a dozen kinds
        raise malformed(shown(str(error).partition("\n")[0] or type(error).__name__)) from None


def _is_data(name: str) -> bool:
    return name.startswith("data/")
