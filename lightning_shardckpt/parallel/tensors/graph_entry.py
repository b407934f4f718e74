"""The point where activations of other pipeline stages enter the autograd graph of this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_shardckpt.compat.torch_tensors import keep_version


class GraphEntry:
    """The point where a received activation enters the autograd graph of a stage.

    Attributes:
        token: an empty leaf that the activation depends on.
        grad: the activation's gradient, after the backward.
    """

    def __init__(self, device: torch.device) -> None:
        self.token = torch.empty(0, device=device, requires_grad=True)
        self.grad: Tensor | None = None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, token: Tensor, entry: GraphEntry) -> Tensor:
        ctx.entry = entry
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        ctx.entry.grad = grad if ctx.entry.grad is None else ctx.entry.grad + grad
        return None, torch.empty_like(ctx.entry.token), None


def enter(value: Tensor) -> GraphEntry:
    """Make ``value`` itself depend on a new entry: user code may change it in place, as it is no leaf."""
    entry = GraphEntry(value.device)
    # enable_grad: the first use may be under no_grad. keep_version: checkpoint may have saved the tensor already.
    with torch.enable_grad(), keep_version(value):
        _Enter.apply(value, entry.token, entry)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return entry
