"""Say when training begins what the checkpoints of a run will not hold, not when the first one is saved."""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.compat.lightning_trainer import upload_note


def look_at_saves(trainer: pl.Trainer) -> None:
    """Warn, on rank 0, of what will be missing, if a callback is going to save.

    Args:
        trainer: whose training begins.
    """
    if trainer.fast_dev_run or not any(isinstance(c, Checkpoint) for c in trainer.callbacks):  # type: ignore[attr-defined]  # set later
        return
    if (note := upload_note(trainer)) is not None:
        rank_zero_warn(note)
