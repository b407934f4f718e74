"""Note what a step changes in modules besides gradients, undo it, and repeat it on other stages.

Counters, lists of outputs, metrics and buffers: a step changes attributes of modules that every stage holds. Runs
of a part of the step must leave no trace; what the whole step changed on the last stage must be changed on
all. Covered are numbers, strings, tensors, arrays, random generators, lists, dicts, sets and tuples of them, objects of
users' classes with such attributes, and buffers.
"""

from __future__ import annotations

import datetime
import enum
from collections import deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
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
from lightning_shardckpt.parallel.pipeline.attribute_owners import (
    INTERNAL,
    MOST_ITEMS,
    Iterators,
    Path,
    attributes_of,
    is_followed,
    owner_at,
    owners_in,
)
from lightning_shardckpt.parallel.pipeline.portable_values import moved_to, portable
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder, first_placeholder
from lightning_shardckpt.system.random_generators import GENERATORS, generator_state, set_generator_state

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_VALUES: tuple[type, ...] = (*_PLAIN, *_DATES, enum.Enum, PurePath, range, slice, frozenset, np.generic)
_VALUES = (*_VALUES, torch.dtype, torch.device)
_CONTAINERS = (list, tuple, set, dict, deque)
_COPIED = 1 << 20  # elements; a larger tensor is not copied, so that a change of it can be noticed, but not undone
_ARRAY_BYTES = 1 << 20  # of a larger array of numpy changes are not noticed


@dataclass(frozen=True, slots=True)
class Change:
    """One attribute or buffer of one module, or of an object in its attributes, and what became of it."""

    owner: Path
    name: str
    buffer: bool
    kind: Literal["set", "extend", "delete", "state"]
    value: Any = None


@dataclass(frozen=True, slots=True)
class _SavedValue:
    """A value as it was: the object, what was inside it, and of a tensor its version and a copy.

    Tensors inside containers are not copied, since there may be many: a change of one is noticed, but not undone.
    """

    value: Any
    inside: Any = None
    copy: Tensor | None = None

    @classmethod
    def of(cls, value: Any, *, copied: bool = True) -> _SavedValue:
        """Return a value as it is now; of a tensor with a copy, if ``copied``."""
        if isinstance(value, Placeholder):
            return cls(value)
        if isinstance(value, Tensor):
            return cls(value, version_of(value), value.detach().clone() if copied else None)
        if isinstance(value, GENERATORS):
            return cls(value, generator_state(value))
        if isinstance(value, np.ndarray):
            return cls(value, value.tobytes())
        if isinstance(value, list | tuple | deque):
            return cls(value, [cls.of(item, copied=False) for item in value])
        if isinstance(value, dict):
            return cls(value, {key: cls.of(item, copied=False) for key, item in value.items()})
        return cls(value, set(value) if isinstance(value, set) else None)

    def same(self, value: Any) -> bool:
        """Return whether ``value`` is this object, and unchanged."""
        if value is not self.value:
            return False
        if isinstance(value, Placeholder):  # unless it was one then, something unknown was written into it
            return self.inside is None
        if isinstance(value, Tensor):
            return bool(version_of(value) == self.inside)
        if isinstance(value, GENERATORS):
            state = generator_state(value)
            if isinstance(state, Tensor):
                return torch.equal(state, self.inside)
            return repr(state) == repr(self.inside)
        if isinstance(value, np.ndarray):
            return bool(value.tobytes() == self.inside)
        if isinstance(value, list | tuple | deque):
            return len(value) == len(self.inside) and self.begins(value)
        if isinstance(value, dict):
            return value.keys() == self.inside.keys() and all(kept.same(value[k]) for k, kept in self.inside.items())
        return not isinstance(value, set) or value == self.inside

    def begins(self, value: Any) -> bool:
        """Return whether a list begins with what was in it."""
        kept = self.inside
        return len(value) >= len(kept) and all(k.same(v) for k, v in zip(kept, value, strict=False))

    def restored(self, name: str) -> Any:
        """Return the object, with what was inside it.

        Args:
            name: of the attribute, for errors.

        Raises:
            UnsupportedCodeError: for a tensor that was changed in place and not copied.
        """
        value = self.value
        if isinstance(value, GENERATORS):
            set_generator_state(value, self.inside)
        elif isinstance(value, Placeholder) and self.copy is not None:  # something unknown was written into it
            value.become(self.copy.clone(), requires_grad=False)
        elif isinstance(value, Tensor) and self.inside is not None and version_of(value) != self.inside:
            if self.copy is None:
                raise UnsupportedCodeError(
                    f"{name}, or a tensor inside of it, is changed in place before the layers of a pipelined step. "
                    "Stages run that part several times, and cannot undo it: replace the tensor, or change it after "
                    "the layers."
                )
            with torch.no_grad():
                value.copy_(self.copy)
        elif isinstance(value, np.ndarray):
            value[...] = np.frombuffer(self.inside, value.dtype).reshape(value.shape)
        elif isinstance(value, tuple):
            for kept in self.inside:
                kept.restored(name)
        elif isinstance(value, list | deque):
            items = [kept.restored(name) for kept in self.inside]
            value.clear()
            value.extend(items)
        elif isinstance(value, dict):
            before = {key: kept.restored(name) for key, kept in self.inside.items()}
            value.clear()
            value.update(before)
        elif isinstance(value, set):
            value.clear()
            value.update(self.inside)
        return value


