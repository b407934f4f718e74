"""Trainer state as JSON without pickle: a closed table of tagged types; tensors are inlined or stored beside it.

``decode`` is the inverse of ``Encoder.encode``, except for types that carry code: an enum whose members equal numbers
or strings becomes its value, a named tuple a tuple, an instance of a subclass of a built-in type an instance of that
type. Nothing is imported or called by name. Pickles are the exception that a user asks for, in the save and again in
the load; nothing else in this package writes or reads one.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import enum
import io
import json
import math
import pathlib
import pickle
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from typing import Any, NamedTuple

import numpy
import torch
from torch.distributed.tensor import DTensor

from lightning_shardckpt.errors import FormatError, ShardCkptError, StateError
from lightning_shardckpt.format.value_checks import bytes_in, check_shape, shown
from lightning_shardckpt.state.documents import MAPPINGS, TAG, parse_document
from lightning_shardckpt.state.local_tensors import DTYPES, TORCH_DTYPES, bytes_of, dtype_name, host_bytes, is_elsewhere

INLINE_BYTES = 1024

_MAX_DEPTH = 40  # each may take three levels of JSON: an object with a list of pairs
_BIG_INT = 1 << 53
_OMEGACONF = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")
_UNREAD = "pickled, which weights_only=False alone reads"
_NUMPY_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}")


@dataclass(repr=False, eq=False)
class Dropped:
    """A placeholder for a value that was not stored, or not loaded: the type's name, and the start of its repr."""

    type_name: str
    text: str

    def __repr__(self) -> str:
        return f"<not loaded: {self.type_name} {self.text}>"


class Pickled(Dropped):
    """A placeholder for a pickled value that was not unpickled, since the load did not allow it."""


# ── the table of tags ─────────────────────────────────────────────────────────────────────────────────────────────


class _Tag(NamedTuple):
    """A kind of value, its JSON, and the way back from content of a type.

    ``to_json`` returns the content of a value, whose items are encoded like any value; ``fields`` those beside it.
    ``from_json`` returns the value of a decoded content and of its fields.
    """

    kind: type | tuple[type, ...]
    content: type
    to_json: Callable[[Any], Any]
    from_json: Callable[..., Any]
    fields: dict[str, Callable[[Any], Any]] = {}  # noqa: RUF012  # never changed


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _to_base64(content: bytes | memoryview) -> str:
    return base64.b64encode(content).decode()


_from_base64 = partial(base64.b64decode, validate=True)


def _tensor(content: str, dtype: str, shape: Any) -> torch.Tensor:
    data = _from_base64(content)
    if type(shape) is not list or bytes_in(check_shape(shape), dtype) != len(data):
        raise ValueError(f"{len(data)} bytes for {dtype} {shape}")
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    bytes_of(tensor)[:] = data
    return tensor


def _array_bytes(array: Any) -> str:
    if type(array).__module__ != "numpy" or not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise ValueError("masked arrays, and arrays of objects, have more than these bytes")
    return _to_base64(array.tobytes())


def _array(content: str, dtype: str, shape: Any) -> Any:
    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(dtype)
    array = numpy.frombuffer(_from_base64(content), dtype=numpy.dtype(dtype)).reshape(check_shape(shape))
    return array.copy() if shape else array[()]


def _member(value: enum.Enum) -> Any:
    if not isinstance(value, int | float | str):
        raise ValueError("the value would be another one than the member")
    return value.value


def _parts(kind: Any, *names: str) -> _Tag:
    return _Tag(kind, list, lambda v: [getattr(v, name) for name in names], lambda v: kind(*v))


def _time(kind: Any) -> _Tag:
    return _Tag(kind, str, kind.isoformat, kind.fromisoformat)


