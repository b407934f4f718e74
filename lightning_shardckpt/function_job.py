"""What does one call of a step function do, besides gradients, that all ranks of a pipeline must know?

Its result, and what it changed in the module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_shardckpt.job import loss_in, merged, portable
from lightning_shardckpt.parallel.effects import Change, Memory
from lightning_shardckpt.parallel.pipeline import Pipeline


class FunctionJob:
    """One call of a script's step function; see ``parallel.pipeline.Job``."""

    name = "the step function"

    def __init__(self, step: Callable[[Any], Any], pipeline: Pipeline, batch: Any, *, train: bool) -> None:
        self.batch, self.train, self.drew = batch, train, False
        self._step, self._common = step, pipeline.common
        self._memory = Memory(self._common)

    def step(self, batch: Any, share: float | None) -> Any:
        """Call it; see there."""
        before = Memory(self._common) if share is None else None
        try:
            return self._step(batch)
        finally:
            if before is not None:
                self.drew = self.drew or before.drew
                before.restore()

    def loss(self, output: Any) -> Tensor | None:
        """The loss in what it returned."""
        return loss_in(self.name, output)

    def report(self, outputs: list[tuple[Any, float]]) -> tuple[Any, list[Change]]:
        """What all ranks must know of it."""
        return portable("what the step function returns", merged(self.name, outputs)), self._memory.changes()

    def settle(self, report: tuple[Any, list[Change]], device: torch.device, *, source: bool) -> Any:
        """On every rank: remember and return what the last stage did."""
        output, changes = report
        if not source:
            self._memory.apply(changes, device)
        return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, output)
