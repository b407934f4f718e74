"""Records of plain values: numbers, texts, tensors and generators, in lists and dicts and by attribute."""

from __future__ import annotations

import dataclasses
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.recording.tensor_record import tensor_entries
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state
from lightning_shardckpt.tools.run_records import Entry, ValueRecord

_OURS = "lightning_shardckpt."
_SHORT, _DEEPEST, _MOST = 80, 6, 1000
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, range)


class ValueRecorder:
    """Turns values into entries; notes by name what it cannot.

    Args:
        replaced: texts that are the same for every run, such as the folder of this run.
    """

    def __init__(self, replaced: Mapping[str, str]) -> None:
        self._replaced = replaced
        self.unobserved: dict[str, str] = {}

    def entries(self, name: str, value: Any, *, shared: bool = True) -> dict[str, Entry]:
        """Return the records of a value and of all in it, by name."""
        return dict(self._walk(name, value, shared, 0))

    def attributes(
        self, name: str, owner: object, without: Collection[str], *, scalars: bool = True
    ) -> dict[str, Entry]:
        """Return the records of an object's attributes, by name.

        Args:
            name: of the owner.
            owner: any object.
            without: attributes that are not its state.
            scalars: whether numbers and texts count; tensors and generators always do.
        """
        found: dict[str, Entry] = {}
        for key, value in list(vars(owner).items()):
            if key in without or isinstance(value, _CODE) or (isinstance(value, nn.Module) and not scalars):
                continue
            if scalars or isinstance(value, torch.Tensor | torch.Generator | random.Random):
                found |= self.entries(f"{name}.{key}" if name else key, value)
        return found

    def note(self, name: str, why: str) -> None:
        """Note what cannot be observed."""
        self.unobserved[name] = why

    def _walk(self, name: str, value: Any, shared: bool, depth: int) -> Iterator[tuple[str, Entry]]:
        if isinstance(value, torch.Tensor):
            try:
                yield from tensor_entries(name, value).items()
            except (StateError, RuntimeError, NotImplementedError) as error:
                self.note(name, str(error))
        elif isinstance(value, _SCALARS):
            yield name, self._scalar(value, shared)
        elif (state := generator_digest(value)) is not None:
            yield name, ValueRecord(state, shared=False)
        elif isinstance(value, np.ndarray | np.generic):
            yield name, ValueRecord(f"{value.dtype} {value.shape} {checksum(np.ascontiguousarray(value).tobytes())}")
        elif isinstance(value, nn.Module):
            for key, tensor in value.state_dict().items():
                yield from self._walk(f"{name}.{key}", tensor, shared, depth + 1)
        elif depth >= _DEEPEST or not isinstance(value, Mapping | list | tuple | deque | set | frozenset):
            if type(value).__module__.startswith(_OURS):
                return  # what the strategy keeps with a module
            if depth < _DEEPEST and dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {of.name: getattr(value, of.name, None) for of in dataclasses.fields(value)}
                yield from self._walk(name, fields, shared, depth + 1)
            elif not isinstance(value, _CODE):
                self.note(name, f"a value of {type(value).__module__}.{type(value).__qualname__}")
        else:
            yield from self._contents(name, value, shared, depth)

    def _contents(self, name: str, value: Any, shared: bool, depth: int) -> Iterator[tuple[str, Entry]]:
        if isinstance(value, set | frozenset):
            value = sorted(value, key=repr)
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        yield f"{name} (its length)", ValueRecord(str(len(items)), float(len(items)), shared)
        if len(items) > _MOST:
            if all(isinstance(item, _SCALARS) for _, item in items):
                yield name, ValueRecord(checksum(repr(items).encode()), None, shared)
            else:
                self.note(name, f"more than {_MOST} items")
            return
        for key, item in items:
            yield from self._walk(f"{name}[{key!r}]", item, shared, depth + 1)

    def _scalar(self, value: Any, shared: bool) -> ValueRecord:
        if isinstance(value, str):
            for old, new in self._replaced.items():
                value = value.replace(old, new)
        text = repr(value)
        number = float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None
        return ValueRecord(text if len(text) <= _SHORT else checksum(text.encode()), number, shared)


def generator_digest(value: object) -> str | None:
    """Return a digest of the state of a random number generator; None for what is none."""
    return state_digest(generator_state(value)) if isinstance(value, GENERATORS) else None


def state_digest(state: Any) -> str:
    """Return a digest of a generator's state: a tensor, a dict, or nested tuples of numbers and arrays."""
    if isinstance(state, torch.Tensor):
        return checksum(state.cpu().numpy().tobytes())
    if isinstance(state, dict):
        return checksum(repr(state).encode())
    described: Callable[[Any], Any] = lambda x: x.tobytes() if isinstance(x, np.ndarray) else x  # noqa: E731
    return checksum(repr(tuple(map(described, state))).encode())
