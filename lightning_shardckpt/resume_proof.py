"""The callback of prove-resume: saves a training run in the middle and at the end, and ends it there.

``tools.prove_resume`` runs the script and compares what two runs have saved. The callback changes nothing of the
training. It ends the run as a kill would: no hook runs, so that the script writes nothing that an interrupted run would
not have written.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_trainer import intercept_fit, set_default_root_dir


@cache
def proof_callback(folder: str, run: str, steps: int) -> ProofCallback:
    """Return the callback of this process, which follows its first fit; each Trainer may be given it."""
    callback = ProofCallback(folder, run, steps)
    intercept_fit(callback.begin)
    return callback


class ProofCallback(Callback):
    """Saves the first fit that trains, and ends the process.

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
        """Prepare a fit that is about to begin; all but the first are left alone.

        Args:
            trainer: of the fit.
            arguments: of the call, by name; takes the checkpoint of the proof.
        """
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
        if self._trainer is not None or self not in callbacks:
            return
        self._trainer = trainer
        if self._batches:
            arguments["ckpt_path"] = f"{self._folder}/middle.ckpt"
        files = f"{self._folder}/{self._run}/files"
        set_default_root_dir(trainer, files)
        trainer.loggers = [_StandInLogger(files) for _ in trainer.loggers]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Take the last place, to save the effects of all others, and remove callbacks that save."""
        if trainer is self._trainer and stage == "fit":
            callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
            others = [callback for callback in callbacks if not isinstance(callback, Checkpoint | ProofCallback)]
            trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
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
        if isinstance(io, ShardCkptIO):
            io.wait()
        else:
            io.teardown()  # ends a thread that saves
        trainer.strategy.barrier(name)


class _StandInLogger(DummyLogger):
    """Takes the place of a logger, with the directory for code that asks where to write; sends nothing anywhere."""

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory

    @property
    @override
    def save_dir(self) -> str:
        return self._directory
