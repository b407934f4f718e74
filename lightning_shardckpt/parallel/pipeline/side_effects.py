"""Snapshots of the modules that every stage has: early runs of a step are undone, the run that counts is repeated.

Covered are buffers and the plain attributes of modules: numbers, strings, dates, paths, tensors, arrays, and lists,
dicts, sets and tuples of them. Attributes that are objects of other classes are left alone, random generators refused.
"""

from __future__ import annotations

import datetime
import enum
from collections import deque
from collections.abc import Mapping, MutableMapping, Sequence
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
from lightning_shardckpt.system.random_generators import GENERATORS

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_VALUES: tuple[type, ...] = (*_NUMBERS, *_DATES, enum.Enum, PurePath, range, slice, frozenset, np.generic)
_VALUES = (*_VALUES, torch.dtype, torch.device)
_PLAIN = (*_VALUES, Tensor)
_COPIED = 1 << 20  # elements; an in-place change of a larger tensor before the layers is not undone
_ARRAY_BYTES = 1 << 20  # larger numpy arrays are data
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


@dataclass(frozen=True, slots=True, eq=False)
class _Mark:
    """An object and its content, as values that are equal to later ones as long as nothing has changed.

    Attributes:
        value: the object.
        content: None for what cannot change.
        copy: of a tensor that is an attribute or a buffer itself, to restore it.
    """

    value: Any
    content: Any = None
    copy: Tensor | None = None

    @classmethod
    def of(cls, value: Any, *, copies: bool = False) -> _Mark:
        if isinstance(value, dict):
            return cls(value, [(key, cls.of(item)) for key, item in value.items()])
        if isinstance(value, list | tuple | deque):
            return cls(value, [cls.of(item) for item in value])
        if isinstance(value, Tensor) and not isinstance(value, Placeholder):
            copied = copies and value.numel() <= _COPIED
            return cls(value, version_of(value), value.detach().clone() if copied else None)
        if isinstance(value, np.ndarray):
            return cls(value, value.tobytes())
        return cls(value, set(value) if isinstance(value, set) else None)

    def restore(self) -> None:
        """Put the content back into a container, an array, or a tensor of which there is a copy."""
        value = self.value
        if isinstance(value, dict | list | tuple | deque):
            items = dict(self.content if isinstance(value, dict) else enumerate(self.content))
            for mark in items.values():
                mark.restore()
            if not isinstance(value, tuple):
                value.clear()
                plain = {key: mark.value for key, mark in items.items()}
                value.update(plain) if isinstance(value, dict) else value.extend(plain.values())
        elif isinstance(value, np.ndarray):
            value[...] = np.frombuffer(self.content, value.dtype).reshape(value.shape)
        elif isinstance(value, set):
            value.clear()
            value.update(self.content)
        elif isinstance(value, Placeholder) and self.copy is not None:  # overwritten by an unknown value
            value.become(self.copy.clone(), requires_grad=False)
        elif self.copy is not None:
            with torch.no_grad():
                value.copy_(self.copy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Mark) and self.value is other.value and self.content == other.content

    __hash__ = None  # type: ignore[assignment]  # contents can't be hashed


