"""A module whose loss depends on a hyper-parameter; imported by what LightningCLI runs."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.demos.boring_classes import BoringModel
from torch import Tensor


class Scaled(BoringModel):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.save_hyperparameters()

    def validation_step(self, batch: Any, index: int) -> dict[str, Tensor]:
        loss = self.step(batch) * self.hparams["factor"]
        self.log("loss", loss, sync_dist=True)
        return {"x": loss}