class _ModuleMemory:
    """The present memory of one module or object. What is compared most often, that nothing changed, costs least."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.attributes, self._buffers = dict(attributes_of(module)), dict(_buffers(module))
        self._internal = INTERNAL if isinstance(module, nn.Module) else frozenset()
        self._opaque: list[Any] = []  # containers of what is not covered, which may become covered
        self._saved: dict[tuple[str, bool], _SavedValue] = {}
        for name, value in self.attributes.items():
            if type(value) in _PLAIN or name in self._internal:
                continue
            if _is_plain(value) and not self._is_data(value):
                self._saved[name, False] = _SavedValue.of(value, copied=_is_small(value))
            elif isinstance(value, _CONTAINERS):
                self._opaque.append(value)
        for name, buffer in self._buffers.items():
            self._saved[name, True] = _SavedValue.of(buffer, copied=_is_small(buffer))

    @property
    def is_unchanged(self) -> bool:
        """True if everything is as it was."""
        return (
            _are_same(attributes_of(self.module), self.attributes)
            and _are_same(_buffers(self.module), self._buffers)
            and all(kept.same(kept.value) for kept in self._saved.values())
            and not any(map(_is_plain, self._opaque))
        )

    @property
    def drew(self) -> bool:
        """True if somebody drew from a generator since."""
        return any(isinstance(kept.value, GENERATORS) and not kept.same(kept.value) for kept in self._saved.values())

    def before(self) -> dict[tuple[str, bool], _SavedValue]:
        """Return everything that is covered, as it was."""
        attributes = self.attributes.items()
        plain = {(k, False): _SavedValue(v) for k, v in attributes if type(v) in _PLAIN and k not in self._internal}
        return plain | self._saved

    def now(self) -> Iterator[tuple[tuple[str, bool], Any]]:
        """Yield what is covered: (name, whether it is a buffer) → value."""
        for name, value in list(attributes_of(self.module).items()):
            if name not in self._internal and _is_plain(value) and not self._is_data(value):
                yield (name, False), value
        for name, buffer in _buffers(self.module).items():
            yield (name, True), buffer

    def _is_data(self, value: Any) -> bool:
        """Return whether a container in an object is too large to be looked at in each step."""
        return not self._internal and isinstance(value, _CONTAINERS) and len(value) > MOST_ITEMS

    def changed_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of numbers that have other values, or others in their place, by name."""
        for name, value in _buffers(self.module).items():
            known = self._saved.get((name, True))
            if value is None or isinstance(value, Placeholder) or (known is not None and known.same(value)):
                continue
            if value.is_floating_point():
                yield name, value

    def restore(self) -> None:
        """Make everything as it was."""
        module, before = self.module, self.before()
        for key, value in list(self.now()):
            if key not in before and not key[1] and key[0] in self.attributes:  # not covered then
                attributes_of(module)[key[0]] = self.attributes[key[0]]
            elif key not in before:
                del _place(module, key)[key[0]]
            elif not before[key].same(value):
                _place(module, key)[key[0]] = before[key].restored(key[0])
        for key in before.keys() - {key for key, _ in self.now()}:
            _place(module, key)[key[0]] = before[key].restored(key[0])


