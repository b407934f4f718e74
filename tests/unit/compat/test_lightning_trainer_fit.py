"""Calls of ``Trainer.fit`` are seen before they begin, whatever way the arguments are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.tuner import Tuner

from lightning_shardckpt.compat.lightning_trainer import intercept_fit, is_tuning
from tests.unit.compat.test_lightning_loops import batches
from tests.unit.compat.test_lightning_trainer import trainer


def test_a_fit_may_be_given_another_checkpoint(tmp_path: Path) -> None:
    run = trainer(tmp_path, max_steps=4, limit_val_batches=0)
    run.fit(BoringModel(), batches(4))
    run.save_checkpoint(tmp_path / "a.ckpt")
    seen: list[tuple[Any, set[str]]] = []

    def before(run: pl.Trainer, arguments: dict[str, Any]) -> None:
        seen.append((run, {*arguments}))
        arguments["ckpt_path"] = str(tmp_path / "a.ckpt")

    original, undo = pl.Trainer.fit, intercept_fit(before)
    try:
        again = trainer(tmp_path, max_steps=6, limit_val_batches=0)
        again.fit(BoringModel(), batches(4))
    finally:
        undo()
    assert seen == [(again, {"self", "model", "train_dataloaders"})]
    assert again.ckpt_path == str(tmp_path / "a.ckpt") and again.global_step == 6
    assert pl.Trainer.fit is original


class Tuned(BoringModel):
    lr = 0.1


def test_a_fit_of_the_tuner_is_told_from_one_that_trains(tmp_path: Path) -> None:
    found: list[bool] = []
    undo = intercept_fit(lambda run, arguments: found.append(is_tuning(run)))
    try:
        run = trainer(tmp_path, LearningRateFinder(num_training_steps=2), max_steps=1, limit_val_batches=0)
        run.fit(Tuned(), batches(4))  # which looks for a learning rate, and trains
        run = trainer(tmp_path, max_steps=1, limit_val_batches=0)
        Tuner(run).lr_find(Tuned(), batches(4), num_training=2)
        run.fit(Tuned(), batches(4))
    finally:
        undo()
    assert found == [False, True, False]
