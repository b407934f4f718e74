"""torch's pytrees: nested lists, tuples, dicts, named tuples, and registered classes.

Checked with torch 2.12 to 2.15. Relies on ``torch.utils._pytree``, which has no public name. Any other object is a
leaf, ``None`` included; transformers registers its outputs and caches. A user's dataclass with tensors is registered
when it is first flattened, and is a leaf of other functions until then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec as TreeSpec

_T = TypeVar("_T")
tree_unflatten = _pytree.tree_unflatten
_LEAF = _pytree.tree_flatten(None)[1]
_registered: set[type] = set()
_LEAF_CLASSES = (int, float, str, bool, type(None))


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of nested containers, and their structure; a tensor is a leaf."""
    return ([tree], _LEAF) if isinstance(tree, torch.Tensor) else _with_dataclasses(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """Return the leaves of nested containers; a tensor is a leaf."""
    return [tree] if isinstance(tree, torch.Tensor) else _pytree.tree_leaves(tree)


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of nested containers with every leaf replaced by the result of ``change``."""
    return change(tree) if isinstance(tree, torch.Tensor) else _pytree.tree_map(change, tree)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """Return the leaves of a call's arguments, as of ``tree_flatten((args, kwargs))``, and a key of their structure."""
    leaves = [*args, *kwargs.values()]
    if all(isinstance(leaf, torch.Tensor) or type(leaf) in _LEAF_CLASSES for leaf in leaves):
        return leaves, (len(args), *kwargs)
    return _with_dataclasses((tuple(args), dict(kwargs)))


def _with_dataclasses(tree: Any) -> tuple[list[Any], TreeSpec]:
    leaves, spec = _pytree.tree_flatten(tree)
    new = {type(leaf) for leaf in leaves if dataclasses.is_dataclass(type(leaf)) and _holds_tensors(leaf)}
    for kind in new:
        _register(kind)
    return _with_dataclasses(tree) if new else (leaves, spec)


def _holds_tensors(leaf: Any) -> bool:
    if type(leaf).__module__.startswith(("lightning_shardckpt.", "torch.")):
        return False
    values = [getattr(leaf, field.name) for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    return any(isinstance(value, torch.Tensor) for value in _with_dataclasses(values)[0])


def _register(kind: type) -> None:
    if kind in _registered:  # by the check of a dataclass that contains it
        return
    _registered.add(kind)
    names = [field.name for field in dataclasses.fields(kind)]

    def flatten(value: Any) -> tuple[list[Any], None]:
        return [getattr(value, name) for name in names], None

    def unflatten(values: Any, context: None) -> Any:
        new: Any = object.__new__(kind)
        for name, value in zip(names, values, strict=True):
            object.__setattr__(new, name, value)  # it may be frozen
        return new

    _pytree.register_pytree_node(kind, flatten, unflatten)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: _T) -> _T:
    """Return ``tree`` with every tensor in its containers replaced by the result of ``change``; itself if none changed.
    """
    if isinstance(tree, torch.Tensor):
        return change(tree)  # type: ignore[return-value]  # a tensor, too
    leaves, spec = _pytree.tree_flatten(tree)
    changed = [change(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return tree
    mapped: _T = tree_unflatten(changed, spec)
    return mapped
