"""Effects of a step on the modules that every stage has: undone after early runs, repeated after the run that counts.

Repeated are buffers and the plain attributes of modules: numbers, strings, dates, paths, tensors, arrays, and lists,
dicts, sets and tuples of them. Attributes that are objects of other classes are left alone.
"""

from __future__ import annotations

import datetime
import enum
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass
from operator import is_
from pathlib import PurePath
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_modules import buffer_slots
from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.agree import from_portable, to_portable
from lightning_shardckpt.parallel.pipeline.placeholder import Placeholder, first_placeholder

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_VALUES: tuple[type, ...] = (*_NUMBERS, *_DATES, enum.Enum, PurePath, range, slice, frozenset, np.generic)
_VALUES = (*_VALUES, torch.dtype, torch.device)
_PLAIN = (*_VALUES, Tensor)
_COPIED = 1 << 20  # elements; an in-place change of a larger tensor before the layers is not undone
_ARRAY_BYTES = 1 << 20  # larger numpy arrays are data
_CONTAINERS = (list, dict, set, deque)
_INTERNAL = frozenset(vars(nn.Module()))

_Key = tuple[str, bool]
"""The name of an attribute or buffer, and whether it is a buffer."""


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one attribute or buffer of a module, which is given by name."""

    module: str
    name: str
    buffer: bool
    kind: Literal["set", "fill", "extend", "delete"]
    value: Any = None


class ModuleSnapshot:
    """The attributes and buffers of modules and their contents, to be restored after an early run.

    Not restored is what a container holds, such as a list in a dict, or a tensor in a list.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._slots = [(slots, dict(slots)) for m in modules for slots in (vars(m), buffer_slots(m))]
        values = [value for _, slots in self._slots for name, value in slots.items() if name not in _INTERNAL]
        tensors = [v for v in values if isinstance(v, Tensor) and v.numel() <= _COPIED]
        self._tensors = [(tensor, version_of(tensor), tensor.detach().clone()) for tensor in tensors]
        self._containers = [(v, copy(v)) for v in values if isinstance(v, _CONTAINERS) or _is_small_array(v)]

    def restore(self) -> None:
        """Restore the modules."""
        for tensor, version, value in self._tensors:
            if isinstance(tensor, Placeholder):  # overwritten by an unknown value
                tensor.become(value.clone(), requires_grad=False)
            elif version_of(tensor) != version:
                with torch.no_grad():
                    tensor.copy_(value)
        for container, content in self._containers:
            _fill(container, content)
        for slots, before in self._slots:
            if list(slots) != list(before) or not all(map(is_, slots.values(), before.values())):
                slots.clear()
                slots.update(before)


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """An object and its content, as values that are equal to later ones as long as nothing has changed.

    Attributes:
        value: the object.
        content: None for what cannot change.
    """

    value: Any
    content: Any = None

    @classmethod
    def of(cls, value: Any) -> _Mark:
        if type(value) in _NUMBERS:  # as most are
            return cls(value)
        if isinstance(value, dict):
            return cls(value, [(key, cls.of(item)) for key, item in value.items()])
        if isinstance(value, list | tuple | deque):
            return cls(value, [cls.of(item) for item in value])
        if isinstance(value, Tensor) and not isinstance(value, Placeholder):
            return cls(value, version_of(value))
        if isinstance(value, np.ndarray):
            return cls(value, value.tobytes())
        return cls(value, set(value) if isinstance(value, set) else None)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and self.value is other.value and self.content == other.content

    __hash__ = None  # type: ignore[assignment]  # contents can't be hashed


class ChangeRecorder:
    """Finds what changes in the plain attributes and buffers of modules from now on. No communication.

    Args:
        modules: by names that are the same on every stage.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._marks = {
            name: {key: _Mark.of(value) for key, value in _values(module).items()} for name, module in modules.items()
        }

    def changes(self) -> list[Change]:
        """Return all changes. Tensors are copies without history, in host memory.

        Raises:
            UnsupportedCodeError: for an attribute that keeps a value which only another stage has.
        """
        changes = []
        extended: set[int] = set()  # a list with two names is extended once
        for name, module in self._modules.items():
            marks = self._marks[name]
            for key, value in _values(module).items():
                old, new = marks.get(key), _Mark.of(value)
                if new == old or id(value) in extended:
                    continue
                if (placeholder := first_placeholder(value)) is not None:
                    raise UnsupportedCodeError(
                        f"{key[0]} of {type(module).__name__} keeps {placeholder.origin}, which the last pipeline "
                        "stage doesn't have. Set it after the layers, or from their results."
                    )
                is_same = old is not None and value is old.value and isinstance(value, _CONTAINERS)
                start = old.content if old is not None and is_same and isinstance(value, list) else None
                if start is not None and new.content[: len(start)] == start:
                    extended.add(id(value))
                    changes.append(Change(name, *key, "extend", to_portable(value[len(start) :])))
                else:  # a container stays the same object, which others may have, too
                    changes.append(Change(name, *key, "fill" if is_same else "set", to_portable(value)))
            gone = [key for key in marks if key[0] not in _slots(module, key)]
            changes += [Change(name, *key, "delete") for key in gone]
        return changes


def apply_changes(modules: Mapping[str, nn.Module], changes: Sequence[Change], device: torch.device) -> None:
    """Repeat the changes of another stage on the modules here.

    Raises:
        UnsupportedCodeError: for a change in a module that a step has registered there alone.
    """
    for change in changes:
        if change.module not in modules:
            raise UnsupportedCodeError(
                f"a step changes {change.name} of {change.module}, a module that a step has registered, which only "
                "the last stage of the pipeline has. Make it in __init__, or in a hook."
            )
        slots = _slots(modules[change.module], (change.name, change.buffer))
        old: Any = slots.get(change.name)
        value = from_portable(change.value, device)
        if change.kind == "delete":
            del slots[change.name]
        elif change.kind == "extend":
            old.extend(value)
        elif change.kind == "fill":
            _fill(old, value)
        elif change.buffer and _have_same_layout(old, value):  # it stays the same object
            with torch.no_grad():
                old.copy_(value)
        else:
            slots[change.name] = value


def _values(module: nn.Module) -> dict[_Key, Any]:
    """Return the plain attributes and the buffers of a module."""
    plain = {(name, False): v for name, v in vars(module).items() if name not in _INTERNAL and _is_plain(v)}
    return plain | {(name, True): buffer for name, buffer in buffer_slots(module).items()}


def _fill(container: Any, content: Any) -> None:
    """Put content into a list, dict, set, deque or array in place of its own."""
    if isinstance(container, np.ndarray):
        container[...] = content
        return
    container.clear()
    container.update(content) if isinstance(container, dict | set) else container.extend(content)


def _is_small_array(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject


def _have_same_layout(old: Any, new: Any) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)


def _slots(module: nn.Module, key: _Key) -> MutableMapping[str, Any]:
    return buffer_slots(module) if key[1] else vars(module)


def _is_plain(value: Any) -> bool:
    if type(value) in _NUMBERS:  # as most are
        return True
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray):
        return _is_small_array(value)
    if isinstance(value, dict):
        return all(isinstance(key, _VALUES) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) and not isinstance(value, nn.Parameter)
