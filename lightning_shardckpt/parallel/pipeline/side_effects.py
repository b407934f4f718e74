"""Snapshots of modules that every stage has, to undo a step's changes or to repeat them on other stages.

A step may change attributes and buffers: counters, lists of outputs, metrics. Runs of a part of a step are undone;
changes by the whole step on the last stage are repeated on all stages. Covered are numbers, strings, tensors, arrays,
random generators, lists, dicts, sets and tuples of them, objects of users' classes with such attributes, and buffers.
"""

from __future__ import annotations

import datetime
import enum
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
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
from lightning_shardckpt.parallel.pipeline.attribute_owners import (
    INTERNAL,
    MAX_ITEMS,
    Iterators,
    Path,
    attributes_of,
    find_owners,
    is_tracked,
    resolve_owner,
)
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder, first_placeholder
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state, set_generator_state

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_VALUES: tuple[type, ...] = (*_PLAIN, *_DATES, enum.Enum, PurePath, range, slice, frozenset, np.generic)
_VALUES = (*_VALUES, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, dict, deque)
_COPIED = 1 << 20  # elements; a larger tensor is not copied, so a change is detected, but cannot be undone
_ARRAY_BYTES = 1 << 20  # changes of a larger numpy array are not detected


@dataclass(frozen=True, slots=True)
class Change:
    """A change of one attribute or buffer of a module, or of an object in its attributes."""

    owner: Path
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

    def restore(self, name: str) -> Any:
        """Restore the content of the object, an attribute called ``name``, and return it.

        Raises:
            UnsupportedCodeError: for a tensor that was changed in place and not copied.
        """
        value = self.value
        if self.items is not None:
            items = [(key, item.restore(name)) for key, item in self.items]
            if isinstance(value, list | deque | dict):
                value.clear()
                value.update(dict(items)) if isinstance(value, dict) else value.extend(item for _, item in items)
        elif isinstance(value, GENERATORS):
            set_generator_state(value, self.content)
        elif isinstance(value, Placeholder) and self.copy is not None:  # overwritten by an unknown value
            value.become(self.copy.clone(), requires_grad=False)
        elif isinstance(value, Tensor) and self.content is not None and version_of(value) != self.content:
            if self.copy is None:
                raise UnsupportedCodeError(
                    f"{name}, or a tensor inside of it, is changed in place before the layers of a pipelined step. "
                    "Stages run that part several times, and cannot undo it: replace the tensor, or change it after "
                    "the layers."
                )
            with torch.no_grad():
                value.copy_(self.copy)
        elif isinstance(value, np.ndarray):
            value[...] = np.frombuffer(self.content, value.dtype).reshape(value.shape)
        elif isinstance(value, set):
            value.clear()
            value.update(self.content)
        return value


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    return container.items() if isinstance(container, dict) else enumerate(container)


def _content(value: Any) -> Any:
    """Return a value that changes with the content of an object: for a tensor its version."""
    if isinstance(value, Tensor):
        return None if isinstance(value, Placeholder) else version_of(value)
    if isinstance(value, GENERATORS):
        return generator_state(value)
    return value.tobytes() if isinstance(value, np.ndarray) else set(value) if isinstance(value, set) else None


