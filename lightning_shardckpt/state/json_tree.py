"""Trainer state as JSON without pickle: a closed set of tagged types; tensors are inlined or stored beside it.

``decode`` is the inverse of ``encode``, except for types that carry code: an enum whose members equal numbers or
strings becomes its value, a named tuple a tuple, a dataclass a dict, an instance of a subclass of a built-in type an
instance of that type. Nothing is imported or called by name.
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
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from lightning_shardckpt.compat.torch_tensors import local_part
from lightning_shardckpt.errors import FormatError, ShardCkptError, StateError
from lightning_shardckpt.format.value_checks import bytes_in, check_shape, shown
from lightning_shardckpt.state.pickled_objects import pickle_object, unpickle_object
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of, dtype_name, host_bytes

INLINE_BYTES = 1024

_MAX_DEPTH = 40  # each may take three levels of JSON: an object with a list of pairs
_BIG_INT = 1 << 53
_MOST_BITS = 14_000  # Python refuses to write and read more than 4300 digits
_OMEGACONF = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")
TAG = "$"
_FEW = 1000
_NUMPY_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}")
_INTEGER = re.compile(r"-?\d{1,4300}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,32}(:\d{1,3})?", re.ASCII)
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
_PLAIN: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}
"""Conversions of instances of subclasses to the type itself, by the type's own methods."""
_MAPPINGS: dict[str, Callable[[Any], Any]] = {
    "map": dict,
    "odict": collections.OrderedDict,
    "counter": lambda pairs: collections.Counter(dict(pairs)),
    "namespace": lambda pairs: _namespace(pairs),
}


class Dropped:
    """A placeholder for a value that could not be stored: the type's name and the start of its repr."""

    def __init__(self, type_name: str, text: str) -> None:
        self.type_name, self.text = type_name, text

    def __repr__(self) -> str:
        return f"<not stored in the checkpoint: {self.type_name} {self.text}>"