_ARRAYS = (numpy.ndarray, numpy.generic)
_SHAPE = {"shape": lambda v: list(v.shape)}
_TAGS = {  # the first that fits counts: an OrderedDict is a dict, and a datetime a date
    "tensor": _Tag(
        torch.Tensor, str, lambda v: _to_base64(host_bytes(v)), _tensor, {"dtype": lambda v: DTYPES[v.dtype], **_SHAPE}
    ),
    "enum": _Tag(enum.Enum, object, _member, lambda v, kind: v, {"type": _type_name}),
    "odict": _Tag(OrderedDict, list, dict.items, OrderedDict),
    "counter": _Tag(Counter, list, dict.items, lambda v: Counter(dict(v))),
    "map": _Tag(dict, list, dict.items, dict),
    "namespace": _Tag(argparse.Namespace, list, lambda v: vars(v).items(), lambda v: argparse.Namespace(**dict(v))),
    "deque": _Tag(deque, list, list, deque, {"maxlen": attrgetter("maxlen")}),
    "tuple": _Tag(tuple, list, list, tuple),
    "set": _Tag(set, list, list, set),
    "frozenset": _Tag(frozenset, list, list, frozenset),
    "int": _Tag(int, str, str, int),
    "float": _Tag(float, str, str, {text: float(text) for text in ("nan", "inf", "-inf")}.__getitem__),
    "complex": _parts(complex, "real", "imag"),
    "bytes": _Tag((bytes, bytearray), str, _to_base64, _from_base64),
    "dtype": _Tag(torch.dtype, str, DTYPES.__getitem__, TORCH_DTYPES.__getitem__),
    "device": _Tag(torch.device, str, str, torch.device),
    "path": _Tag(pathlib.PurePath, str, str, pathlib.Path),
    "datetime": _time(datetime.datetime),
    "date": _time(datetime.date),
    "time": _time(datetime.time),
    "timedelta": _parts(datetime.timedelta, "days", "seconds", "microseconds"),
    "range": _parts(range, "start", "stop", "step"),
    "slice": _parts(slice, "start", "stop", "step"),
    "numpy": _Tag(_ARRAYS, str, _array_bytes, _array, {"dtype": attrgetter("dtype.str"), **_SHAPE}),
    "dropped": _Tag(Dropped, str, attrgetter("text"), lambda v, k: Dropped(k, v), {"type": attrgetter("type_name")}),
}
_TIMES = ("datetime", "date", "time", "timedelta")
_PLAIN: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
"""Conversions of instances of subclasses to the type itself, by the type's own methods."""
TAGS = frozenset({*_TAGS, "stored", "pickle", "omegaconf"})
"""All tags of JSON: the table of FORMAT.md."""


# ── values become JSON ────────────────────────────────────────────────────────────────────────────────────────────


