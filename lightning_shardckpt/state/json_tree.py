"""Trainer state as JSON without pickle: a closed set of tagged types; tensors are inlined or referred to.

``encode`` and ``decode`` are inverse but for types that carry code: an enum comes back as its value, a named tuple as
a tuple, a dataclass as a dict, a subclass of a built-in type as that type. Nothing is ever imported or called by name.
"""

from __future__ import annotations

import argparse
import base64
import collections
import dataclasses
import datetime
import enum
import json
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_shardckpt.errors import FormatError, ShardCkptError, StateError
from lightning_shardckpt.format.value_checks import bytes_in, check_shape, shown
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of, dtype_name, host_bytes

INLINE_BYTES = 1024

_TAG = "$"
_MAX_DEPTH = 40  # JSON is three levels deeper for each: an object with a list of pairs
_BIG_INT = 1 << 53
_FEW = 1000
_NUMPY_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}")
_INTEGER = re.compile(r"-?\d{1,4300}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,32}(:\d{1,3})?", re.ASCII)
_SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "map": dict,
    "odict": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
    "namespace": lambda pairs: _namespace(pairs),
}


class Dropped:
    """Stands where a value could not be stored: the type's name and the start of its repr."""

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name, self.text = type_name, text

    def __repr__(self) -> str:
        return f"<not stored in the checkpoint: {self.type_name} {self.text}>"


