"""Gathered parameters that several passes share, such as those of a pipeline's microbatches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import absent_gradient
from lightning_shardckpt.parallel.tensors.placement import describe


class KeptGathers:
    """Parameters that are gathered once for several passes over the same modules, such as those of microbatches.

    The passes use copies that are leaves of autograd and accumulate the gradients, which `reduce` reduces.
    """

    current: ClassVar[KeptGathers | None] = None

    def __init__(self) -> None:
        self._gathered: dict[tuple[int, ...], tuple[list[DTensor], list[Tensor], list[Tensor]]] = {}
        self._requires_grad = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, units take their parameters from here; gradients must be enabled if the passes need them."""
        before, KeptGathers.current = KeptGathers.current, self
        self._requires_grad = torch.is_grad_enabled()
        try:
            yield
        finally:
            KeptGathers.current = before

    def take(
        self, key: tuple[int, ...], leaves: Sequence[DTensor], gather: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        """Return the gathered copies of ``leaves`` for ``key``; ``gather`` makes the first pass's."""
        if key not in self._gathered:
            with torch.set_grad_enabled(self._requires_grad):
                wholes = gather()
            copies = [w.detach().requires_grad_(p.requires_grad) for w, p in zip(wholes, leaves, strict=True)]
            self._gathered[key] = [*leaves], wholes, copies
        return self._gathered[key][2]

    def reduce(self) -> None:
        """Reduce the gradients of all passes. Collective: every rank that has a shard must call it.

        Raises:
            UnsupportedCodeError: for a gradient that the backward of a layer has reduced already.
        """
        gathered, self._gathered = self._gathered, {}
        wholes, gradients = [], []
        for tensors in gathered.values():
            for leaf, whole, copy in zip(*tensors, strict=True):
                if whole.requires_grad:
                    gradient = copy.grad
                    if isinstance(gradient, DTensor) and not isinstance(whole, DTensor):
                        raise UnsupportedCodeError(
                            "a custom autograd function of a layer runs a module in its backward, and returns "
                            f"gradients for parameters that were its arguments, here of {describe(leaf)}. "
                            "In a pipeline they would be reduced twice. Don't pass the parameters, and call "
                            "torch.autograd.backward, or use torch.utils.checkpoint (of torchdiffeq odeint, not "
                            "odeint_adjoint)."
                        )
                    wholes.append(whole)
                    gradients.append(absent_gradient(whole) if gradient is None else gradient)
        if wholes:
            torch.autograd.backward(wholes, gradients)
