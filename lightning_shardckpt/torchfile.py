"""How is a file for ``torch.load`` written that is larger than memory? The pickle first, then each tensor as a stream.

``torch.save`` writes a zip archive of uncompressed records: ``data.pkl``, in which tensors refer to storages by number,
and ``data/<number>`` with the bytes (``torch/serialization.py``, torch 2.13). Here tensors on the meta device stand
for those whose bytes come from elsewhere; the pickle is byte for byte that of ``torch.save``.
"""

from __future__ import annotations

import io
import struct
import sys
import zipfile
from argparse import Namespace
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pickle import Pickler  # writes only; nothing here unpickles
from typing import Any, BinaryIO

import torch

from lightning_shardckpt.staging import host_bytes
from lightning_shardckpt.state.tree import Dropped

Content = Callable[[torch.Tensor], Iterable[memoryview]]
"""Gives the bytes of a tensor on the meta device, row-major, in pieces."""

_ALIGNMENT = 64  # of the data of a record, as torch.save aligns it: torch.load(mmap=True) uses it in place
_LOCAL_HEADER, _ZIP64_FIELD, _ZIP64_FROM = 30, 20, 1 << 30
_PROTOCOL = 2  # what torch.save uses and weights_only=True reads
_LOADABLE = {type(None), bool, float, str, complex, bytes, torch.Tensor, torch.dtype, torch.device}
_BIT_LIMIT = 2000  # weights_only=True reads no integer of 256 bytes or more


def write(file: BinaryIO, value: Any, content: Content, advance: Callable[[int], Any] = lambda nbytes: None) -> None:
    """Write what ``torch.save(value, file)`` would.

    Args:
        file: empty, binary, seekable.
        value: made of what ``plain`` returns, else ``torch.load`` refuses the file.
        content: called once for each tensor on the meta device, however often it occurs in ``value``.
        advance: told of the bytes as they are written.
    """
    pickled = io.BytesIO()
    pickler = _Pickler(pickled)
    pickler.dump(value)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, nbytes: int, parts: Iterable[bytes | memoryview]) -> None:
            info, zip64 = zipfile.ZipInfo(f"archive/{name}"), nbytes >= _ZIP64_FROM
            info.extra = _padding(file.tell() + _LOCAL_HEADER + len(info.filename) + (_ZIP64_FIELD if zip64 else 0))
            with archive.open(info, "w", force_zip64=zip64) as record:
                for part in parts:
                    record.write(part)
                    advance(len(part))

        # without .format_version, torch.load looks offsets up instead of deriving them from what torch.save writes
        for name, text in (("data.pkl", pickled.getvalue()), ("byteorder", sys.byteorder.encode())):
            add(name, len(text), [text])
        for number, tensor in enumerate(pickler.tensors):
            add(f"data/{number}", tensor.nbytes, content(tensor) if tensor.is_meta else [host_bytes(tensor)])
        add("version", 2, [b"3\n"])


def _padding(position: int) -> bytes:
    """An extra field of a zip header, so that what follows at ``position`` without it is aligned."""
    length = -(position + 4) % _ALIGNMENT
    return struct.pack("<2sH", b"FB", length) + bytes(length)


@dataclass(frozen=True, slots=True)
class _Storage:
    """Stands for the storage of one tensor in the pickle."""

    kind: type
    number: int
    numel: int


class _Pickler(Pickler):
    """Notes the tensors, each once; their position is the number of their storage."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        # torch says how a tensor of this dtype is rebuilt, and from which kind of storage
        reduced: Any = torch.empty(0, dtype=obj.dtype).__reduce_ex__(_PROTOCOL)  # type: ignore[no-untyped-call]  # torch's
        function, (storage, _, _, _, *rest) = reduced
        if isinstance(storage, torch.storage.TypedStorage):
            kind = getattr(torch, storage._pickle_storage_type())  # type: ignore[no-untyped-call]  # torch's
            stand_in = _Storage(kind, len(self.tensors), obj.numel())
        else:
            stand_in = _Storage(torch.UntypedStorage, len(self.tensors), obj.nbytes)
        self.tensors.append(obj)
        strides = torch.empty(obj.shape, device="meta").stride()
        return function, (stand_in, 0, tuple(obj.shape), strides, *rest)

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        return "storage", obj.kind, str(obj.number), "cpu", obj.numel


class Plain:
    """Turns values into what ``torch.load`` reads by default; ``changed`` lists what had to become something else."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def of(self, value: Any, path: str = "") -> Any:
        """``value`` of types that ``weights_only=True`` allows.

        A path, a date, a range and the like become text; a frozenset a set, a deque a list, a namespace a dict; numpy
        arrays become tensors. What the checkpoint does not hold is left out.
        """
        if type(value) in _LOADABLE:
            return value
        if type(value) is int:
            return value if value.bit_length() < _BIT_LIMIT else self._as(str(value), value, path)
        if isinstance(value, dict):
            return self._mapping(value, path)
        if isinstance(value, list | tuple | set | frozenset | deque):
            return self._sequence(value, path)
        return self._other(value, path)

    def _sequence(self, value: Any, path: str) -> Any:
        of = self._key if isinstance(value, set | frozenset) else self.of
        items = [of(item, f"{path}/{i}") for i, item in enumerate(value) if not isinstance(item, Dropped)]
        if type(value) in (list, tuple, set):
            return type(value)(items)
        return self._as(set(items) if isinstance(value, frozenset) else items, value, path)

    def _key(self, value: Any, path: str) -> Any:
        """What a set or a dict can hold."""
        new = self.of(value, path)
        try:
            hash(new)
        except TypeError:  # a frozenset that became a set
            return self._as(str(value), value, path)
        return new

    def _mapping(self, value: dict[Any, Any], path: str) -> Any:
        kept: dict[Any, Any] = {}
        for key, item in value.items():
            where = f"{path}/{key}" if path else str(key)
            if isinstance(item, Dropped):
                self.changed.append(f"{where}: left out, as it was when the checkpoint was saved: {item.type_name}")
            else:
                kept[self._key(key, where)] = self.of(item, where)
        return type(value)(kept) if type(value) in (Counter, OrderedDict) else kept

    def _other(self, value: Any, path: str) -> Any:
        if isinstance(value, Namespace):
            return self._as(self._mapping(vars(value), path), value, path)
        if type(value).__module__ == "numpy":
            return self._as(_from_numpy(value), value, path) if value.shape else value.item()
        return self._as(str(value), value, path)

    def _as(self, new: Any, old: Any, path: str) -> Any:
        kind = type(old).__name__
        self.changed.append(f"{path}: {kind} became {type(new).__name__}")
        return new


def _from_numpy(value: Any) -> Any:
    """A tensor for an array, a list where torch has no such dtype."""
    try:
        return torch.from_numpy(value)
    except TypeError:
        return value.tolist()