class _OwnerSnapshot:
    """The attributes and buffers of one module or object. The frequent check `is_unchanged` is the cheapest."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.attributes, self._buffers = dict(attributes_of(owner)), dict(_buffers(owner))
        self._internal = INTERNAL if isinstance(owner, nn.Module) else frozenset()
        self._opaque: list[Any] = []  # containers of values that are not covered, but may become so
        self._saved: dict[tuple[str, bool], _SavedValue] = {}
        for name, value in self.attributes.items():
            if type(value) in _PLAIN or name in self._internal:
                continue
            if _is_plain(value) and not self._is_data(value):
                self._saved[name, False] = _SavedValue.of(value, copy_tensor=_is_small(value))
            elif isinstance(value, _CONTAINERS):
                self._opaque.append(value)
        for name, buffer in self._buffers.items():
            self._saved[name, True] = _SavedValue.of(buffer, copy_tensor=_is_small(buffer))

    @property
    def is_unchanged(self) -> bool:
        """True if nothing has changed since the snapshot."""
        return (
            _are_same(attributes_of(self.owner), self.attributes)
            and _are_same(_buffers(self.owner), self._buffers)
            and all(saved.equals(saved.value) for saved in self._saved.values())
            and not any(map(_is_plain, self._opaque))
        )

    @property
    def drew(self) -> bool:
        """True if a random generator was used since the snapshot."""
        generators = [saved for saved in self._saved.values() if isinstance(saved.value, GENERATORS)]
        return not all(saved.equals(saved.value) for saved in generators)

    def saved_values(self) -> dict[tuple[str, bool], _SavedValue]:
        """Return the saved values by (name, is_buffer)."""
        attributes = self.attributes.items()
        plain = {(k, False): _SavedValue(v) for k, v in attributes if type(v) in _PLAIN and k not in self._internal}
        return plain | self._saved

    def current_values(self) -> dict[tuple[str, bool], Any]:
        """Return the current values by (name, is_buffer)."""
        attributes = {
            (name, False): value
            for name, value in attributes_of(self.owner).items()
            if name not in self._internal and _is_plain(value) and not self._is_data(value)
        }
        return attributes | {(name, True): buffer for name, buffer in _buffers(self.owner).items()}

    def _is_data(self, value: Any) -> bool:
        """Return True for a container in an object that is too large to be compared in each step."""
        return not self._internal and isinstance(value, _CONTAINERS) and len(value) > MAX_ITEMS

    def changed_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and values of floating-point buffers that were changed or replaced."""
        for name, value in _buffers(self.owner).items():
            saved = self._saved.get((name, True))
            if value is None or isinstance(value, Placeholder) or (saved is not None and saved.equals(value)):
                continue
            if value.is_floating_point():
                yield name, value

    def restore(self) -> None:
        """Restore all saved values."""
        owner, saved = self.owner, self.saved_values()
        for key, value in self.current_values().items():
            if key not in saved and not key[1] and key[0] in self.attributes:  # not covered by the snapshot
                attributes_of(owner)[key[0]] = self.attributes[key[0]]
            elif key not in saved:
                del _slots(owner, key)[key[0]]
            elif not saved[key].equals(value):
                _slots(owner, key)[key[0]] = saved[key].restore(key[0])
        for key in saved.keys() - self.current_values().keys():
            _slots(owner, key)[key[0]] = saved[key].restore(key[0])


