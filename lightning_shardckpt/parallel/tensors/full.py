"""Whole tensors of a sharded module, for code that wants to keep them itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@torch.no_grad()
def full_state_dict(module: nn.Module, *, cpu: bool = True) -> dict[str, Any]:
    """The state dict of a module, or of a part of one, with whole tensors in memory of their own.

    Collective: every rank that has shards of the module must call it, also those that throw the result away. In a
    pipeline it has what this rank's stages have.

    >>> import torch
    >>> from lightning_shardckpt import full_state_dict
    >>> sorted(full_state_dict(torch.nn.Linear(2, 1)))
    ['bias', 'weight']

    Args:
        module: sharded or not.
        cpu: whether to move each tensor to the CPU before the next one is gathered.

    Returns:
        Names to tensors, and to whatever else the state dict holds, on every rank.
    """
    found: dict[str, Any] = {}
    for name, value in module.state_dict().items():
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if isinstance(value, torch.Tensor):
            whole = value.detach()
            value = whole.cpu().clone() if cpu else whole.clone()
        found[name] = value
    return found
