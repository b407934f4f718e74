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
from lightning_shardckpt.compat.lightning_trainer import intercept_fit, is_tuning, set_default_root_dir
from lightning_shardckpt.tools.prove_resume import RunPlan


@cache
def proof_callback(plan: RunPlan) -> ProofCallback:
    """Return the callback of this process, which follows its first fit; each Trainer may be given it."""
    callback = ProofCallback(plan)
    intercept_fit(callback.begin)
    return callback


class ProofCallback(Callback):
    """Saves the first fit that trains, after the batches of a plan, and ends the process."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._trainer: pl.Trainer | None = None
        self._batches = plan.middle if plan.name == "resumed" else 0

    def begin(self, trainer: pl.Trainer, arguments: dict[str, Any]) -> None:
        """Prepare a fit that is about to begin; all but the first that trains are left alone.

        Args:
            trainer: of the fit.
            arguments: of the call, by name; takes the checkpoint of the plan.
        """
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
        if self._trainer is not None or self not in callbacks or is_tuning(trainer):
            return
        self._trainer = trainer
        if self._batches:
            arguments["ckpt_path"] = self._plan.path("middle.ckpt")
        files = self._plan.path(f"{self._plan.name}/files")
        set_default_root_dir(trainer, files)
        trainer.loggers = [_StandInLogger(files) for _ in trainer.loggers]
        self._take_last_place(trainer)

    def _take_last_place(self, trainer: pl.Trainer) -> None:
        """Save the effects of all other callbacks, except those that save: their files would be those of one run."""
        callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
        others = [callback for callback in callbacks if not isinstance(callback, Checkpoint | ProofCallback)]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer is self._trainer and stage == "fit":
            self._take_last_place(trainer)  # the module may have configured callbacks

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer is not self._trainer:
            return
        self._batches += 1
        if self._batches == self._plan.middle:
            self._save(trainer, "middle.ckpt")
        if self._batches == self._plan.last:
            if isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):  # which ask any CheckpointIO
                trainer.strategy.checkpoint_io = ShardCkptIO()  # so that values can be compared by name
            self._save(trainer, f"{self._plan.name}.ckpt")
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    def _save(self, trainer: pl.Trainer, name: str) -> None:
        trainer.save_checkpoint(self._plan.path(name))
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