class ModuleSnapshot:
    """A snapshot of the attributes and buffers of modules, to be compared and restored. No communication.

    Args:
        modules: by names that are the same on every stage.

    Attributes:
        written: the values that `restore` has replaced in buffers, by module class and name.
        drew: True if `restore` found that a random generator in an attribute was used.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.written: dict[tuple[str, str], Tensor] = {}
        self.drew = False
        objects = dict(find_owners(modules))
        self._paths: list[Path] = [*((name,) for name in modules), *objects]
        owners = [*modules.values(), *objects.values()]
        self._snapshots = [_OwnerSnapshot(owner) for owner in owners]
        self.iterators = Iterators(owners)

    def restore(self) -> bool:
        """Restore the modules, and return True if nothing had changed."""
        changed = [snapshot for snapshot in self._snapshots if not snapshot.is_unchanged]
        self.drew = any(snapshot.drew for snapshot in changed)
        for snapshot in changed:
            kind = type(snapshot.owner).__name__
            self.written |= {(kind, name): value.detach().clone() for name, value in snapshot.changed_buffers()}
            snapshot.restore()
        return not changed

    def changes(self) -> list[Change]:
        """Return all changes since the snapshot. Tensors are copies without history, in host memory."""
        changes = []
        extended: set[int] = set()  # a list with two names is extended once
        for path, snapshot in zip(reversed(self._paths), reversed(self._snapshots), strict=True):  # innermost first
            if snapshot.is_unchanged:
                continue
            owner, saved = snapshot.owner, snapshot.saved_values()
            for (name, buffer), value in snapshot.current_values().items():
                old = saved.get((name, buffer))
                if (old is not None and old.equals(value)) or id(value) in extended:
                    continue
                _check_known(owner, name, value)
                if isinstance(value, GENERATORS):
                    changes.append(Change(path, name, buffer, "state", generator_state(value)))
                elif old is not None and value is old.value and isinstance(value, list) and old.is_prefix_of(value):
                    extended.add(id(value))
                    changes.append(Change(path, name, buffer, "extend", to_portable(value[len(old.items or ()) :])))
                else:  # a container stays the same object, which layers may have, too
                    is_same = old is not None and value is old.value and isinstance(value, list | dict | set | deque)
                    changes.append(Change(path, name, buffer, "fill" if is_same else "set", to_portable(value)))
            changes += [Change(path, *key, "delete") for key in saved if key[0] not in _slots(owner, key)]
        return changes

    def apply(self, changes: Sequence[Change], device: torch.device) -> None:
        """Repeat the changes of another stage on these modules, which must be as in the snapshot.

        Raises:
            UnsupportedCodeError: for a change in a module that a step has registered there alone.
        """
        for change in changes:
            if change.owner[0] not in self._modules:
                raise UnsupportedCodeError(
                    f"a step changes {change.name} of {change.owner[0]}, a module that a step has registered, which "
                    "only the last stage of the pipeline has. Make it in __init__, or in a hook."
                )
            slots = _slots(resolve_owner(self._modules, change.owner), (change.name, change.buffer))
            old: Any = slots.get(change.name)
            value = from_portable(change.value, device)
            if change.kind == "delete":
                del slots[change.name]
            elif change.kind in ("extend", "fill"):
                if change.kind == "fill":
                    old.clear()
                old.update(value) if isinstance(old, dict | set) else old.extend(value)
            elif change.kind == "state":
                set_generator_state(old, change.value)
            elif change.buffer and _have_same_layout(old, value):
                old.copy_(value)
            else:
                slots[change.name] = value


def _check_known(owner: Any, name: str, value: Any) -> None:
    placeholder = first_placeholder(value)
    if placeholder is not None:
        raise UnsupportedCodeError(
            f"{name} of {type(owner).__name__} keeps {placeholder.origin}, which the last pipeline stage "
            "doesn't have. Set it after the layers, or from their results."
        )


def _have_same_layout(old: Any, new: Any) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)


def _slots(owner: Any, key: tuple[str, bool]) -> MutableMapping[str, Any]:
    return buffer_slots(owner) if key[1] else attributes_of(owner)


def _buffers(owner: Any) -> dict[str, Any]:
    return buffer_slots(owner) if isinstance(owner, nn.Module) else {}


def _is_plain(value: Any, parents: Collection[int] = ()) -> bool:
    """Return True for a value that a snapshot covers. ``parents``: the ids of objects that contain it."""
    if isinstance(value, list | tuple | set | deque):
        return all(_is_plain(item, parents) for item in value)
    if isinstance(value, np.ndarray):
        return value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject
    if isinstance(value, dict):
        return all(isinstance(key, _VALUES) and _is_plain(item, parents) for key, item in value.items())
    kind: Any = type(value)  # which mypy takes for unhashable
    if is_tracked(kind):  # as a value it is sent as a whole
        inner = {*parents, id(value)}
        return id(value) in parents or all(_is_plain(item, inner) for item in attributes_of(value).values())
    return _is_plain_class(kind) and not (isinstance(value, Tensor) and isinstance(value, nn.Parameter))


@lru_cache(maxsize=1 << 16)
def _is_plain_class(kind: type) -> bool:
    return issubclass(kind, (*_VALUES, *GENERATORS, Tensor))


def _are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if both have the same names, in the same order, for the same objects."""
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))


def _is_small(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() <= _COPIED
