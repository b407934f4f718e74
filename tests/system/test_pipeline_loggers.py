"""What a pipelined step writes to a logger by itself is written once, on rank zero. Oracle: one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from lightning_shardckpt import Pipeline, ShardedStrategy
from tests.support.pool import run_ranks
from tests.sweeps.twins.base import Natural


class Lines:
    def __init__(self) -> None:
        self.lines: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.lines.append((name, float(value), step))


class Notes(Logger):
    name = version = "notes"

    def __init__(self) -> None:
        super().__init__()
        self.written = Lines()

    @property
    @rank_zero_experiment
    def experiment(self) -> Lines:
        return self.written

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.written.lines.extend((name, value, -1) for name, value in metrics.items())

    def log_hyperparams(self, params: Any) -> None: ...


class Writes(Natural):
    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.logger.experiment.add_scalar("before", index, self.global_step)
        loss = self.loss(batch)
        self.logger.experiment.add_scalar("loss", loss.detach(), step=self.global_step)
        self.loggers[0].log_metrics({"twice": 2 * loss.item()})
        return loss


def written(strategy: dict[str, Any] | None) -> list[tuple[str, float, int]]:
    pl.seed_everything(7, verbose=False)
    notes = Notes()
    options: dict[str, Any] = {} if strategy is None else {"strategy": ShardedStrategy(**strategy), "devices": 2}
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=notes,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **({"devices": 1} | options),
    )
    trainer.fit(Writes().double())
    return notes.written.lines


def test_each_line_is_written_once_on_rank_zero() -> None:
    (expected,) = run_ranks(1, written, None, init_process_group=False)
    strategy = {"pipeline_parallel_size": 2, "pipeline": Pipeline(microbatches=2)}
    found, nothing = run_ranks(2, written, strategy)
    assert nothing == [] and len(expected) == 12
    assert [(name, step) for name, _, step in found] == [(name, step) for name, _, step in expected]
    torch.testing.assert_close([value for _, value, _ in found], [value for _, value, _ in expected])
