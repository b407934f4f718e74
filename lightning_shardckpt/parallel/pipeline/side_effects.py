"""Snapshots of the modules that every stage has: early runs of a step are undone, the run that counts is repeated.

Covered are buffers and the plain attributes of modules: numbers, strings, dates, paths, tensors, arrays, random
generators, and lists, dicts, sets and tuples of them. Attributes that are objects of other classes are left alone.
"""

from __future__ import annotations

import datetime
import enum
from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
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
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state, set_generator_state

_NUMBERS = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_VALUES: tuple[type, ...] = (*_NUMBERS, *_DATES, enum.Enum, PurePath, range, slice, frozenset, np.generic)
_VALUES = (*_VALUES, torch.dtype, torch.device)
_PLAIN = (*_VALUES, *GENERATORS, Tensor)
_COPIED = 1 << 20  # elements; an in-place change of a larger tensor before the layers is not undone
_ARRAY_BYTES = 1 << 20  # larger numpy arrays are data
_INTERNAL = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one attribute or buffer of a module, which is given by name."""

    module: str
    name: str
    buffer: bool
    kind: Literal["set", "fill", "extend", "delete", "state"]
    value: Any = None


@dataclass(frozen=True, slots=True)
class _SavedValue:
    """A saved value: the object, its content, its items if it is a container, and for a tensor a copy.

    Tensors inside containers are not copied, since there may be many: a change of one is detected, but not undone.
    """

    value: Any
    content: Any = None
    items: Sequence[tuple[Any, _SavedValue]] | None = None
    copy: Tensor | None = None

    @classmethod
    def of(cls, value: Any, *, copy_tensor: bool = True) -> _SavedValue:
        """Save the current value; of a tensor only the version, unless ``copy_tensor``."""
        if isinstance(value, list | tuple | deque | dict):
            return cls(value, items=[(key, cls.of(item, copy_tensor=False)) for key, item in _items(value)])
        has_copy = copy_tensor and isinstance(value, Tensor) and not isinstance(value, Placeholder)
        has_copy = has_copy and value.numel() <= _COPIED
        return cls(value, _content(value), copy=value.detach().clone() if has_copy else None)

    def equals(self, value: Any) -> bool:
        """Return True if ``value`` is the saved object, and unchanged."""
        if value is not self.value:
            return False
        if self.items is not None:
            return len(value) == len(self.items) and self.is_prefix_of(value)
        content = _content(value)  # None for a tensor that has been overwritten by an unknown value
        if isinstance(content, Tensor):
            return torch.equal(content, self.content)
        return repr(content) == repr(self.content) if isinstance(value, GENERATORS) else bool(content == self.content)

    def is_prefix_of(self, value: Any) -> bool:
        """Return True if a container starts with the saved, unchanged items."""
        assert self.items is not None
        pairs = zip(self.items, _items(value), strict=False)
        return len(value) >= len(self.items) and all(a == b and old.equals(new) for (a, old), (b, new) in pairs)

    def restore(self) -> Any:
        """Restore the content of the object, and return it."""
        value = self.value
        if self.items is not None:
            items = [(key, item.restore()) for key, item in self.items]
            if isinstance(value, list | deque | dict):
                value.clear()
                value.update(dict(items)) if isinstance(value, dict) else value.extend(item for _, item in items)
        elif isinstance(value, GENERATORS):
            set_generator_state(value, self.content)
        elif isinstance(value, Placeholder) and self.copy is not None:  # overwritten by an unknown value
            value.become(self.copy.clone(), requires_grad=False)
        elif isinstance(value, Tensor) and self.copy is not None and version_of(value) != self.content:
            with torch.no_grad():
                value.copy_(self.copy)
        elif isinstance(value, np.ndarray):
            value[...] = np.frombuffer(self.content, value.dtype).reshape(value.shape)
        elif isinstance(value, set):
            value.clear()
            value.update(self.content)
        return value


class _SavedModule:
    """The plain attributes and the buffers of one module. The frequent check `is_unchanged` is the cheapest."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._attributes, self._buffers = dict(vars(module)), dict(buffer_slots(module))
        values = self.current_values().items()  # by (name, is_buffer); numbers are compared by identity
        self._mutable = {key: _SavedValue.of(v) for key, v in values if key[1] or type(v) not in _NUMBERS}

    @property
    def is_unchanged(self) -> bool:
        """True if nothing has changed since the snapshot."""
        return (
            _are_same(vars(self.module), self._attributes)
            and _are_same(buffer_slots(self.module), self._buffers)
            and all(saved.equals(saved.value) for saved in self._mutable.values())
        )

    @property
    def drew(self) -> bool:
        """True if a random generator was used since the snapshot."""
        generators = [saved for saved in self._mutable.values() if isinstance(saved.value, GENERATORS)]
        return not all(saved.equals(saved.value) for saved in generators)

    def saved_values(self) -> dict[tuple[str, bool], _SavedValue]:
        """Return the saved values by (name, is_buffer)."""
        attributes = ((name, value) for name, value in self._attributes.items() if name not in _INTERNAL)
        numbers = {(name, False): _SavedValue(value) for name, value in attributes if type(value) in _NUMBERS}
        return numbers | self._mutable

    def current_values(self) -> dict[tuple[str, bool], Any]:
        """Return the current values by (name, is_buffer)."""
        attributes = ((name, value) for name, value in vars(self.module).items() if name not in _INTERNAL)
        values = {(name, False): value for name, value in attributes if _is_plain(value)}
        return values | {(name, True): buffer for name, buffer in buffer_slots(self.module).items()}

    def restore(self) -> None:
        """Restore all saved values."""
        saved = self.saved_values()
        for key, value in self.current_values().items():
            if key not in saved and not key[1] and key[0] in self._attributes:  # an object of another class before
                _slots(self.module, key)[key[0]] = self._attributes[key[0]]
            elif key not in saved:
                del _slots(self.module, key)[key[0]]
            elif not saved[key].equals(value):
                _slots(self.module, key)[key[0]] = saved[key].restore()
        for key in saved.keys() - self.current_values().keys():
            _slots(self.module, key)[key[0]] = saved[key].restore()


