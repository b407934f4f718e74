"""``CheckpointMonitor``: a callback that logs the cost of saves, without communication between ranks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO


class CheckpointMonitor(Callback):
    """Logs the time and size of every completed save of ``fit`` to all loggers of the Trainer, on rank 0.

    - ``save/seconds``: from the call of the save until the checkpoint was complete on all ranks.
    - ``save/blocked_seconds``: the part of this time in which rank 0 could not train.
    - ``save/bytes``: the size of all files of all ranks.

    The values are logged for the step that was saved, before the next batch begins or when the run ends. A failed save
    is not logged; its error is raised.
    """

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget saves of earlier runs.

        Raises:
            MisconfigurationException: if the Trainer has no logger.
            TypeError: if its CheckpointIO is not a ``ShardCkptIO``.
        """
        io = trainer.strategy.checkpoint_io
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException("CheckpointMonitor needs a logger: give the Trainer one, or leave it out")
        if not isinstance(io, ShardCkptIO):
            raise TypeError(
                f"CheckpointMonitor logs saves of ShardCkptIO, but this Trainer saves with {type(io).__name__}: use "
                "ShardedStrategy, or give the Trainer plugins=[ShardCkptIO()]"
            )
        io.finished.clear()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._log(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        self._log(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log the last saves, for which the strategy has waited."""
        if stage == "fit":
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        io = trainer.strategy.checkpoint_io
        while isinstance(io, ShardCkptIO) and io.finished:
            save = io.finished.popleft()
            values = {"seconds": save.seconds, "blocked_seconds": save.blocked_seconds, "bytes": float(save.nbytes)}
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics({f"save/{name}": value for name, value in values.items()}, step=save.step)
