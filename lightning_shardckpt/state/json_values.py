"""Stored values: JSON with tags, and back to what was stored, with or without torch.

``json_tree.encode`` writes it. What torch has of its own is made by who decodes: tensors, dtypes and devices, or what
stands for them where nobody needs more. Nothing is ever imported or called by name. No torch.
"""

from __future__ import annotations

import argparse
import base64
import collections
import datetime
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.errors import FormatError, ShardCkptError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.value_checks import bytes_in, check_shape, shown

TAG = "$"
_FEW = 1000
_NUMPY_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}")
_INTEGER = re.compile(r"-?\d{1,4300}", re.ASCII)
_DEVICE = re.compile(r"[a-z]{1,32}(:\d{1,3})?", re.ASCII)
SEQUENCES: dict[str, type] = {"tuple": tuple, "set": set, "frozenset": frozenset}
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


class Pickled(Dropped):
    """Stands where a value was pickled, and whoever loads has not said that it may be read."""

    def __init__(self, type_name: str) -> None:
        super().__init__(type_name, "pickled, which weights_only=False alone reads")

    def __repr__(self) -> str:
        return f"<not read from the checkpoint: {self.type_name}, {self.text}>"


def _plain(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class OfTorch:
    """How a decoder makes what torch has of its own.

    ``stored`` takes the path under which a tensor is kept. ``tensor`` takes bytes, dtype and shape, and raises
    ValueError if the bytes do not fill it. ``dtype`` takes the name of a dtype of the format, ``device`` a text such as
    "cuda:0". ``unpickled`` takes a pickle and the name of its object's type; None: nothing is unpickled.
    ``config`` takes the plain containers of one of OmegaConf's.
    """

    stored: Callable[[str], Any]
    tensor: Callable[[bytes, str, list[int]], Any]
    dtype: Callable[[str], Any]
    device: Callable[[str], Any]
    unpickled: Callable[[bytes, str], Any] | None = None
    config: Callable[[Any], Any] = _plain


def lost_values(value: Any, place: str = "") -> dict[str, Dropped]:
    """Return what was not stored of a decoded value, by its path within it."""
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
    return {path: found for one in inner for path, found in one.items()}


def union(first: Any, second: Any) -> Any:
    """Return the first of two encoded values, with what mappings at the same place of the second have beyond it."""
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return [union(a, b) for a, b in zip(first, second, strict=True)]
    if not (isinstance(first, dict) and isinstance(second, dict)) or first.get(TAG) != second.get(TAG):
        return first
    tag = first.get(TAG)
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
    if isinstance(value, dict) and value.get(TAG) == "stored":
        yield value["v"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from references(item)


def shape_filled_by(content: bytes, dtype: str, shape: list[int]) -> Shape:
    """The shape of a tensor with these bytes. Raises ValueError if they do not fill it."""
    if type(shape) is not list or bytes_in(check_shape(shape), dtype) != len(content):
        raise ValueError(f"{len(content)} bytes for {dtype} {shape}")
    return tuple(shape)


def no_tensor(path: str) -> Any:
    """The ``stored`` of what was encoded without tensors beside it."""
    raise FormatError(f"a tensor {path!r} is referred to where none can be stored")


def decode_with(of_torch: OfTorch, value: Any) -> Any:
    """The value that ``encode`` was given; what torch has of its own is made by ``of_torch``.

    Raises:
        FormatError: for a tag that is not in the table, or a value that its tag does not allow.
    """
    if isinstance(value, list):
        return [decode_with(of_torch, item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {k: decode_with(of_torch, v) for k, v in value.items()}
    tag = value[TAG]
    try:
        return _decode_tagged(of_torch, tag, value)
    except ShardCkptError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise FormatError(f"trainer state: a value tagged {shown(tag)} is malformed: {shown(error)}") from None


def _decode_tagged(of_torch: OfTorch, tag: str, value: dict[str, Any]) -> Any:
    if tag not in TAGS:
        raise KeyError(tag)
    content = value["v"]
    if tag == "stored":
        return of_torch.stored(content)
    if tag == "tensor":
        return of_torch.tensor(_base64(content), value["dtype"], value["shape"])
    if tag == "deque":
        return collections.deque(_items(of_torch, content), value["maxlen"])
    if tag in SEQUENCES:
        items = _items(of_torch, content)
        return SEQUENCES[tag](items if tag == "tuple" else _apart(items))
    if tag in _MAPPINGS:
        pairs = [(k, v) for k, v in _items(of_torch, content)]
        _apart([k for k, _ in pairs])
        return _MAPPINGS[tag](pairs)
    if tag == "dropped":
        return Dropped(str(value["type"]), str(content))
    if tag == "pickle":
        name = _text(value["type"])
        return Pickled(name) if of_torch.unpickled is None else of_torch.unpickled(_base64(content), name)
    if tag == "omegaconf":
        found = decode_with(of_torch, content)
        if not isinstance(found, dict | list):  # of a text it would read YAML
            raise TypeError(f"{shown(found)} is no container")
        return of_torch.config(found)
    if tag == "numpy":
        import numpy  # only where the state held numpy values

        if not _NUMPY_DTYPE.fullmatch(value["dtype"]):
            raise ValueError(value["dtype"])
        shape = check_shape(value["shape"])
        found = numpy.frombuffer(_base64(content), dtype=numpy.dtype(value["dtype"])).reshape(shape)
        return found.copy() if shape else found[()]
    content = decode_with(of_torch, content)
    if tag == "dtype":
        return of_torch.dtype(content)
    if tag == "device":
        return of_torch.device(_device(content))
    return _SCALARS[tag](content)


def _items(of_torch: OfTorch, content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(f"{shown(content)} is not a list")
    return [decode_with(of_torch, item) for item in content]


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


def _device(text: Any) -> str:
    if not _DEVICE.fullmatch(_text(text)):
        raise ValueError(f"{shown(text)} is not a device")
    return str(text)


def _namespace(pairs: Any) -> argparse.Namespace:
    found = argparse.Namespace()
    vars(found).update({_text(key): value for key, value in pairs})
    return found


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
}

_OTHERS = ("deque", "tensor", "numpy", "stored", "dropped", "pickle", "omegaconf", "dtype", "device")
TAGS = frozenset({*_SCALARS, *_MAPPINGS, *SEQUENCES, *_OTHERS})
"""What can be tagged in JSON: the table of FORMAT.md."""
