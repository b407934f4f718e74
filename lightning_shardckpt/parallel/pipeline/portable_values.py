"""Values on their way to other ranks: nested structures whose tensors have no history and are in host memory.

What is on a GPU is copied from it without a wait, and read when it is pickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_shardckpt.compat.pytree import tree_map
from lightning_shardckpt.distributed.host_numbers import HostCopy, on_device


@dataclass(frozen=True, slots=True)
class _Number:
    """A tensor without dims, on its way to another rank: pickling a tensor takes half a millisecond."""

    value: complex
    dtype: torch.dtype


class _Copied:
    """A tensor of a GPU, on its way; another rank gets it in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._copied = HostCopy(tensor.resolve_conj().resolve_neg())

    def __reduce__(self) -> tuple[Any, ...]:
        return _as_it_is, (_host(self._copied.read()),)


def _as_it_is(value: Any) -> Any:
    return value


def _host(tensor: Tensor) -> Any:
    return _Number(tensor.item(), tensor.dtype) if type(tensor) is Tensor and not tensor.ndim else tensor


def portable(value: Any) -> Any:
    """A nested structure to be pickled: tensors have no history, and are numbers or in host memory until `moved_to`.

    Waits for no device. To pickle it waits, once for all after `wait_for_copies`.
    """

    def leaf(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return _Copied(item.detach()) if item.is_cuda else _host(item.detach().cpu().clone())

    return tree_map(leaf, value)


def moved_to(value: Any, device: torch.device) -> Any:
    """A nested structure of `portable`, as it arrived, with its tensors on ``device``. Waits for no device."""

    def leaf(item: Any) -> Any:
        if isinstance(item, _Number):
            return on_device([item.value], item.dtype, device)[0]
        if not isinstance(item, Tensor) or device.type != "cuda":
            return item.to(device) if isinstance(item, Tensor) else item
        return item.pin_memory().to(device, non_blocking=True)

    return tree_map(leaf, value)
