"""Callbacks that work with tools: for the metrics of ``shardckpt follow``, and for the runs of ``prove-resume``."""

from __future__ import annotations

import json
import os
import sys
import time
from functools import cache
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_runs import intercept_fit, set_default_root_dir
from lightning_shardckpt.storage.router import StorageRouter, absolute_path
from lightning_shardckpt.storage.run_folder import LOGGED, RunFolder
from lightning_shardckpt.system.text import count_text, list_some
from lightning_shardckpt.tools.prove_resume import VARIABLE

_LOOK_S, _LAST_LOOK_S = 30.0, 1.0  # between two looks, in training and at its end


class FollowedMetrics(Callback):
    """Logs the metrics of ``shardckpt follow`` to all loggers of the Trainer, at the steps of their checkpoints.

    The metrics are the numbers of the JSON object that the command printed last, under their names. Rank 0 looks for
    them every thirty seconds, and logs each evaluation once, also after a resume; failed ones are warnings.

    At the end of a complete fit, the follower is told, and rank 0 waits for evaluations that are missing. A warning
    lists those that are still missing then.

    Args:
        run_dir: the folder of the checkpoints, or its URL; by default the ``dirpath`` of each ModelCheckpoint.
        wait_s: the longest time to wait at the end. Without a process that follows the run, there is no wait.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None, *, wait_s: float = 300.0) -> None:
        self._run_dir, self._wait_s, self._next_look = run_dir, wait_s, 0.0
        self._runs = list[RunFolder]()  # on rank 0, in a fit

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the follower that the training goes on."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set late
            return
        io = trainer.strategy.checkpoint_io
        storage = io.storage if isinstance(io, ShardCkptIO) else StorageRouter()
        savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        given = [saver.dirpath for saver in savers] if self._run_dir is None else [self._run_dir]
        folders = dict.fromkeys(absolute_path(folder) for folder in given if folder is not None)
        self._runs = [RunFolder(folder, storage) for folder in folders]
        for run in self._runs:
            run.set_ended(False)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._runs and time.monotonic() >= self._next_look:
            self._log(trainer)
            self._next_look = time.monotonic() + _LOOK_S

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the follower that the training has ended, wait for it, and log the rest; all saves are complete."""
        deadline, missing = time.monotonic() + self._wait_s, list[str]()
        for run in self._runs:
            run.set_ended(True)
        while self._runs:
            followed = [run.is_followed() for run in self._runs]  # before the look: its last work is seen
            self._log(trainer)
            pending = [run.pending(run.evaluations()) for run in self._runs]
            missing = [saved["path"] for saveds in pending for saved in saveds]
            if time.monotonic() >= deadline or not any(map(all, zip(followed, pending, strict=True))):
                break
            time.sleep(_LAST_LOOK_S)
        if missing:
            rank_zero_warn(
                f"metrics of {count_text(len(missing), 'checkpoint')} are not logged, since they are not evaluated: "
                f"{list_some(missing)}. `shardckpt follow` evaluates them after the training, too"
            )

    def _log(self, trainer: pl.Trainer) -> None:
        """Log the evaluations that no training has logged. After an error of the storage, look again later."""
        for run in self._runs:
            try:
                done = {f"{one['save_id']} {one['start']}": one for one in run.evaluations() if "status" in one}
                logged = run.lines(LOGGED)
                new = {key: one for key, one in done.items() if key not in logged}
                if new:
                    run.add_lines(LOGGED, new)
            except OSError as error:
                rank_zero_warn(f"looking again for evaluations: {error}")
                continue
            for one in new.values():
                if one["status"] != 0:
                    rank_zero_warn(f"the evaluation of {one['path']!r} failed with status {one['status']}")
                    continue
                metrics = one.get("metrics") or {}
                numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
                for logger in trainer.loggers if numbers else ():
                    logger.log_metrics(numbers, step=one["step"])


# ── prove-resume ──────────────────────────────────────────────────────────────────────────────────────────────────────


@cache
def proof_callbacks() -> list[Callback]:
    """Return the callback of this process, which follows its first fit. An entry point gives it to every Trainer."""
    callback = ProofCallback(**json.loads(os.environ[VARIABLE]))
    intercept_fit(callback.begin)
    return [callback]


class ProofCallback(Callback):
    """Saves the first fit in the middle and at the end, and ends the process there, as a kill would.

    Args:
        folder: of the proof.
        run: "straight", which saves ``middle.ckpt``, too, or "resumed", which begins there.
        steps: batches after which the run ends, counted from the beginning of training.
    """

    def __init__(self, folder: str, run: str, steps: int) -> None:
        self._folder, self._run, self._steps = folder, run, steps
        self._trainer: pl.Trainer | None = None
        self._batches = steps // 2 if run == "resumed" else 0

    def begin(self, trainer: pl.Trainer, arguments: dict[str, Any]) -> None:
        """Prepare a fit, of which ``arguments`` take the checkpoint; all but the first are left alone."""
        if self._trainer is not None or self not in trainer.callbacks:  # type: ignore[attr-defined]  # set later
            return
        self._trainer = trainer
        if self._batches:
            arguments["ckpt_path"] = f"{self._folder}/middle.ckpt"
        files = f"{self._folder}/{self._run}/files"
        set_default_root_dir(trainer, files)
        stand_in = type("StandInLogger", (DummyLogger,), {"save_dir": files})  # for code that asks where to write
        trainer.loggers = [stand_in() for _ in trainer.loggers]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the last place, to save the effects of all others, and remove callbacks that save."""
        if trainer is self._trainer and stage == "fit":
            callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
            others = [callback for callback in callbacks if not isinstance(callback, Checkpoint | ProofCallback)]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer is not self._trainer:
            return
        self._batches += 1
        if self._batches == self._steps // 2:
            self._save(trainer, "middle")
        if self._batches == self._steps:
            if isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):  # which ask any CheckpointIO
                trainer.strategy.checkpoint_io = ShardCkptIO()  # so that values can be compared by name
            self._save(trainer, self._run)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        trainer.save_checkpoint(f"{self._folder}/{name}.ckpt")
        io = trainer.strategy.checkpoint_io
        io.wait() if isinstance(io, ShardCkptIO) else io.teardown()  # ends a thread that saves
        trainer.strategy.barrier(name)
