"""Keep whole gradients on each rank while they accumulate, and reduce them once.

That saves the communication of all backward passes but the last one, for the memory of whole gradients. Who asks for
the gradient of a parameter meanwhile gets the right one: what is held of it is reduced then.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary


class Plan(Protocol):
    """How some gradients are reduced together; see `gather.GatherPlan`."""

    items: Any

    def reduce(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """This rank's rows of the means. Collective."""


class HeldGradients:
    """The gradients that one module's backward passes have made, and nobody has reduced yet."""

    of_leaf: ClassVar[MutableMapping[Tensor, HeldGradients]] = WeakIdKeyDictionary()
    """Parameters of which some are held."""

    def __init__(self) -> None:
        self._holding = False
        self._found: dict[Plan, tuple[list[DTensor], list[Tensor | None]]] = {}

    @contextmanager
    def hold(self, enabled: bool = True) -> Iterator[None]:
        """Inside, backward passes of leaves without hooks only accumulate, without communication."""
        before, self._holding = self._holding, enabled
        try:
            yield
        finally:
            self._holding = before

    def takes(self, plan: Plan, leaves: Sequence[DTensor], gradients: list[Tensor | None]) -> bool:
        """Called in a backward: take its gradients, or add to them what was held; returns whether they were taken."""
        hooked = any(leaf._backward_hooks or leaf._post_accumulate_grad_hooks for leaf in leaves)
        if not self._holding or hooked or torch.is_grad_enabled() or not all(leaf.is_leaf for leaf in leaves):
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
        """Add what is held to the gradients of the leaves. Collective: every rank that has a shard must call it."""
        found, self._found = self._found, {}
        for plan, (leaves, gradients) in found.items():
            self._forget(leaves)
            reduced = plan.reduce(gradients)
            for leaf, item, gradient in zip(leaves, plan.items, reduced, strict=True):
                if gradient is not None:
                    shard = item.shard(gradient)
                    leaf.grad = shard if leaf.grad is None else leaf.grad + shard

    def drop(self) -> None:
        """Forget what is held, after an exception."""
        for leaves, _ in self._found.values():
            self._forget(leaves)
        self._found.clear()

    def _forget(self, leaves: Sequence[DTensor]) -> None:
        for leaf in leaves:
            self.of_leaf.pop(leaf, None)


def _sums(earlier: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [b if a is None else a if b is None else a + b for a, b in zip(earlier, gradients, strict=True)]
