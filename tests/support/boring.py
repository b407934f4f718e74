"""Lightning's BoringModel: quiet runs under its own strategy, and modules and objects that it may carry."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support import tiny

QUIET: dict[str, Any] = {**tiny.QUIET, "devices": 1, "log_every_n_steps": 1, "limit_val_batches": 1}


class Asks(pl.Callback):  # calls a function at a hook, and keeps what it returns
    def __init__(self, hook: str, ask: Any) -> None:
        self.found: list[Any] = []
        setattr(self, hook, lambda trainer, *args, **kwargs: self.found.append(ask(trainer)))


def trainer(folder: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    defaults = {**QUIET, "max_steps": 2, "default_root_dir": folder}
    return pl.Trainer(**{**defaults, **options}, callbacks=list(callbacks))


def batches(count: int) -> DataLoader[Any]:
    return DataLoader(RandomDataset(32, count))


class Scaled(BoringModel):  # its loss depends on a hyper-parameter
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        loss = self.step(batch) * self.hparams["factor"]
        self.log("loss", loss, sync_dist=True)
        return {"x": loss}


class Encoder:  # keeps what it learned; equal by that
    def __init__(self, *words: str, inside: Any = None) -> None:
        self.words, self.inside = words, inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoder) and other.words == self.words

    def __hash__(self) -> int:
        return hash(self.words)


class Trap:  # makes a directory when it is unpickled
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.makedirs, (self.path, 0o777, True)


class Keeps(pl.Callback):
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


class Encodes(BoringModel):  # has an encoder as a hyper-parameter, and adds one to its checkpoints
    def __init__(self, encoder: Encoder, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        assert isinstance(encoder, Encoder)
        self.added: Any = None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.added is not None:
            checkpoint["added"] = [self.added]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.added = checkpoint["added"][0] if "added" in checkpoint else None
