"""Ranks whose epochs have different numbers of batches all end with an error that says so."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_shardckpt.system.host import Tuning
from tests.support import tiny
from tests.support.pool import run_ranks

REPLICAS = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}
TOPOLOGIES: dict[str, tuple[int, dict[str, Any]]] = {
    "FSDP": (2, {}),
    "HSDP": (4, {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}),
    "pipelines": (4, {**REPLICAS, "pipeline_parallel_size": 2}),
}


class Stream(IterableDataset[Any]):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Sized:  # a loader with a length, which Lightning gives no sampler
    def __init__(self, rows: Tensor) -> None:
        self.batches = rows.split(2)

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Net(pl.LightningModule):  # the data-parallel ranks of the second half have two batches more, of five
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.kind = kind

    @property
    def half(self) -> int:
        meshes = self.trainer.strategy.meshes  # type: ignore[attr-defined]  # of our strategy
        return int(meshes.data_parallel_rank * 2 // meshes.topology.data_parallel)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.training_step(batch, index), sync_dist=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        if self.kind == "should_stop" and index == 4 and self.half == 0:
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)

    def train_dataloader(self) -> Any:
        rows = torch.ones(10 + 4 * self.half, 4)
        if self.kind == "sized":
            return Sized(rows)
        if self.kind == "should_stop":
            return Sized(torch.ones(20, 4))
        return DataLoader(Stream(rows), batch_size=2)

    def val_dataloader(self) -> Any:
        return DataLoader(Stream(torch.ones(2, 4)), batch_size=2)


def train_unequally(strategy: dict[str, Any], kind: str, options: dict[str, Any]) -> None:
    tiny.trainer(strategy, Tuning(watch_s=0.05), max_epochs=3, **options).fit(Net(kind))


ENDED = "epoch 0 of the training ended after 5 batches on rank"
ROWS = [
    *((name, "stream", {}) for name in ("FSDP", "HSDP", "pipelines")),
    ("FSDP", "stream", {"limit_val_batches": 0}),
    ("FSDP", "sized", {}),
    ("FSDP", "should_stop", {}),
]


@pytest.mark.parametrize(("topology", "kind", "options"), ROWS, ids=lambda value: str(value))
def test_ranks_with_other_numbers_of_batches_all_say_so(topology: str, kind: str, options: dict[str, Any]) -> None:
    world, strategy = TOPOLOGIES[topology]
    outcomes = run_ranks(world, train_unequally, strategy, kind, options, timeout_s=60, expect_errors=True)
    for outcome in outcomes:
        assert outcome.error is not None and ENDED in outcome.error.message, outcomes


class ClockAhead(pl.Callback):  # on the last rank, the time until the first validation is over at once
    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.global_rank == trainer.world_size - 1:
            trainer._last_val_time = time.monotonic() - 7200


def validate_by_time() -> list[int]:
    """Return the steps at which a validation comes."""
    module, found = Net("sized"), list[int]()
    module.on_validation_epoch_end = lambda: found.append(module.global_step)  # type: ignore[method-assign]
    rows: Any = torch.ones(10, 4)
    run = tiny.trainer({}, max_epochs=2, val_check_interval=timedelta(hours=1), callbacks=[ClockAhead()])
    run.fit(module, DataLoader(rows, batch_size=2), module.val_dataloader())
    return found


@pytest.mark.skipif("timedelta" not in str(pl.Trainer.__init__.__annotations__), reason="Lightning 2.6 has added it")
def test_all_ranks_validate_when_the_time_is_over_on_one() -> None:
    assert run_ranks(2, validate_by_time) == [[1], [1]]
