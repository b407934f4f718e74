"""Lightning's own BoringModel under its own strategy, on one process: for what is asked of Lightning itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch.utils.data import DataLoader

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
    "limit_val_batches": 1,
    "num_sanity_val_steps": 0,
}


class Asks(pl.Callback):
    """Calls a function at a hook, and keeps what it returns."""

    def __init__(self, hook: str, ask: Any) -> None:
        self.found: list[Any] = []
        setattr(self, hook, lambda trainer, *args, **kwargs: self.found.append(ask(trainer)))


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    defaults = {**QUIET, "max_steps": 2, "default_root_dir": folder, "enable_checkpointing": False}
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


def batches(count: int) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, count))
