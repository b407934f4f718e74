"""Objects that are no plain values; imported in the ranks."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel


class Encoder:
    """Keeps what it learned; equal by that."""

    def __init__(self, *words: str, inside: Any = None) -> None:
        self.words, self.inside = words, inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Encoder) and other.words == self.words

    def __hash__(self) -> int:
        return hash(self.words)


class Trap:
    """Makes a directory when it is unpickled."""

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


class Encodes(BoringModel):
    """Has an encoder as a hyper-parameter, and adds one to its checkpoints."""

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
