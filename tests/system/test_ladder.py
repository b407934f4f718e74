"""A ladder of checkpoints by two ModelCheckpoints with a ``dirpath`` each. Oracle: the steps that the recipe names."""

from __future__ import annotations

import os
from pathlib import Path

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.pool import run_ranks


def fit(folder: str, steps: int, resume: str | None, use_async: bool) -> int:
    """Run up to this number of steps; return the one from which the run began."""
    began: list[int] = []
    recent = ModelCheckpoint(
        f"{folder}/recent", "{step}", every_n_train_steps=1, monitor="step", mode="max", save_top_k=2
    )
    milestones = ModelCheckpoint(f"{folder}/milestones", "{step}", every_n_train_steps=3, save_top_k=-1)
    start = LambdaCallback(on_train_start=lambda trainer, _: began.append(trainer.global_step))
    trainer = tiny.trainer(
        {"data_parallel_shard_size": 2},
        max_steps=steps,
        limit_val_batches=0,
        callbacks=[recent, milestones, start],
        enable_checkpointing=True,
        plugins=[ShardCkptIO(use_async=use_async)],
    )
    pl.seed_everything(1)
    trainer.fit(tiny.TinyLM(), tiny.loader(), ckpt_path=resume)
    return began[0]


def steps_kept(folder: str, use_async: bool) -> list[tuple[int, dict[str, set[int]]]]:
    """The step from which each of two runs began, and the steps whose checkpoints it left."""
    found = []
    for steps, resume in ((7, None), (11, "last")):
        began = fit(folder, steps, resume, use_async)
        kept = {name: {int(one[5:-5]) for one in os.listdir(f"{folder}/{name}")} for name in ("recent", "milestones")}
        found.append((began, kept))
    return found


@pytest.mark.parametrize("use_async", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_two_model_checkpoints_keep_the_last_ones_and_every_third_over_a_resume(
    tmp_path: Path, use_async: bool
) -> None:
    first, second = run_ranks(2, steps_kept, str(tmp_path), use_async)[0]
    assert first == (0, {"recent": {6, 7}, "milestones": {3, 6}})
    # ModelCheckpoint never deletes the checkpoint that the run resumed from
    assert second == (7, {"recent": {7, 10, 11}, "milestones": {3, 6, 9}})
    assert all(verify(path).findings == () for path in tmp_path.glob("*/*.ckpt"))
