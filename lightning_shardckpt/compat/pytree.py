"""Flatten nested structures as torch does: lists, tuples, dicts, named tuples, and what is registered as a node.

Checked with torch 2.12 to 2.15. Relies on ``torch.utils._pytree``, which has no public name. An object that is no such
container is a leaf, ``None`` included; models of transformers register their outputs and caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

_T = TypeVar("_T")
_LEAF = _pytree.tree_flatten(None)[1]
_LEAF_CLASSES = (int, float, str, bool, type(None))


def tree_flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """The leaves of nested containers, and how they are nested; of a tensor, itself."""
    return ([tree], _LEAF) if isinstance(tree, torch.Tensor) else _pytree.tree_flatten(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """The leaves of nested containers; of a tensor, itself."""
    return [tree] if isinstance(tree, torch.Tensor) else _pytree.tree_leaves(tree)


def tree_map(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a copy of nested containers in which every leaf is replaced by what ``change`` returns."""
    return change(tree) if isinstance(tree, torch.Tensor) else _pytree.tree_map(change, tree)


def flatten_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call's arguments, as of ``tree_flatten((args, kwargs))``, and a key for how they are nested."""
    leaves = [*args, *kwargs.values()]
    if all(isinstance(leaf, torch.Tensor) or type(leaf) in _LEAF_CLASSES for leaf in leaves):
        return leaves, (len(args), *kwargs)
    return _pytree.tree_flatten((tuple(args), dict(kwargs)))


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: _T) -> _T:
    """Return a copy of nested containers in which every tensor is replaced by what ``change`` returns."""
    mapped: _T = tree_map_only(torch.Tensor, change, tree)
    return mapped
