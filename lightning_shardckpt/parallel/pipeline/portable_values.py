"""Nested structures as they are sent to other ranks: with tensors in host memory, without autograd history.

GPU tensors are copied without a wait, and read when the structure is pickled.
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
    """A 0-dim tensor as a number, since pickling a tensor takes half a millisecond."""

    value: complex
    dtype: torch.dtype


class _GpuTensor:
    """A GPU tensor that is being copied; it is unpickled as a tensor or number in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = HostCopy(tensor.resolve_conj().resolve_neg())

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (_encode(self._copy.read()),)


def _identity(value: Any) -> Any:
    return value


def _encode(tensor: Tensor) -> Any:
    return _Number(tensor.item(), tensor.dtype) if type(tensor) is Tensor and not tensor.ndim else tensor


def to_portable(value: Any) -> Any:
    """Return a nested structure to be pickled, with tensors detached and in host memory; `from_portable` reverts it.

    Waits for no device. Pickling waits for the copies, once for all after `wait_for_copies`.
    """

    def convert(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return _GpuTensor(item.detach()) if item.is_cuda else _encode(item.detach().cpu().clone())

    return tree_map(convert, value)


def from_portable(value: Any, device: torch.device) -> Any:
    """Return an unpickled structure of `to_portable` with its tensors on ``device``. Waits for no device."""

    def convert(item: Any) -> Any:
        if isinstance(item, _Number):
            return on_device([item.value], item.dtype, device)[0]
        if not isinstance(item, Tensor) or device.type != "cuda":
            return item.to(device) if isinstance(item, Tensor) else item
        return item.pin_memory().to(device, non_blocking=True)

    return tree_map(convert, value)
