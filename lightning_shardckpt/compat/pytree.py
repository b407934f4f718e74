"""Flatten nested structures as torch does: lists, tuples, dicts, named tuples, and what is registered as a node.

Checked with torch 2.13. Relies on ``torch.utils._pytree``, which has no public name. An object that is no such
container is a leaf, ``None`` included; models of transformers register their outputs and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only
from torch.utils._pytree import tree_unflatten as tree_unflatten

_T = TypeVar("_T")


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: _T) -> _T:
    """Return a copy of nested containers in which every tensor is replaced by what ``change`` returns."""
    mapped: _T = tree_map_only(torch.Tensor, change, tree)
    return mapped
