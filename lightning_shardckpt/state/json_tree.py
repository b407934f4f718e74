"""Trainer state as JSON without pickle: a closed set of tagged types; tensors are inlined or stored beside it.

``decode`` is the inverse of ``encode``, except for types that carry code: an enum whose members equal numbers or
strings becomes its value, a named tuple a tuple, a dataclass a dict, an instance of a subclass of a built-in type an
instance of that type. Nothing is imported or called by name. The part of ``decode`` that needs no torch is in
``json_values``.
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
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from lightning_shardckpt.compat.torch_tensors import local_part
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.json_values import (
    SEQUENCES,
    TAG,
    Dropped,
    TorchDecoders,
    decode_with,
    refuse_tensor,
    shape_filled_by,
)
from lightning_shardckpt.state.pickled_objects import pickle_object, unpickle_object
from lightning_shardckpt.state.tensor_bytes import DTYPES, TORCH_DTYPES, bytes_of, dtype_name, host_bytes

INLINE_BYTES = 1024

_MAX_DEPTH = 40  # each may take three levels of JSON: an object with a list of pairs
_BIG_INT = 1 << 53
_OMEGACONF = ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig")


class Encoder:
    """Turns values into JSON and collects the tensors to store beside it.

    Args:
        droppable: prefixes of paths where an unstorable value becomes a placeholder instead of an error.
        inline_bytes: plain tensors up to this size are stored inside the JSON; None: all of them.
        pickles: whether to pickle other values, if possible.

    Attributes:
        tensors: to store beside the JSON, by path.
        plain: all tensors that are not sharded, by path.
        dropped: paths and types of values that were replaced by placeholders.
        unstorable: paths and types of values that cannot be stored, for ``check``.
    """

    def __init__(
        self, droppable: tuple[str, ...] = (), inline_bytes: int | None = INLINE_BYTES, *, pickles: bool = False
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
            return value if abs(value) <= _BIG_INT else {TAG: "int", "v": str(value)}
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
                + (", or pass ShardCkptIO(pickle_objects=True)." if not self._pickles else ".")
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
            return self._pairs("namespace", vars(value), path)
        if isinstance(value, collections.deque):
            return {TAG: "deque", "v": self.encode(list(value), path), "maxlen": value.maxlen}
        if isinstance(value, tuple | set | frozenset):
            tag = next(tag for tag, kind in SEQUENCES.items() if isinstance(value, kind))
            items = [self.encode(item, f"{path}/{i}") for i, item in enumerate(value)]
            # the order of a set of strings differs between processes
            return {TAG: tag, "v": items if isinstance(value, tuple) else sorted(items, key=json.dumps)}
        return self._scalar(value, path)

    def _scalar(self, value: Any, path: str) -> Any:  # a table of types
        if isinstance(value, bool | int | float | str):  # subclasses, numpy's float64 among them
            plain = next(kind for kind in (bool, int, float, str) if isinstance(value, kind))
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
        if isinstance(value, datetime.datetime | datetime.date | datetime.time):
            return {TAG: type(value).__name__, "v": value.isoformat()}
        if isinstance(value, datetime.timedelta):
            return {TAG: "timedelta", "v": [value.days, value.seconds, value.microseconds]}
        if isinstance(value, range | slice):
            return {TAG: type(value).__name__, "v": [self.encode(x) for x in (value.start, value.stop, value.step)]}
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self.encode({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, path)
        if type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.dtype.kind in "biufc":
            content = base64.b64encode(value.tobytes()).decode()
            return {TAG: "numpy", "dtype": value.dtype.str, "shape": list(value.shape), "v": content}
        return self._refuse(value, path)

    def _pairs(self, tag: str, value: dict[Any, Any], path: str) -> Any:
        return {TAG: tag, "v": [[self.encode(k, path), self.encode(v, f"{path}/{k}")] for k, v in value.items()]}

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


def decode(value: Any, stored: Callable[[str], torch.Tensor], *, unpickles: bool = False) -> Any:
    """Return the value from the JSON of ``Encoder.encode``.

    Args:
        value: the JSON.
        stored: returns the tensor stored beside the JSON under a path.
        unpickles: whether to unpickle, which executes code of the pickle; else each is a ``Pickled`` placeholder.

    Raises:
        FormatError: for an unknown tag, or a value that its tag does not allow.
    """
    unpickle = unpickle_object if unpickles else None
    return decode_with(
        TorchDecoders(stored, tensor_from_bytes, TORCH_DTYPES.__getitem__, torch.device, unpickle, _make_config), value
    )


def decode_small(value: Any) -> Any:
    """Return the value from the JSON of ``encode_small``."""
    return decode(value, refuse_tensor)


def decode_equal(value: Any, count: int) -> list[Any]:
    """Return ``count`` equal values from the JSON of ``encode_small``, which share no memory."""
    if not count:
        return []
    first = decode_small(value)
    if type(first) is torch.Tensor:  # such as the step of all parameters
        return [first, *(first.clone() for _ in range(count - 1))]
    return [first, *(decode_small(value) for _ in range(count - 1))]


def tensor_from_bytes(content: bytes, dtype: str, shape: list[int]) -> torch.Tensor:
    """Return a CPU tensor with these bytes. Raises ValueError if they do not fill it."""
    tensor = torch.empty(shape_filled_by(content, dtype, shape), dtype=TORCH_DTYPES[dtype])
    bytes_of(tensor)[:] = content
    return tensor


def _make_config(content: Any) -> Any:
    """Return a container of OmegaConf if it is installed, else its content."""
    if find_spec("omegaconf") is None:
        return content
    return import_module("omegaconf").OmegaConf.create(content)