class Encoder:
    """Turns values into JSON and collects the tensors that are stored beside it, keyed by path.

    Args:
        droppable: prefixes of paths where an unstorable value becomes a placeholder instead of an error.
        inline_bytes: plain tensors up to this size are stored inside the JSON; None: all of them.
    """

    def __init__(self, droppable: tuple[str, ...] = (), inline_bytes: int | None = INLINE_BYTES) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.dropped: list[str] = []
        self.unstorable: list[str] = []
        self._droppable, self._inline_bytes = droppable, inline_bytes
        self._depth = 0

    def encode(self, value: Any, path: str = "") -> Any:
        """JSON for ``value``; what can't be stored is noted in ``unstorable``, for one error over all."""
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return value if abs(value) <= _BIG_INT else {_TAG: "int", "v": str(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {_TAG: "float", "v": str(value)}
        if self._depth >= _MAX_DEPTH:
            raise StateError(
                f"state nested deeper than {_MAX_DEPTH} levels at {path[:80]}…: a value that contains itself?"
            )
        self._depth += 1
        try:
            if isinstance(value, list):
                return [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
            return self._tagged(value, path)
        finally:
            self._depth -= 1

    def check(self) -> None:
        """Raise one StateError for all values that could not be stored."""
        if self.unstorable:
            raise StateError(
                "state that cannot be stored without pickle:\n  "
                + "\n  ".join(self.unstorable)
                + "\nReturn plain values "
                "(numbers, strings, lists, dicts, tensors, …) from the state_dict or on_save_checkpoint that holds it."
            )

    def _tagged(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, enum.Enum):
            return {
                _TAG: "enum",
                "type": f"{type(value).__module__}.{type(value).__qualname__}",
                "v": self.encode(value.value, path),
            }
        if isinstance(value, collections.OrderedDict | collections.Counter):
            return self._pairs("odict" if isinstance(value, collections.OrderedDict) else "counter", value, path)
        if isinstance(value, dict):
            if all(type(k) is str and not k.startswith(_TAG) for k in value):
                return {k: self.encode(v, f"{path}/{k}" if path else k) for k, v in value.items()}
            return self._pairs("map", value, path)
        if isinstance(value, argparse.Namespace):
            return self._pairs("namespace", vars(value), path)
        if isinstance(value, collections.deque):
            return {_TAG: "deque", "v": self.encode(list(value), path), "maxlen": value.maxlen}
        if isinstance(value, tuple | set | frozenset):
            tag = next(tag for tag, kind in _SEQUENCES.items() if isinstance(value, kind))
            return {_TAG: tag, "v": [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]}
        return self._scalar(value, path)

    def _scalar(self, value: Any, path: str) -> Any:  # a table of types
        if isinstance(value, bool | int | float | str):  # subclasses, numpy's float64 among them
            plain = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
            return self.encode(plain(value), path)
        if isinstance(value, complex):
            return {_TAG: "complex", "v": [self.encode(value.real), self.encode(value.imag)]}
        if isinstance(value, bytes | bytearray):
            return {_TAG: "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype) and value in DTYPES:
            return {_TAG: "dtype", "v": DTYPES[value]}
        if isinstance(value, torch.device):
            return {_TAG: "device", "v": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {_TAG: "path", "v": str(value)}
        if isinstance(value, datetime.datetime | datetime.date | datetime.time):
            return {_TAG: type(value).__name__, "v": value.isoformat()}
        if isinstance(value, datetime.timedelta):
            return {_TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, range | slice):
            return {_TAG: type(value).__name__, "v": [self.encode(x) for x in (value.start, value.stop, value.step)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.encode({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, path)
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "biufc":
            content = base64.b64encode(value.tobytes()).decode()
            return {_TAG: "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "v": content}
        return self._refuse(value, path)

    def _pairs(self, tag: str, value: dict[Any, Any], path: str) -> Any:
        return {_TAG: tag, "v": [[self.encode(k, path), self.encode(v, f"{path}/{k}")] for k, v in value.items()]}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        dtype = dtype_name(value, path)
        local = getattr(value, "_local_tensor", None)
        limit = self._inline_bytes
        if local is None and (limit is None or value.numel() * value.element_size() <= limit):
            content = base64.b64encode(host_bytes(value)).decode()
            return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "v": content}
        key, number = path, 1
        while key in self.tensors:  # {"a/b": …} and {"a": {"b": …}} have the same path
            number += 1
            key = f"{path}#{number}"
        self.tensors[key] = value.detach()
        return {_TAG: "stored", "v": key}

    def _refuse(self, value: Any, path: str) -> Any:
        if isinstance(value, Dropped):
            return {_TAG: "dropped", "type": value.type_name, "v": value.text}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if path.startswith(self._droppable) and self._droppable:
            self.dropped.append(f"{path}: {kind}")
            return {_TAG: "dropped", "type": kind, "v": repr(value)[:200]}
        self.unstorable.append(f"{path}: {kind}")
        return None


def encode_small(value: Any, path: str) -> Any:
    """JSON for a value whose plain tensors are all stored inline.

    Raises:
        StateError: naming every path that cannot be stored so.
    """
    encoder = Encoder(inline_bytes=None)
    found = encoder.encode(value, path)
    encoder.unstorable += [f"{key}: a sharded tensor" for key in encoder.tensors]
    encoder.check()
    return found


def decode_small(value: Any) -> Any:
    """The value that ``encode_small`` was given."""
    return decode(value, _no_tensor)


def union(first: Any, second: Any) -> Any:
    """Return the first of two encoded values, with what mappings at the same place of the second have beyond it."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [union(a, b) for a, b in zip(first, second, strict=True)]
    if not (isinstance(first, dict) and isinstance(second, dict)) or first.get(_TAG) != second.get(_TAG):
        return first
    tag = first.get(_TAG)
    if tag is None:
        both = {k: union(v, second[k]) if k in second else v for k, v in first.items()}
        return both | {k: v for k, v in second.items() if k not in first}
    if tag in _MAPPINGS:
        mine, other = ({json.dumps(k): (k, v) for k, v in value["v"]} for value in (first, second))
        pairs = [[k, union(v, other[text][1]) if text in other else v] for text, (k, v) in mine.items()]
        return {**first, "v": pairs + [[k, v] for text, (k, v) in other.items() if text not in mine]}
    return {**first, "v": union(first["v"], second["v"])} if tag in ("tuple", "deque") else first


def references(value: Any) -> Iterator[str]:
    """The keys of the tensors that are stored beside an encoded value."""
    if isinstance(value, dict) and value.get(_TAG) == "stored":
        yield value["v"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from references(item)


def _no_tensor(path: str) -> torch.Tensor:
    raise FormatError(f"a tensor {path!r} is referred to where none can be stored")


def decode(value: Any, stored: Callable[[str], torch.Tensor]) -> Any:
    """The value that ``encode`` was given; ``stored`` yields the tensor kept under a path.

    Raises:
        FormatError: for a tag that is not in the table, or a value that its tag does not allow.
    """
    if isinstance(value, list):
        return [decode(item, stored) for item in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {k: decode(v, stored) for k, v in value.items()}
    tag = value[_TAG]
    try:
        return _decode_tagged(tag, value, stored)
    except ShardCkptError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise FormatError(f"trainer state: a value tagged {shown(tag)} is malformed: {shown(error)}") from None


def _decode_tagged(tag: str, value: dict[str, Any], stored: Callable[[str], torch.Tensor]) -> Any:
    if tag not in TAGS:
        raise KeyError(tag)
    content = value["v"]
    if tag == "stored":
        return stored(content)
    if tag == "tensor":
        return tensor_from_bytes(_base64(content), value["dtype"], value["shape"])
    if tag == "deque":
        return collections.deque(_items(content, stored), value["maxlen"])
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](_apart(_items(content, stored)) if tag != "tuple" else _items(content, stored))
    if tag in _MAPPINGS:
        pairs = [(k, v) for k, v in _items(content, stored)]
        _apart([k for k, _ in pairs])
        return _MAPPINGS[tag](pairs)
    if tag == "dropped":
        return Dropped(str(value["type"]), str(content))
    if tag == "numpy":
        import numpy  # only where the state held numpy values

        if not _NUMPY_DTYPE.fullmatch(value["dtype"]):
            raise ValueError(value["dtype"])
        shape = check_shape(value["shape"])
        found = numpy.frombuffer(_base64(content), dtype=numpy.dtype(value["dtype"])).reshape(shape)
        return found.copy() if shape else found[()]
    return _SCALARS[tag](decode(content, stored))


def _items(content: Any, stored: Callable[[str], torch.Tensor]) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(f"{shown(content)} is not a list")
    return [decode(item, stored) for item in content]


def _apart(keys: list[Any]) -> list[Any]:
    """``keys``, unless they were chosen to have few hashes: a set of them would take quadratic time."""
    if len(keys) > _FEW and len(set(map(hash, keys))) * 2 < len(keys):
        raise ValueError(f"{len(keys)} keys with few different hashes")
    return keys


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError(f"{shown(value)} is not a string")
    return value


def _base64(text: Any) -> bytes:
    return base64.b64decode(_text(text), validate=True)


def _integer(text: Any) -> int:
    if not _INTEGER.fullmatch(_text(text)):
        raise ValueError(f"{shown(text)} is not an integer")
    return int(text)


def _complex(value: Any) -> complex:
    real, imaginary = value
    if not all(type(x) in (int, float) for x in value):
        raise TypeError(f"{shown(value)} is not a pair of numbers")
    return complex(real, imaginary)


def _device(text: Any) -> torch.device:
    if not _DEVICE.fullmatch(_text(text)):
        raise ValueError(f"{shown(text)} is not a device")
    return torch.device(text)


def _namespace(pairs: Any) -> argparse.Namespace:
    found = argparse.Namespace()
    vars(found).update({_text(key): value for key, value in pairs})
    return found


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "float": {text: float(text) for text in ("nan", "inf", "-inf")}.__getitem__,
    "complex": _complex,
    "bytes": _base64,
    "dtype": TORCH_DTYPES.__getitem__,
    "device": _device,
    "path": lambda v: pathlib.Path(_text(v)),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda v: datetime.timedelta(*v),
    "range": lambda v: range(*v),
    "slice": lambda v: slice(*v),
    "enum": lambda v: v,
}

TAGS = frozenset({*_SCALARS, *_MAPPINGS, *_SEQUENCES, "deque", "tensor", "numpy", "stored", "dropped"})
"""What can be tagged in JSON: the table of FORMAT.md."""


def tensor_from_bytes(content: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    """A CPU tensor with these bytes. Raises ValueError if they do not fill it."""
    if bytes_in(check_shape(shape), dtype) != len(content):
        raise ValueError(f"{len(content)} bytes for {dtype} {shape}")
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    bytes_of(tensor)[:] = content
    return tensor
