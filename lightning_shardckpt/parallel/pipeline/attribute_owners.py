"""Objects in attributes of modules whose own attributes a step may change: meters, annealers, states.

Tracked are dataclasses, instances of users' classes, and metrics of torchmetrics that no module has registered, also
inside lists, dicts and other tracked objects. Instances of classes of installed packages, and of classes derived from
them (datasets, loggers, optimizers), are not tracked: restoring some of their attributes could leave them inconsistent.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_shardckpt.errors import UnsupportedCodeError

Path = tuple[Any, ...]
"""The path to an object: the name of a module, then names of attributes, keys and positions."""

_CONTAINERS = (list, tuple, dict, deque)
MAX_ITEMS = 1000
"""Larger containers are data, and are not searched for objects."""
INTERNAL = frozenset(vars(nn.Module()))
"""Attributes that every module has."""
_LEAVES = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Tensor})
_MAX_LEVELS = 6
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "lightning", "lightning_shardckpt"} - {"test"})
_INSTALLED = ("site-packages", "dist-packages")
_NAMESPACES = (argparse.Namespace, types.SimpleNamespace)
_IGNORED_BASES = {"builtins", "abc", "typing"}  # modules of base classes


def find_owners(modules: Mapping[str, nn.Module]) -> Iterator[tuple[Path, Any]]:
    """Yield the tracked objects in attributes of modules, each once, in the same order on every stage."""
    seen = set(map(id, modules.values()))
    for of, module in modules.items():
        for name, value in vars(module).items():
            if type(value) not in _LEAVES and name not in INTERNAL:
                yield from _find(value, (of, name), seen)


@lru_cache(maxsize=1 << 12)
def is_installed(module: str) -> bool:
    """Return True if a Python module, given by name, is part of the standard library or an installed package."""
    if module.partition(".")[0] in _LIBRARIES:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not set(_INSTALLED).isdisjoint(PurePath(file).parts)


def attributes_of(owner: Any) -> MutableMapping[str, Any]:
    """Return the attributes of a module or a tracked object as a mutable mapping."""
    return vars(owner) if hasattr(owner, "__dict__") else _Slots(owner)


def resolve_owner(modules: Mapping[str, nn.Module], path: Path) -> Any:
    """Return the module or object at a path.

    Raises:
        LookupError: if there is no object.
    """
    name, *keys = path
    owner: Any = modules[name]
    for key in keys:
        owner = owner[key] if isinstance(owner, _CONTAINERS) else attributes_of(owner)[key]
    return owner


def _find(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    kind: Any = type(value)
    if isinstance(value, _CONTAINERS):
        if value and len(value) <= MAX_ITEMS and len(path) <= _MAX_LEVELS:
            for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
                if type(item) not in _LEAVES:
                    yield from _find(item, (*path, key), seen)
    elif isinstance(value, Metric | MetricCollection) and id(value) not in seen:
        seen.add(id(value))
        yield path, value
        yield from _find(vars(value)["_modules"], (*path, "_modules"), seen)
    elif is_tracked(kind) and id(value) not in seen:
        seen.add(id(value))
        yield path, value
        if len(path) <= _MAX_LEVELS:
            for name, item in attributes_of(value).items():
                yield from _find(item, (*path, name), seen)


@lru_cache(maxsize=1 << 16)
def is_tracked(kind: type) -> bool:
    """Return True if changes of attributes of the instances of ``kind`` are tracked."""
    if kind in _NAMESPACES:
        return True
    bases = [base for base in kind.__mro__[:-1] if base.__module__ not in _IGNORED_BASES]
    if not bases or issubclass(kind, type) or any(base.__module__ == "builtins" for base in kind.__mro__[:-1]):
        return False  # a subclass of a builtin has content besides attributes
    if any(base.__module__.partition(".")[0] in _LIBRARIES for base in bases):
        return False
    return dataclasses.is_dataclass(kind) or not any(is_installed(base.__module__) for base in bases)


class Iterators:
    """The iterators in attributes of ``owners``, which cannot be restored after a use."""

    def __init__(self, owners: Sequence[Any]) -> None:
        self._iterators = [
            (owner, name, value)
            for owner in owners
            for name, value in attributes_of(owner).items()
            if type(value) not in _LEAVES and name not in INTERNAL and isinstance(value, Iterator)
        ]

    @contextmanager
    def refuse(self) -> Iterator[None]:
        """Refuse all uses of the iterators."""
        for owner, name, _ in self._iterators:
            attributes_of(owner)[name] = _RefusedIterator(f"{name} of {type(owner).__name__}")
        try:
            yield
        finally:
            for owner, name, value in self._iterators:
                if isinstance(attributes_of(owner).get(name), _RefusedIterator):
                    attributes_of(owner)[name] = value


class _RefusedIterator:
    """Stands for an iterator in the part of a step that runs several times."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def _error(self) -> UnsupportedCodeError:
        return UnsupportedCodeError(
            f"{self._name}, an iterator or a file, is used before the last layer of a pipelined step. The stages run "
            "that part several times, and would get other items each time. Let the dataloader return the items in the "
            "batch (CombinedLoader), or use the iterator in a hook, such as on_train_batch_start, or after the layers."
        )


class _Slots(MutableMapping[str, Any]):
    """The attributes of an object whose class has ``__slots__``."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def _names(self) -> Iterator[str]:
        for base in type(self._owner).__mro__:
            slots = vars(base).get("__slots__", ())
            yield from (slots,) if isinstance(slots, str) else slots

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names() if hasattr(self._owner, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)
