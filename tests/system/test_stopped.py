"""Gradients of accumulated batches that no step used, because a run stopped. Oracle: the run on one process."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import tiny
from tests.support.pool import run_ranks


class Summed(pl.LightningModule):
    """Stops, fails, or begins to accumulate again after the second of four accumulated batches."""

    def __init__(self, after: str) -> None:
        super().__init__()
        self.layers, self._after = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), after

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if index == 5 and self._after == "fails":
            raise OSError("of mine")
        if index == 5 and self._after == "zeroes":
            self.zero_grad(set_to_none=False)
        self.trainer.should_stop = index == 5 and self._after == "stops"

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def accumulate(strategy: dict[str, Any], after: str) -> dict[str, Tensor | None]:
    """Return this rank's gradients after a run, by name; then call functions of the module that compute with them."""
    pl.seed_everything(1, verbose=False)
    module, ranks = Summed(after), int(os.environ["WORLD_SIZE"]) // strategy.get("pipeline_parallel_size", 1)
    rows: Any = torch.randn(64, 4)
    with suppress(OSError):
        tiny.trainer(strategy, max_epochs=1, accumulate_grad_batches=4).fit(
            module, DataLoader(rows, batch_size=8 // ranks)
        )
    own = {name: p for name, p in module.named_parameters() if not getattr(p, "is_elsewhere", False)}
    gradients = {name: None if p.grad is None else tiny.whole(p.grad) for name, p in own.items()}
    module.cpu()
    module.zero_grad(set_to_none=False)
    return gradients


REPLICAS = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}


@pytest.mark.parametrize(
    ("world", "strategy", "after"),
    [
        (2, {}, "zeroes"),
        (2, REPLICAS, "stops"),
        (4, REPLICAS | {"data_parallel_shard_size": 2}, "stops"),
        (4, REPLICAS | {"pipeline_parallel_size": 2}, "stops"),
        pytest.param(2, {}, "stops", marks=pytest.mark.sweep),
        pytest.param(2, REPLICAS, "zeroes", marks=pytest.mark.sweep),
        pytest.param(4, REPLICAS | {"data_parallel_shard_size": 2}, "zeroes", marks=pytest.mark.sweep),
        pytest.param(4, REPLICAS | {"pipeline_parallel_size": 2}, "zeroes", marks=pytest.mark.sweep),
    ],
)
def test_gradients_that_no_step_used_are_of_all_ranks(world: int, strategy: dict[str, Any], after: str) -> None:
    (expected,) = run_ranks(1, accumulate, {}, after)
    for found in run_ranks(world, accumulate, strategy, after):
        assert found
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name])  # sums in another order


def test_a_run_that_failed_leaves_no_gradients_of_one_rank() -> None:
    assert all({*found.values()} == {None} for found in run_ranks(2, accumulate, REPLICAS, "fails"))