class ModuleSnapshot:
    """A snapshot of the plain attributes and buffers of modules, to be compared and restored. No communication.

    Args:
        modules: by names that are the same on every stage.

    Attributes:
        drew: True if `restore` found that a random generator in an attribute was used.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._saved = {name: _SavedModule(module) for name, module in modules.items()}
        self.drew = False

    def restore(self) -> bool:
        """Restore the modules, and return True if nothing had changed."""
        changed = [saved for saved in self._saved.values() if not saved.is_unchanged]
        self.drew = any(saved.drew for saved in changed)
        for saved in changed:
            saved.restore()
        return not changed

    def changes(self) -> list[Change]:
        """Return all changes since the snapshot. Tensors are copies without history, in host memory.

        Raises:
            UnsupportedCodeError: for an attribute that keeps a value which only another stage has.
        """
        changes = []
        extended: set[int] = set()  # a list with two names is extended once
        for module, snapshot in self._saved.items():
            if snapshot.is_unchanged:
                continue
            saved = snapshot.saved_values()
            for (name, buffer), value in snapshot.current_values().items():
                old = saved.get((name, buffer))
                if (old is not None and old.equals(value)) or id(value) in extended:
                    continue
                _check_known(snapshot.module, name, value)
                if isinstance(value, GENERATORS):
                    changes.append(Change(module, name, buffer, "state", generator_state(value)))
                elif old is not None and value is old.value and isinstance(value, list) and old.is_prefix_of(value):
                    extended.add(id(value))
                    changes.append(Change(module, name, buffer, "extend", to_portable(value[len(old.items or ()) :])))
                else:  # a container stays the same object, which others may have, too
                    is_same = old is not None and value is old.value and isinstance(value, list | dict | set | deque)
                    changes.append(Change(module, name, buffer, "fill" if is_same else "set", to_portable(value)))
            gone = [key for key in saved if key[0] not in _slots(snapshot.module, key)]
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
            elif change.kind == "state":
                set_generator_state(old, value)
            elif change.buffer and _have_same_layout(old, value):  # it stays the same object
                with torch.no_grad():
                    old.copy_(value)
            else:
                slots[change.name] = value


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _content(value: Any) -> Any:
    """Return a value that changes with the content of an object: for a tensor its version."""
    if isinstance(value, Tensor):
        return None if isinstance(value, Placeholder) else version_of(value)
    if isinstance(value, GENERATORS):
        return generator_state(value)
    return value.tobytes() if isinstance(value, np.ndarray) else set(value) if isinstance(value, set) else None


def _check_known(module: nn.Module, name: str, value: Any) -> None:
    placeholder = first_placeholder(value)
    if placeholder is not None:
        raise UnsupportedCodeError(
            f"{name} of {type(module).__name__} keeps {placeholder.origin}, which the last pipeline stage "
            "doesn't have. Set it after the layers, or from their results."
        )


def _have_same_layout(old: Any, new: Any) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)


def _slots(module: nn.Module, key: tuple[str, bool]) -> MutableMapping[str, Any]:
    return buffer_slots(module) if key[1] else vars(module)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | set | deque):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray):
        return value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject
    if isinstance(value, dict):
        return all(isinstance(key, _VALUES) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN) and not isinstance(value, nn.Parameter)


def _are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if both have the same names, in the same order, for the same objects."""
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))