class Pickled(Dropped):
    """A placeholder for a pickled value that was not unpickled, since the load did not allow it."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name, "pickled, which weights_only=False alone reads")

    def __repr__(self) -> str:
        return f"<not read from the checkpoint: {self.type_name}, {self.text}>"


class Encoder:
    """Turns values into JSON and collects the tensors to store beside it.

    Args:
        droppable: prefixes of paths where an unstorable value becomes a placeholder instead of an error.
        inline_bytes: plain tensors up to this size are stored inside the JSON; None: all of them.
        pickles: whether to pickle other values, if possible; None where this is no option, so that no error advises it.

    Attributes:
        tensors: to store beside the JSON, by path.
        plain: all tensors that are not sharded, by path.
        dropped: paths and types of values that were replaced by placeholders.
        unstorable: paths and types of values that cannot be stored, for ``check``.
    """

    def __init__(
        self, droppable: tuple[str, ...] = (), inline_bytes: int | None = INLINE_BYTES, *, pickles: bool | None = None
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain: dict[str, torch.Tensor] = {}
        self.dropped: list[str] = []
        self.unstorable: list[str] = []
        self._droppable, self._inline_bytes, self._pickles = droppable, inline_bytes, pickles
        self._depth = 0

    def encode(self, value: Any, path: str = "") -> Any:
        """Return the JSON of a value; a value that cannot be stored is noted in ``unstorable``."""
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            return self._int(value, path)
        if type(value) is float:
            return value if math.isfinite(value) else {TAG: "float", "v": str(value)}
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
                "(numbers, strings, lists, dicts, tensors, …) from the state_dict or on_save_checkpoint that holds it"
                + (", or pass ShardCkptIO(pickle_objects=True)." if self._pickles is False else ".")
            )

    def _tagged(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, enum.Enum):
            if not isinstance(value, int | float | str):  # the value would be another one than the member
                return self._refuse(value, path)
            return {
                TAG: "enum",
                "type": f"{type(value).__module__}.{type(value).__qualname__}",
                "v": self.encode(value.value, path),
            }
        if isinstance(value, collections.OrderedDict | collections.Counter):
            return self._pairs("odict" if isinstance(value, collections.OrderedDict) else "counter", value, path)
        if isinstance(value, dict):
            if all(type(k) is str and not k.startswith(TAG) for k in value):
                return {k: self.encode(v, f"{path}/{k}" if path else k) for k, v in value.items()}
            return self._pairs("map", value, path)
        if isinstance(value, argparse.Namespace):
            if not all(isinstance(key, str) for key in vars(value)):
                return self._refuse(value, path)
            return self._pairs("namespace", vars(value), path)
        if isinstance(value, collections.deque):
            return {TAG: "deque", "v": self.encode(list(value), path), "maxlen": value.maxlen}
        if isinstance(value, tuple | set | frozenset):
            tag = next(tag for tag, kind in SEQUENCES.items() if isinstance(value, kind))
            items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
            if not isinstance(value, tuple) and not all(map(_is_hashable, items)):
                return self._refuse(value, path)
            # the order of a set of strings differs between processes
            return {TAG: tag, "v": items if isinstance(value, tuple) else sorted(items, key=json.dumps)}
        return self._scalar(value, path)

    def _scalar(self, value: Any, path: str) -> Any:  # a table of types
        for kind, plain in _PLAIN.items():  # subclasses, numpy's float64 among them, whatever they override
            if isinstance(value, kind):
                return self.encode(plain(value), path)
        if isinstance(value, complex):
            return {TAG: "complex", "v": [self.encode(value.real), self.encode(value.imag)]}
        if isinstance(value, bytes | bytearray):
            return {TAG: "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, torch.dtype) and value in DTYPES:
            return {TAG: "dtype", "v": DTYPES[value]}
        if isinstance(value, torch.device):
            return {TAG: "device", "v": str(value)}
        if isinstance(value, pathlib.PurePath):
            return {TAG: "path", "v": str(value)}
        if isinstance(value, datetime.date | datetime.time | datetime.timedelta):
            return self._time(value, path)
        if isinstance(value, range | slice):
            return {TAG: type(value).__name__, "v": [self.encode(x) for x in (value.start, value.stop, value.step)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.encode({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, path)
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "biufc":
            content = base64.b64encode(value.tobytes()).decode()
            return {TAG: "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "v": content}
        return self._refuse(value, path)

    def _int(self, value: int, path: str) -> Any:
        if abs(value) <= _BIG_INT:
            return value
        if value.bit_length() > _MOST_BITS:
            return self._refuse(value, path)
        return {TAG: "int", "v": str(value)}

    def _time(self, value: datetime.date | datetime.time | datetime.timedelta, path: str) -> Any:
        """Return a date or time under the tag of its base class, unless its own class holds more, as pandas' do."""
        if isinstance(value, datetime.timedelta):
            encoded = {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
        else:
            base = next(base for base in (datetime.datetime, datetime.date, datetime.time) if isinstance(value, base))
            encoded = {TAG: base.__name__, "v": base.isoformat(value)}  # type: ignore[arg-type]  # one of its own
        if type(value).__module__ != "datetime" and not bool(value == decode_small(encoded)):  # nanoseconds, NaT
            return self._refuse(value, path)
        return encoded

    def _pairs(self, tag: str, value: dict[Any, Any], path: str) -> Any:
        keys = [self.encode(key, path) for key in value]
        if not all(map(_is_hashable, keys)):
            return self._refuse(value, path)
        values = [self.encode(item, f"{path}/{key}") for key, item in value.items()]
        return {TAG: tag, "v": [list(pair) for pair in zip(keys, values, strict=True)]}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        dtype = dtype_name(value, path)
        limit = self._inline_bytes
        if local_part(value) is value:
            self.plain[path] = value
        if local_part(value) is value and (limit is None or value.numel() * value.element_size() <= limit):
            content = base64.b64encode(host_bytes(value)).decode()
            return {TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "v": content}
        key, number = path, 1
        while key in self.tensors:  # {"a/b": …} and {"a": {"b": …}} have the same path
            number += 1
            key = f"{path}#{number}"
        self.tensors[key] = value.detach()
        return {TAG: "stored", "v": key}

    def _refuse(self, value: Any, path: str) -> Any:
        if isinstance(value, Dropped):
            return {TAG: "dropped", "type": value.type_name, "v": value.text}
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if kind in _OMEGACONF:
            content = sys.modules["omegaconf"].OmegaConf.to_container(value, enum_to_str=True)  # as in its YAML
            return {TAG: "omegaconf", "v": self.encode(content, path)}
        if self._pickles and (content := pickle_object(value)) is not None:
            return {TAG: "pickle", "type": kind, "v": base64.b64encode(content).decode()}
        if path.startswith(self._droppable) and self._droppable:
            self.dropped.append(f"{path}: {kind}")
            return {TAG: "dropped", "type": kind, "v": repr(value)[:200]}
        self.unstorable.append(f"{path}: {kind}")
        return None


def _is_hashable(encoded: Any) -> bool:
    """Return whether an encoded value can be a key of a dict after a load: a dataclass comes back as a dict."""
    try:
        hash(decode(encoded, lambda key: key))
    except TypeError:
        return False
    return True


def encode_small(value: Any, path: str) -> Any:
    """Return the JSON of a value, with all plain tensors inline.

    Raises:
        StateError: naming every path whose value cannot be stored.
    """
    encoder = Encoder(inline_bytes=None)
    encoded = encoder.encode(value, path)
    encoder.unstorable += [f"{key}: a sharded tensor" for key in encoder.tensors]
    encoder.check()
    return encoded


def decode(
    value: Any, stored: Callable[[str], Any], *, unpickles: bool = False, makes_configs: bool = True
) -> Any:
    """Return the value from the JSON of ``Encoder.encode``.

    Args:
        value: the JSON.
        stored: returns the tensor stored beside the JSON under a path, or the value in its place.
        unpickles: whether to unpickle, which executes code of the pickle; else each is a ``Pickled`` placeholder.
        makes_configs: whether to make containers of OmegaConf, where it is installed, rather than plain ones.

    Raises:
        FormatError: for an unknown tag, or a value that its tag does not allow.
    """
    return _Decoder(stored, unpickles, makes_configs).decode(value)


class _Decoder:
    def __init__(self, stored: Callable[[str], Any], unpickles: bool, makes_configs: bool) -> None:
        self._stored, self._unpickles, self._makes_configs = stored, unpickles, makes_configs

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decode(item) for item in value]
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {k: self.decode(v) for k, v in value.items()}
        tag = value[TAG]
        try:
            return self._tagged(tag, value)
        except ShardCkptError:
            raise
        except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
            raise FormatError(f"trainer state: a value tagged {shown(tag)} is malformed: {shown(error)}") from None

    def _tagged(self, tag: str, value: dict[str, Any]) -> Any:
        if tag not in TAGS:
            raise KeyError(tag)
        content = value["v"]
        if tag == "stored":
            return self._stored(content)
        if tag == "tensor":
            return tensor_from_bytes(_base64(content), value["dtype"], value["shape"])
        if tag == "deque":
            return collections.deque(self._items(content), value["maxlen"])
        if tag in SEQUENCES:
            items = self._items(content)
            return SEQUENCES[tag](items if tag == "tuple" else _check_hashes(items))
        if tag in _MAPPINGS:
            pairs = [(k, v) for k, v in self._items(content)]
            _check_hashes([k for k, _ in pairs])
            return _MAPPINGS[tag](pairs)
        if tag == "dropped":
            return Dropped(str(value["type"]), str(content))
        if tag == "pickle":
            name = _text(value["type"])
            return unpickle_object(_base64(content), name) if self._unpickles else Pickled(name)
        if tag == "omegaconf":
            container = self.decode(content)
            if not isinstance(container, dict | list):  # OmegaConf would parse a string as YAML
                raise TypeError(f"{shown(container)} is not a container")
            return _make_config(container) if self._makes_configs else container
        if tag == "numpy":
            return _array(content, value["dtype"], value["shape"])
        return _SCALARS[tag](self.decode(content))

    def _items(self, content: Any) -> list[Any]:
        if not isinstance(content, list):
            raise TypeError(f"{shown(content)} is not a list")
        return [self.decode(item) for item in content]


