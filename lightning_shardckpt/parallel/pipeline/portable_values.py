"""Values on their way to other ranks: nested structures whose tensors have no history and are in host memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shardckpt.compat.pytree import tree_map


@dataclass(frozen=True, slots=True)
class _Number:
    """A tensor without dims, on its way to another rank: pickling a tensor takes half a millisecond."""

    value: complex
    dtype: torch.dtype


def portable(value: Any) -> Any:
    """A nested structure whose tensors have no history and are in host memory, or are numbers until `moved_to`."""

    def leaf(item: Any) -> Any:
        if type(item) is Tensor and not item.ndim:
            return _Number(item.item(), item.dtype)
        return item.detach().cpu().clone() if isinstance(item, Tensor) else item

    return tree_map(leaf, value)


def moved_to(value: Any, device: torch.device) -> Any:
    """A nested structure of `portable` with its tensors on ``device``."""

    def leaf(item: Any) -> Any:
        if isinstance(item, _Number):
            return torch.tensor(item.value, dtype=item.dtype, device=device)
        return item.to(device) if isinstance(item, Tensor) else item

    return tree_map(leaf, value)