class Memory:
    """The present memory of some modules, to compare with and to return to. No communication.

    Args:
        modules: the same ones, in the same order, on every stage.

    Attributes:
        written: the values that `restore` found in buffers, by class of module and name.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self.written: dict[tuple[str, str], Tensor] = {}
        objects = dict(owners_in(modules))
        self._paths: list[Path] = [*((number,) for number in range(len(modules))), *objects]
        owners = [*modules, *objects.values()]
        self._before = [_ModuleMemory(owner) for owner in owners]
        self.iterators = Iterators(owners)

    @property
    def drew(self) -> bool:
        """True if somebody drew from a generator since."""
        return any(before.drew for before in self._before)

    def restore(self) -> bool:
        """Make everything as it was; returns whether it was so already."""
        changed = [before for before in self._before if not before.is_unchanged]
        for before in changed:
            kind = type(before.module).__name__
            self.written |= {(kind, name): value.detach().clone() for name, value in before.changed_buffers()}
            before.restore()
        return not changed

    def changes(self) -> list[Change]:
        """Return what is different now. Its tensors are copies without history, in host memory."""
        found = []
        extended: set[int] = set()  # a list with two names grows once
        for path, memory in zip(reversed(self._paths), reversed(self._before), strict=True):  # from within outwards
            if memory.is_unchanged:
                continue
            module, before = memory.module, memory.before()
            now = dict(memory.now())
            for (name, buffer), value in now.items():
                kept = before.get((name, buffer))
                if (kept is not None and kept.same(value)) or id(value) in extended:
                    continue
                _check_known(module, name, value)
                if isinstance(value, GENERATORS):
                    found.append(Change(path, name, buffer, "state", generator_state(value)))
                elif kept is not None and value is kept.value and isinstance(value, list) and kept.begins(value):
                    extended.add(id(value))
                    found.append(Change(path, name, buffer, "extend", portable(value[len(kept.inside) :])))
                else:
                    found.append(Change(path, name, buffer, "set", portable(value)))
            found += [Change(path, *key, "delete") for key in before if key[0] not in _place(module, key)]
        return found

    def apply(self, changes: Sequence[Change], device: torch.device) -> None:
        """Make here what was changed elsewhere; everything must be as it was."""
        for change in changes:
            place = _place(owner_at(self._modules, change.owner), (change.name, change.buffer))
            old: Any = place.get(change.name)
            value = moved_to(change.value, device)
            if change.kind == "delete":
                del place[change.name]
            elif change.kind == "extend":
                old.extend(value)
            elif change.kind == "state":
                set_generator_state(old, change.value)
            elif change.buffer and _alike(old, value):
                old.copy_(value)
            else:
                place[change.name] = value


def _check_known(module: Any, name: str, value: Any) -> None:
    placeholder = first_placeholder(value)
    if placeholder is not None:
        raise UnsupportedCodeError(
            f"{name} of {type(module).__name__} is to remember {placeholder.origin}, which the last pipeline stage "
            "doesn't have. Set it after the layers, or from what comes out of them."
        )


def _alike(old: Any, new: Any) -> bool:
    return isinstance(old, Tensor) and isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)


def _place(module: Any, key: tuple[str, bool]) -> MutableMapping[str, Any]:
    return buffer_slots(module) if key[1] else attributes_of(module)


def _buffers(owner: Any) -> dict[str, Any]:
    return buffer_slots(owner) if isinstance(owner, nn.Module) else {}


def _is_plain(value: Any, inside: Collection[int] = ()) -> bool:
    if isinstance(value, list | tuple | set | deque):
        return all(_is_plain(item, inside) for item in value)
    if isinstance(value, np.ndarray):
        return value.nbytes <= _ARRAY_BYTES and not value.dtype.hasobject
    if isinstance(value, dict):
        return all(isinstance(key, _VALUES) and _is_plain(item, inside) for key, item in value.items())
    kind: Any = type(value)  # which mypy takes for unhashable
    if is_followed(kind):  # as a value it is sent as a whole
        known = {*inside, id(value)}
        return id(value) in inside or all(_is_plain(item, known) for item in attributes_of(value).values())
    return _is_plain_class(kind) and not (isinstance(value, Tensor) and isinstance(value, nn.Parameter))


@lru_cache(maxsize=1 << 16)
def _is_plain_class(kind: type) -> bool:
    return issubclass(kind, (*_VALUES, *GENERATORS, Tensor))


def _are_same(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return whether both have the same names, in the same order, for the same objects."""
    return list(now) == list(before) and all(map(is_, now.values(), before.values()))


def _is_small(value: Any) -> bool:
    return not isinstance(value, Tensor) or value.numel() <= _COPIED