class _SavedModule:
    """The plain attributes and the buffers of one module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._attributes, self._buffers = dict(vars(module)), dict(buffer_slots(module))
        self.marks = {key: _Mark.of(value, copies=True) for key, value in _values(module).items()}
        self._mutable = [mark for mark in self.marks.values() if mark.content is not None]

    def restore(self) -> None:
        """Restore what attributes and buffers refer to, and the values of tensors and containers."""
        for mark in self._mutable:
            if mark != _Mark.of(mark.value):
                mark.restore()
        if _are_same(vars(self.module), self._attributes) and _are_same(buffer_slots(self.module), self._buffers):
            return
        for key in _values(self.module).keys() - self.marks.keys():
            del _slots(self.module, key)[key[0]]
        vars(self.module).update(self._attributes)
        buffer_slots(self.module).update(self._buffers)


class ModuleSnapshot:
    """A snapshot of the plain attributes and buffers of modules, to be compared and restored. No communication.

    Args:
        modules: by names that are the same on every stage.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._saved = {name: _SavedModule(module) for name, module in modules.items()}

    def restore(self) -> None:
        """Restore the modules."""
        for saved in self._saved.values():
            saved.restore()

    def changes(self) -> list[Change]:
        """Return all changes since the snapshot. Tensors are copies without history, in host memory.

        Raises:
            UnsupportedCodeError: for an attribute that keeps a value which only another stage has.
        """
        changes = []
        extended: set[int] = set()  # a list with two names is extended once
        for module, saved in self._saved.items():
            now = _values(saved.module)
            for key, value in now.items():
                old, new = saved.marks.get(key), _Mark.of(value)
                if new == old or id(value) in extended:
                    continue
                _check_known(saved.module, key[0], value)
                is_same = old is not None and value is old.value and isinstance(value, list | dict | set | deque)
                start = old.content if old is not None and is_same and isinstance(value, list) else None
                if start is not None and new.content[: len(start)] == start:
                    extended.add(id(value))
                    changes.append(Change(module, *key, "extend", to_portable(value[len(start) :])))
                else:  # a container stays the same object, which others may have, too
                    changes.append(Change(module, *key, "fill" if is_same else "set", to_portable(value)))
            gone = [key for key in saved.marks if key[0] not in _slots(saved.module, key)]
            changes += [Change(module, *key, "delete") for key in gone]
        return changes

    def apply(self, changes: Sequence[Change], device: torch.device) -> None:
        """Repeat the changes of another stage on these modules, which must be as in the snapshot.

        Raises:
            UnsupportedCodeError: for a change in a module that a step has registered there alone.
        """
        for change in changes:
            if change.module not in self._modules:
                raise UnsupportedCodeError(
                    f"a step changes {change.name} of {change.module}, a module that a step has registered, which "
                    "only the last stage of the pipeline has. Make it in __init__, or in a hook."
                )
            slots = _slots(self._modules[change.module], (change.name, change.buffer))
            old: Any = slots.get(change.name)
            value = from_portable(change.value, device)
            if change.kind == "delete":
                del slots[change.name]
            elif change.kind in ("extend", "fill"):
                if change.kind == "fill":
                    old.clear()
                old.update(value) if isinstance(old, dict | set) else old.extend(value)
            elif change.buffer and _have_same_layout(old, value):  # it stays the same object
                with torch.no_grad():
                    old.copy_(value)
            else:
                slots[change.name] = value


def _values(module: nn.Module) -> dict[_Key, Any]:
    """Return the plain attributes and the buffers of a module.

    Raises:
        UnsupportedCodeError: for a random generator, from which repeated runs of a step would draw other numbers.
    """
    plain = {(n, False): v for n, v in vars(module).items() if n not in _INTERNAL and _is_plain(v, n, module)}
    return plain | {(name, True): buffer for name, buffer in buffer_slots(module).items()}


def _check_known(module: nn.Module, name: str, value: Any) -> None:
    placeholder = first_placeholder(value)
    if placeholder is not None:
        raise UnsupportedCodeError(
            f"{name} of {type(module).__name__} keeps {placeholder.origin}, which the last pipeline stage "
            "doesn't have. Set it after the layers, or from their results."
        )


def _have_same_layout(old: Any, new: Any) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)


def _slots(module: nn.Module, key: _Key) -> MutableMapping[str, Any]:
    return buffer_slots(module) if key[1] else vars(module)


def _is_plain(value: Any, name: str, module: nn.Module) -> bool:
    if type(value) in _NUMBERS:  # as most are
        return True
    if isinstance(value, list | tuple | set | deque):
        return all(_is_plain(item, name, module) for item in value)
    if isinstance(value, np.ndarray):
        return value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject
    if isinstance(value, dict):
        return all(isinstance(key, _VALUES) and _is_plain(item, name, module) for key, item in value.items())
    if isinstance(value, GENERATORS):
        raise UnsupportedCodeError(
            f"{name} of {type(module).__name__} is or holds a random generator. In a pipeline a step runs several "
            "times, on parts of the batch: use the global generators, draw in the dataloader, or use "
            "pipeline_parallel_size=1."
        )
    return isinstance(value, _PLAIN) and not isinstance(value, nn.Parameter)


def _are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if both have the same names, in the same order, for the same objects."""
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))