def decode_small(value: Any) -> Any:
    """Return the value from the JSON of ``encode_small``."""
    return decode(value, refuse_tensor)


def tensor_from_bytes(content: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return a CPU tensor with these bytes. Raises ValueError if they do not fill it."""
    if type(shape) is not list or bytes_in(check_shape(shape), dtype) != len(content):
        raise ValueError(f"{len(content)} bytes for {dtype} {shape}")
    tensor = torch.empty(shape, dtype=TORCH_DTYPES[dtype])
    bytes_of(tensor)[:] = content
    return tensor


def _array(content: Any, dtype: str, shape: Any) -> Any:
    import numpy  # only where the state held numpy values

    if not _NUMPY_DTYPE.fullmatch(dtype):
        raise ValueError(dtype)
    array = numpy.frombuffer(_base64(content), dtype=numpy.dtype(dtype)).reshape(check_shape(shape))
    return array.copy() if shape else array[()]


def refuse_tensor(path: str) -> Any:
    """Raise a FormatError: the ``stored`` of JSON that has no tensors beside it."""
    raise FormatError(f"a tensor {path!r} is referred to where none can be stored")


def _make_config(content: Any) -> Any:
    """Return a container of OmegaConf if it is installed, else its content."""
    if find_spec("omegaconf") is None:
        return content
    return import_module("omegaconf").OmegaConf.create(content)


def lost_values(value: Any, place: str = "") -> dict[str, Dropped]:
    """Return the placeholders in a decoded value, by path."""
    if isinstance(value, Dropped):
        return {place: value}
    if isinstance(value, argparse.Namespace):
        value = vars(value)
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple | set | frozenset | collections.deque):
        items = enumerate(value)
    else:
        return {}
    inner = (lost_values(item, f"{place}/{key}" if place else str(key)) for key, item in items)
    return {path: dropped for one in inner for path, dropped in one.items()}


def merge_encoded(first: Any, second: Any) -> Any:
    """Return the first of two encoded values, with further keys from the mappings of the second."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [merge_encoded(a, b) for a, b in zip(first, second, strict=True)]
    if not (isinstance(first, dict) and isinstance(second, dict)) or first.get(TAG) != second.get(TAG):
        return first
    tag = first.get(TAG)
    if tag is None:
        both = {k: merge_encoded(v, second[k]) if k in second else v for k, v in first.items()}
        return both | {k: v for k, v in second.items() if k not in first}
    if tag in _MAPPINGS:
        mine, other = ({json.dumps(k): (k, v) for k, v in value["v"]} for value in (first, second))
        pairs = [[k, merge_encoded(v, other[text][1]) if text in other else v] for text, (k, v) in mine.items()]
        return {**first, "v": pairs + [[k, v] for text, (k, v) in other.items() if text not in mine]}
    return {**first, "v": merge_encoded(first["v"], second["v"])} if tag in ("tuple", "deque") else first


def _check_hashes(keys: list[Any]) -> list[Any]:
    """Return ``keys``; refuse keys chosen to have few hashes, of which a set takes quadratic time."""
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
    namespace = argparse.Namespace()
    vars(namespace).update({_text(key): value for key, value in pairs})
    return namespace


_SCALARS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "float": {text: float(text) for text in ("nan", "inf", "-inf")}.__getitem__,
    "complex": _complex,
    "bytes": _base64,
    "path": lambda v: pathlib.Path(_text(v)),
    "datetime": datetime.datetime.fromisoformat,
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "timedelta": lambda v: datetime.timedelta(*v),
    "range": lambda v: range(*v),
    "slice": lambda v: slice(*v),
    "enum": lambda v: v,
    "dtype": TORCH_DTYPES.__getitem__,
    "device": _device,
}

_OTHERS = ("deque", "tensor", "numpy", "stored", "dropped", "pickle", "omegaconf")
TAGS = frozenset({*_SCALARS, *_MAPPINGS, *SEQUENCES, *_OTHERS})
"""All tags of JSON: the table of FORMAT.md."""
