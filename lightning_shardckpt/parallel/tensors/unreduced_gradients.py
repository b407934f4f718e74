"""Keep whole gradients on each rank while they accumulate, and reduce them once.

That saves the communication of all backward passes but the last one, for the memory of whole gradients. Who asks for
the gradient of a parameter meanwhile gets the right one: what there is of it is reduced then.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_shardckpt.compat.torch_tensors import accumulation_hooks, gradient_hooks


class ReductionPlan(Protocol):
    """A plan for reducing some gradients together: what a `GatherPlan` does with those of what it gathers."""

    items: Any

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return this rank's rows of the means. Collective."""


class UnreducedGradients:
    """The gradients that one module's backward passes have made, and nobody has reduced yet.

    Attributes:
        of_leaf: the parameters that have some.
        accumulates: whether backward passes only accumulate now, without communication.
    """

    of_leaf: ClassVar[MutableMapping[Tensor, UnreducedGradients]] = WeakIdKeyDictionary()

    def __init__(self) -> None:
        self.accumulates = False
        self._found: dict[ReductionPlan, tuple[list[DTensor], list[Tensor | None]]] = {}

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Inside, backward passes of leaves without hooks only accumulate, without communication."""
        before, self.accumulates = self.accumulates, enabled
        try:
            yield
        finally:
            self.accumulates = before

    def takes(self, plan: ReductionPlan, leaves: Sequence[DTensor], gradients: list[Tensor | None]) -> bool:
        """Take a backward's gradients, or add to them what was there; return whether they were taken.

        Called in a backward.
        """
        hooked = any(gradient_hooks(leaf) or accumulation_hooks(leaf) for leaf in leaves)
        if not self.accumulates or hooked or torch.is_grad_enabled() or not all(leaf.is_leaf for leaf in leaves):
            earlier = self._found.pop(plan, None)
            if earlier is not None:
                self._forget(leaves)
                gradients[:] = _sums(earlier[1], gradients)
            return False
        earlier = self._found.get(plan)
        sums = list(gradients) if earlier is None else _sums(earlier[1], gradients)
        self._found[plan] = list(leaves), sums
        for leaf in leaves:
            self.of_leaf[leaf] = self
        return True

    def reduce(self) -> None:
        """Add it, reduced, to the gradients of the leaves. Collective: every rank that has a shard must call it."""
        found, self._found = self._found, {}
        for plan, (leaves, gradients) in found.items():
            self._forget(leaves)
            reduced = plan.reduce(gradients)
            for leaf, item, gradient in zip(leaves, plan.items, reduced, strict=True):
                if gradient is not None:
                    shard = item.shard(gradient)
                    leaf.grad = shard if leaf.grad is None else leaf.grad + shard

    def drop(self) -> None:
        """Forget what is here, after an exception."""
        for leaves, _ in self._found.values():
            self._forget(leaves)
        self._found.clear()

    def _forget(self, leaves: Sequence[DTensor]) -> None:
        for leaf in leaves:
            self.of_leaf.pop(leaf, None)


def _sums(earlier: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(earlier, gradients, strict=True)]
