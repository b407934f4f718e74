"""Values of a file that ``torch.load`` reads by default: plain types in place of those that carry code."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch

from lightning_shardckpt.state.json_tree import Dropped, Pickled
from lightning_shardckpt.state.tensor_bytes import dtype_name

_VERSIONS = "_metadata"  # attribute of a state dict: the versions of modules, which ``Module.load_state_dict`` reads
_MAX_INT_BITS = 2000  # weights_only=True reads no integer of 256 bytes or more
_LOADABLE = (type(None), bool, float, str, complex, bytes)  # exactly these classes, not subclasses


class Simplifier:
    """Converts values to types that ``torch.load`` reads by default; ``changed`` describes the values that differ."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def simplify(self, value: Any, path: str = "") -> Any:
        """Return a value converted to types that ``weights_only=True`` allows.

        Paths, dates, ranges and other objects become text; frozensets become sets, deques lists, namespaces dicts, and
        numpy arrays tensors. Values that the checkpoint lacks are left out; in a list, None replaces them.
        """
        if isinstance(value, torch.Tensor):
            return _with_own_storage(value)
        if type(value) in _LOADABLE or isinstance(value, torch.dtype | torch.device):
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


def _with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or a copy if it is a part of a larger storage, or not contiguous."""
    dtype_name(tensor, "beside the model and the optimizers")  # raises an error for one without plain memory
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.detach().clone(memory_format=torch.contiguous_format)


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
