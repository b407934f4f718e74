"""Decoding of tagged JSON, with or without torch.

``json_tree.Encoder`` encodes. The caller makes torch's types: tensors, dtypes and devices, or placeholders for them.
Nothing is imported or called by name. No torch.
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


def _plain(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class TorchDecoders:
    """Functions that make the values that need torch, pickle or OmegaConf.

    Attributes:
        stored: takes the path of a tensor stored beside the JSON.
        tensor: takes bytes, dtype and shape of a tensor; raises ValueError if the bytes do not fill it.
        dtype: takes the name of a dtype of the format.
        device: takes a string such as "cuda:0".
        unpickle: takes a pickle and the name of its object's type; None: a ``Pickled`` takes its place.
        config: takes the plain content of a container of OmegaConf.
    """

    stored: Callable[[str], Any]
    tensor: Callable[[bytes, str, list[int]], Any]
    dtype: Callable[[str], Any]
    device: Callable[[str], Any]
    unpickle: Callable[[bytes, str], Any] | None = None
    config: Callable[[Any], Any] = _plain


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


def stored_keys(value: Any) -> Iterator[str]:
    """Yield the keys of the tensors that are stored beside an encoded value."""
    if isinstance(value, dict) and value.get(TAG) == "stored":
        yield value["v"]
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from stored_keys(item)


def shape_filled_by(content: bytes, dtype: str, shape: list[int]) -> Shape:
    """Return the shape of a tensor with these bytes. Raises ValueError if they do not fill it."""
    if type(shape) is not list or bytes_in(check_shape(shape), dtype) != len(content):
        raise ValueError(f"{len(content)} bytes for {dtype} {shape}")
    return tuple(shape)


def refuse_tensor(path: str) -> Any:
    """Raise a FormatError: the ``stored`` of JSON that has no tensors beside it."""
    raise FormatError(f"a tensor {path!r} is referred to where none can be stored")


def decode_with(decoders: TorchDecoders, value: Any) -> Any:
    """Return the value from the JSON of ``Encoder.encode``.

    Raises:
        FormatError: for an unknown tag, or a value that its tag does not allow.
    """
    if isinstance(value, list):
        return [decode_with(decoders, item) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {k: decode_with(decoders, v) for k, v in value.items()}
    tag = value[TAG]
    try:
        return _decode_tagged(decoders, tag, value)
    except ShardCkptError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RuntimeError) as error:
        raise FormatError(f"trainer state: a value tagged {shown(tag)} is malformed: {shown(error)}") from None


def _decode_tagged(decoders: TorchDecoders, tag: str, value: dict[str, Any]) -> Any:
    if tag not in TAGS:
        raise KeyError(tag)
    content = value["v"]
    if tag == "stored":
        return decoders.stored(content)
    if tag == "tensor":
        return decoders.tensor(_base64(content), value["dtype"], value["shape"])
    if tag == "deque":
        return collections.deque(_items(decoders, content), value["maxlen"])
    if tag in SEQUENCES:
        items = _items(decoders, content)
        return SEQUENCES[tag](items if tag == "tuple" else _check_hashes(items))
    if tag in _MAPPINGS:
        pairs = [(k, v) for k, v in _items(decoders, content)]
        _check_hashes([k for k, _ in pairs])
        return _MAPPINGS[tag](pairs)
    if tag == "dropped":
        return Dropped(str(value["type"]), str(content))
    if tag == "pickle":
        name = _text(value["type"])
        return Pickled(name) if decoders.unpickle is None else decoders.unpickle(_base64(content), name)
    if tag == "omegaconf":
        container = decode_with(decoders, content)
        if not isinstance(container, dict | list):  # OmegaConf would parse a string as YAML
            raise TypeError(f"{shown(container)} is not a container")
        return decoders.config(container)
    if tag == "numpy":
        import numpy  # only where the state held numpy values

        if not _NUMPY_DTYPE.fullmatch(value["dtype"]):
            raise ValueError(value["dtype"])
        shape = check_shape(value["shape"])
        array = numpy.frombuffer(_base64(content), dtype=numpy.dtype(value["dtype"])).reshape(shape)
        return array.copy() if shape else array[()]
    content = decode_with(decoders, content)
    if tag == "dtype":
        return decoders.dtype(content)
    if tag == "device":
        return decoders.device(_device(content))
    return _SCALARS[tag](content)


def _items(decoders: TorchDecoders, content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise TypeError(f"{shown(content)} is not a list")
    return [decode_with(decoders, item) for item in content]


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


def _device(text: Any) -> str:
    if not _DEVICE.fullmatch(_text(text)):
        raise ValueError(f"{shown(text)} is not a device")
    return str(text)


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
}

_OTHERS = ("deque", "tensor", "numpy", "stored", "dropped", "pickle", "omegaconf", "dtype", "device")
TAGS = frozenset({*_SCALARS, *_MAPPINGS, *SEQUENCES, *_OTHERS})
"""All tags of JSON: the table of FORMAT.md."""
