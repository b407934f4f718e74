"""``CheckpointMonitor``: every save that is complete is in the logs once, at its step, with what it took."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_shardckpt import CheckpointMonitor
from tests.support import tiny
from tests.support.pool import run_each, run_ranks
from tests.support.storages import Gated, gated_io

Row = dict[str, float]
SEEN = ("step", "save/bytes")


def bytes_of(folder: str) -> int:
    """Return the size of a checkpoint, as the file system has it."""
    return sum(file.stat().st_size for file in Path(folder).iterdir())


def rows(log_dir: str, name: str = "metrics.csv") -> list[Row]:
    """Return what a logger wrote, in this order."""
    with (Path(log_dir) / name).open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


def saves_in(logged: list[Row]) -> list[Row]:
    return [row for row in logged if "save/seconds" in row]


def run(folder: str, strategy: Any = None, steps: int = 3, **options: Any) -> pl.Trainer:
    """Return a Trainer that logs each step to a file at once, and saves where its callbacks do."""
    logger = CSVLogger(folder, "logs", flush_logs_every_n_steps=1)
    common: dict[str, Any] = {"max_steps": steps, "limit_val_batches": 0, "logger": logger}
    return tiny.trainer({} if strategy is None else strategy, **(common | options))


def every_step(folder: str, steps: int = 1) -> ModelCheckpoint:
    return ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=steps)


def logged_as_they_return(folder: str, strategy: Any) -> list[Row]:
    trainer = run(folder, strategy, callbacks=[every_step(folder), CheckpointMonitor()], enable_checkpointing=True)
    trainer.fit(tiny.TinyLM(), tiny.loader())
    return rows(trainer.loggers[0].log_dir or "")


STRATEGIES: dict[str, Any] = {
    "fsdp": {"data_parallel_shard_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "ddp": "ddp",  # which saves on rank 0
}


def test_each_save_is_logged_at_its_step_with_the_bytes_that_are_on_disk(tmp_path: Path) -> None:
    calls = {name: (2, logged_as_they_return, f"{tmp_path}/{name}", one) for name, one in STRATEGIES.items()}
    for name, (logged, _) in run_each(calls).items():
        saves = saves_in(logged)
        sizes = [bytes_of(f"{tmp_path}/{name}/step={n}.ckpt") for n in (1, 2, 3)]
        assert [[row[key] for key in SEEN] for row in saves] == [[n + 1, size] for n, size in enumerate(sizes)]
        assert all(row["save/blocked_seconds"] >= row["save/seconds"] > 0 for row in saves)
        assert len([row for row in logged if "loss" in row]) == 3  # and what the module logs is there as ever


class OpenAt(pl.Callback):
    """Lets the writing thread go on when a step has begun, waits until it has done everything, and shuts the gate."""

    def __init__(self, storage: Gated, step: int) -> None:
        self._storage, self._step = storage, step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._storage.gate.clear()
        if trainer.global_step == self._step:
            self._storage.gate.set()
            trainer.strategy.checkpoint_io.wait()  # type: ignore[attr-defined]


def logged_when_they_end(folder: str) -> tuple[list[Row], list[str]]:
    io = gated_io()
    callbacks = [OpenAt(io.storage, 3), CheckpointMonitor(), every_step(folder, 2)]  # type: ignore[arg-type]
    trainer = run(folder, steps=4, plugins=[io], callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(tiny.TinyLM(), tiny.loader())
    found = rows(trainer.loggers[0].log_dir or "")
    return found, ["save" if "save/seconds" in row else "loss" for row in found]


def test_an_asynchronous_save_is_logged_at_its_own_step_when_it_ends(tmp_path: Path) -> None:
    logged, kinds = run_ranks(2, logged_when_they_end, str(tmp_path))[0]
    assert kinds == ["loss"] * 3 + ["save", "loss", "save"]  # the first waits for the gate; the last for the end
    saves = saves_in(logged)
    assert [[row[key] for key in SEEN] for row in saves] == [[n, bytes_of(f"{tmp_path}/step={n}.ckpt")] for n in (2, 4)]
    assert 0 < saves[0]["save/blocked_seconds"] < saves[0]["save/seconds"]


def test_a_trainer_without_a_logger_or_with_another_checkpoint_io_is_refused(tmp_path: Path) -> None:
    run_ranks(1, refused, str(tmp_path))


def refused(folder: str) -> None:
    with pytest.raises(MisconfigurationException, match="needs a logger"):
        run(folder, logger=False, callbacks=[CheckpointMonitor()]).fit(tiny.TinyLM(), tiny.loader())
    with pytest.raises(TypeError, match=r"saves with TorchCheckpointIO.*plugins=\[ShardCkptIO"):
        run(folder, "auto", plugins=[], callbacks=[CheckpointMonitor()]).fit(tiny.TinyLM(), tiny.loader())
    trainer = run(folder, logger=False, callbacks=[CheckpointMonitor()])
    trainer.validate(tiny.TinyLM(), tiny.loader(), verbose=False)  # nothing is saved there