class Encoder:
    """Turns values into JSON and collects the tensors to store beside it.

    Args:
        droppable: prefixes of paths where an unstorable value becomes a placeholder instead of an error.
        inline_bytes: plain tensors up to this size are stored inside the JSON.
        pickles: whether to pickle other values, if possible; None where this is no option, so that no error advises it.

    Attributes:
        tensors: to store beside the JSON, by path.
        plain: all tensors that are not sharded, by path.
        dropped: paths and types of values that were replaced by placeholders; ``unstorable``, that cannot be stored.
    """

    def __init__(
        self, droppable: tuple[str, ...] = (), inline_bytes: float = INLINE_BYTES, *, pickles: bool | None = None
    ) -> None:
        self.tensors, self.plain = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        self.dropped, self.unstorable = list[str](), list[str]()
        self._droppable, self._inline_bytes, self._pickles = droppable, inline_bytes, pickles

    def encode(self, value: Any, path: str = "", depth: int = 0) -> Any:
        """Return the JSON of a value; a value that cannot be stored is noted in ``unstorable``."""
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if (kind is int and abs(value) <= _BIG_INT) or (kind is float and math.isfinite(value)):
            return value
        if depth >= _MAX_DEPTH:
            raise StateError(f"state nested deeper than {_MAX_DEPTH} levels at {path[:80]}…: does it contain itself?")
        if isinstance(value, list):
            return [self.encode(item, f"{path}/{i}", depth + 1) for i, item in enumerate(value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path, depth)
        if not isinstance(value, enum.Enum):
            for base, plain in _PLAIN.items():  # subclasses, numpy's float64 among them, whatever they override
                if isinstance(value, base) and kind is not base:
                    return self.encode(plain(value), path, depth)
        tag = next((tag for tag, row in _TAGS.items() if isinstance(value, row.kind)), "")
        return self._tagged(tag, value, path, depth)

    def check(self) -> None:
        """Raise one StateError for all values that could not be stored."""
        if self.unstorable:
            listed = "\n  ".join(self.unstorable)
            raise StateError(
                f"state that cannot be stored without pickle:\n  {listed}\nReturn plain values (numbers, strings, "
                "lists, dicts, tensors, …) from the state_dict or on_save_checkpoint that holds it"
                + (", or pass ShardCkptIO(pickle_objects=True)." if self._pickles is False else ".")
            )

    def _tagged(self, tag: str, value: Any, path: str, depth: int) -> Any:
        try:
            content = _TAGS[tag].to_json(value)
            if tag in _TIMES and not bool(_TAGS[tag].from_json(content) == value):  # pandas' NaT, nanoseconds
                raise ValueError(content)
        except (LookupError, ValueError):  # no tag, a dtype of no name, an integer of more than 4300 digits
            return self._refuse(value, path)
        fields = {name: field(value) for name, field in _TAGS[tag].fields.items()}
        if tag in MAPPINGS:
            items = ((key, item) for key, item in content if not is_elsewhere(item))  # each stage adds its own
            pairs = [(k, self.encode(item, f"{path}/{k}" if path else str(k), depth + 1)) for k, item in items]
            if tag == "map" and all(type(key) is str and not key.startswith(TAG) for key, _ in pairs):
                return dict(pairs)
            return {TAG: tag, "v": [[self.encode(key, path, depth + 1), item] for key, item in pairs]}
        content = self.encode(content, path, depth)
        if tag in ("set", "frozenset"):  # the order of a set of strings differs between processes
            content.sort(key=json.dumps)
        return {TAG: tag, **fields, "v": content}

    def _tensor(self, value: torch.Tensor, path: str, depth: int) -> Any:
        dtype_name(value, path)  # raises an error for a tensor without plain memory
        if not isinstance(value, DTensor):
            self.plain[path] = value
            if value.nbytes <= self._inline_bytes:
                return self._tagged("tensor", value, path, depth)
        key, number = path, 1
        while key in self.tensors:  # {"a/b": …} and {"a": {"b": …}} have the same path
            number += 1
            key = f"{path}#{number}"
        self.tensors[key] = value.detach()
        return {TAG: "stored", "v": key}

    def _refuse(self, value: Any, path: str) -> Any:
        kind = _type_name(value)
        if kind in _OMEGACONF:
            content = sys.modules["omegaconf"].OmegaConf.to_container(value, enum_to_str=True)  # as in its YAML
            return {TAG: "omegaconf", "v": self.encode(content, path)}
        if self._pickles and (pickled := _pickle(value)) is not None:
            return {TAG: "pickle", "type": kind, "v": _to_base64(pickled)}
        if path.startswith(self._droppable):
            self.dropped.append(f"{path}: {kind}")
            return {TAG: "dropped", "type": kind, "v": repr(value)[:200]}
        self.unstorable.append(f"{path}: {kind}")
        return None


def encode_small(value: Any, path: str) -> Any:
    """Return the JSON of a value, with all plain tensors inline.

    Raises:
        StateError: naming every path whose value cannot be stored.
    """
    encoder = Encoder(inline_bytes=math.inf)
    encoded = encoder.encode(value, path)
    encoder.unstorable += [f"{key}: a sharded tensor" for key in encoder.tensors]
    encoder.check()
    return encoded


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            raise TypeError("a sharded tensor")
        return NotImplemented


def _pickle(value: Any) -> bytes | None:
    """Return the pickle of an object; None if it cannot be pickled, or contains a sharded tensor."""
    written = io.BytesIO()
    try:
        _Pickler(written).dump(value)
    except Exception:  # the user's class may raise anything
        return None
    return written.getvalue()


# ── JSON becomes values ───────────────────────────────────────────────────────────────────────────────────────────


def _refuse_tensor(path: str) -> Any:
    raise FormatError(f"a tensor {path!r} is referred to where none can be stored")


def decode(
    value: Any, stored: Callable[[str], Any] = _refuse_tensor, *, unpickles: bool = False, makes_configs: bool = True
) -> Any:
    """Return the value from the JSON of ``Encoder.encode`` or ``encode_small``.

    Args:
        value: the JSON.
        stored: returns the tensor stored beside the JSON under a path, or the value in its place; by default none can.
        unpickles: whether to unpickle, which executes code of the pickle; else each is a ``Pickled`` placeholder.
        makes_configs: whether to make containers of OmegaConf, where it is installed, rather than plain ones.

    Raises:
        FormatError: for an unknown tag, or a value that its tag does not allow.
    """

    def walk(value: Any) -> Any:
        if isinstance(value, list):
            return [walk(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: walk(item) for key, item in value.items()}
        tag = value[TAG]
        try:
            if tag == "stored":
                return stored(value["v"])
            content = walk(value["v"])
            if tag == "pickle":
                name = str(value["type"])
                return _unpickle(_from_base64(content), name) if unpickles else Pickled(name, _UNREAD)
            if tag == "omegaconf":
                if not isinstance(content, dict | list):  # OmegaConf would parse a string as YAML
                    raise TypeError(f"{shown(content)} is not a container")
                has_class = makes_configs and find_spec("omegaconf") is not None
                return import_module("omegaconf").OmegaConf.create(content) if has_class else content
            row = _TAGS[tag]
            if not isinstance(content, row.content):
                raise TypeError(f"{shown(content)} is not a {row.content.__name__}")
            return row.from_json(content, *(value[name] for name in row.fields))
        except ShardCkptError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise FormatError(f"trainer state: a value tagged {shown(tag)} is malformed: {shown(error)}") from None

    return walk(value)


def _unpickle(content: bytes, type_name: str) -> Any:
    """Return the object of a pickle. Executes code of the pickle."""
    try:
        return pickle.loads(content)
    except Exception as error:  # the object's class may raise anything
        raise TypeError(f"a {type_name} cannot be unpickled: {type(error).__name__}: {error}") from error


def check_readable(role: str, content: bytes, where: str) -> None:
    """Decode a document as a load does, before it becomes part of a checkpoint. Pickles in it are not unpickled.

    Raises:
        StateError: if a load would refuse the document, with the reason.
    """
    try:
        value = parse_document(role, content, where)
        if role in ("trainer", "rank", "model", "optimizer", "versions"):
            decode(value, lambda key: key)
    except FormatError as error:
        raise StateError(f"nothing is saved, since a load would refuse it: {error}") from None


def lost_values(value: Any, place: str = "") -> dict[str, Dropped]:
    """Return the placeholders in a decoded value, by path."""
    if isinstance(value, Dropped):
        return {place: value}
    value, lost = vars(value) if isinstance(value, argparse.Namespace) else value, dict[str, Dropped]()
    is_list = isinstance(value, list | tuple | set | frozenset | deque)
    for key, item in value.items() if isinstance(value, dict) else enumerate(value if is_list else ()):
        lost |= lost_values(item, f"{place}/{key}" if place else str(key))
    return lost


def merge_encoded(first: Any, second: Any) -> Any:
    """Return the first of two encoded values, with further keys from the mappings of the second."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [merge_encoded(a, b) for a, b in zip(first, second, strict=True)]
    if not (isinstance(first, dict) and isinstance(second, dict)) or first.get(TAG) != second.get(TAG):
        return first
    tag = first.get(TAG)
    if tag in MAPPINGS:
        mine, other = ({json.dumps(k): (k, v) for k, v in value["v"]} for value in (first, second))
        pairs = [[k, merge_encoded(v, other[text][1]) if text in other else v] for text, (k, v) in mine.items()]
        return {**first, "v": pairs + [[k, v] for text, (k, v) in other.items() if text not in mine]}
    if tag not in (None, "tuple", "deque"):
        return first
    return first | {k: merge_encoded(first[k], v) if k in first else v for k, v in second.items()}
