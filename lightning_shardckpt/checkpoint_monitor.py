"""``CheckpointMonitor``: a callback that logs what saves took, to the loggers of a run.

It asks ``ShardCkptIO`` which saves have ended. No rank talks to another.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_shardckpt.checkpoint.finished_saves import FinishedSave
from lightning_shardckpt.checkpoint_io import ShardCkptIO


class CheckpointMonitor(Callback):
    """Logs, for every save of ``fit`` that is complete, what it took; under these names, to all loggers of the Trainer:

    - ``save/seconds``: from the save's call until the checkpoint was complete on all ranks.
    - ``save/blocked_seconds``: for which rank 0 could not train meanwhile.
    - ``save/bytes``: of all files that all ranks wrote.
    - ``save/pending``: asynchronous saves that waited to be written when this one was done.

    They are logged at the step that was saved, which is the one in a checkpoint's name, also if an asynchronous save
    ends some steps later. That is written when the next batch begins, or training ends; of a run that an exception ends
    only the saves are logged that were complete by then. A save that fails is not logged: its error is raised.

    Rank 0 logs. For ``ShardCkptIO``, under ``ShardedStrategy`` or those of Lightning's own strategies that it works
    with.
    """

    def __init__(self) -> None:
        self._io: ShardCkptIO | None = None
        self._known: tuple[FinishedSave, ...] = ()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at the Trainer's CheckpointIO from now on.

        Raises:
            MisconfigurationException: if the Trainer has no logger.
            TypeError: if its CheckpointIO is another one than ``ShardCkptIO``.
        """
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException(
                "CheckpointMonitor has nowhere to log to: give the Trainer a logger, or leave the callback out"
            )
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, ShardCkptIO):
            raise TypeError(
                f"CheckpointMonitor logs saves of ShardCkptIO, but this Trainer saves with {type(io).__name__}: use "
                "ShardedStrategy, or give the Trainer plugins=[ShardCkptIO()]"
            )
        if io is not self._io:
            self._io, self._known = io, io.finished_saves

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._log_new(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_new(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._log_new(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log what is left: the strategy has waited for all saves by now."""
        self._log_new(trainer)

    def _log_new(self, trainer: pl.Trainer) -> None:
        if self._io is None or not trainer.is_global_zero:
            return
        saves, known = self._io.finished_saves, {id(save) for save in self._known}
        for save in saves:
            if id(save) not in known:
                for logger in trainer.loggers:
                    logger.log_metrics(_metrics(save), step=save.step)
        self._known = saves


def _metrics(save: FinishedSave) -> dict[str, float]:
    return {
        "save/seconds": save.duration_s,
        "save/blocked_seconds": save.blocked_s,
        "save/bytes": float(save.nbytes),
        "save/pending": float(save.pending),
    }
