"""Schedulers, a gradient scaler and averaged weights go on after a resume. Oracle: the run that was not interrupted."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from tests.support import tiny
from tests.support.pool import run_ranks

PER_EPOCH = 4


class Scheduled(tiny.TinyLM):
    """With a scheduler that steps once an epoch; logs the mean loss of each epoch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.rates: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log("per_epoch", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.kind == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 3], 0.5)]
        if self.kind == "steps":
            return optimizer
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": self.kind}}


class Overflows(pl.Callback):
    """Makes the gradient infinite in some steps, so that the scale shrinks and the step is left out."""

    def on_after_backward(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.fit_loop.total_batch_idx in (1, 6):
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(float("inf"))


def fit(kind: str, directory: str, resume: str | None = None) -> dict[str, Any]:
    """Four epochs that save in the middle of the second one, when its validation ends, and at its end."""
    pl.seed_everything(9 if resume else 1)
    module = Scheduled({"ema": "steps", "scaler": "steps"}.get(kind, kind))
    more: dict[str, Any] = {}
    named: dict[str, Any] = {"save_top_k": -1, "auto_insert_metric_name": False}
    callbacks: list[Any] = [
        ModelCheckpoint(directory, "validation{epoch}", "val_loss", save_on_train_epoch_end=False, **named),
        ModelCheckpoint(directory, "epoch{epoch}", save_on_train_epoch_end=True, **named),
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    if kind == "ema":
        callbacks.append(pl.callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=1))
    elif kind == "scaler":
        more["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler), tiny.ShardCkptIO()]
        callbacks.append(Overflows())
    callbacks.append(tiny.SaveAt(6, f"{directory}/middle.ckpt"))  # last, as ModelCheckpoint
    run = tiny.trainer({}, max_epochs=4, enable_checkpointing=True, callbacks=callbacks, **more)
    data = tiny.loader(count=2 * PER_EPOCH * run.world_size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You're using the WeightAveraging callback with a model that overrides")
        run.fit(module, data, tiny.loader(count=4, shuffle=False), ckpt_path=resume)
    found: dict[str, Any] = {"losses": module.losses, "rates": module.rates, "scale": scaler.get_scale()}
    return found | {"state": tiny.full_state(module, run.optimizers), "callbacks": _averaged(run)}


def _averaged(run: pl.Trainer) -> dict[str, Any]:
    averages = [c for c in run.callbacks if hasattr(c, "_average_model")]  # type: ignore[attr-defined]
    return {n: tiny.whole(t) for c in averages for n, t in c._average_model.state_dict().items()}


def straight_and_resumed(kinds: list[str], directory: str) -> dict[str, tuple[Any, dict[str, Any]]]:
    found = {}
    for kind in kinds:
        path = f"{directory}/{kind}"
        straight = fit(kind, path)
        names = {"middle": "middle", "validation": "validation1", "epoch": "epoch1"}
        found[kind] = straight, {n: fit(kind, path, f"{path}/{file}.ckpt") for n, file in names.items()}
    return found


KINDS = ["epoch", "scaler"]
KINDS += ["ema"] if hasattr(pl.callbacks, "EMAWeightAveraging") else []  # since Lightning 2.6


def test_what_is_carried_over_epochs_is_carried_over_a_resume(tmp_path: Path) -> None:
    for rank in run_ranks(1, straight_and_resumed, KINDS, str(tmp_path), timeout_s=300):
        wrong = []
        for kind, (straight, resumed) in rank.items():
            assert (len(set(straight["rates"])) > 2) == (kind not in ("scaler", "ema"))
            for name, run in resumed.items():
                left = len(run["losses"])
                assert 2 * PER_EPOCH <= left < len(straight["losses"])
                same = [run[key] == straight[key][-left:] for key in ("losses", "rates")]
                same.append(run["scale"] == straight["scale"])
                states = [tiny.differences(straight[key], run[key]) for key in ("state", "callbacks")]
                if not all(same) or any(states):
                    wrong.append((kind, name, same, [s[:2] for s in states]))
        assert wrong == []


