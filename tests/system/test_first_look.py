"""What a checkpoint cannot hold is refused by the first save, or named."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import omegaconf
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_shardckpt import load_from_checkpoint
from lightning_shardckpt.errors import StateError
from tests.support import tiny
from tests.support.boring import Keeps
from tests.support.pool import run_ranks
from tests.support.tiny import Counts, Wraps


class Brings(BoringModel):  # brings what can't be stored, in one place or another
    def __init__(self, where: str = "", encoder: Any = None, nested: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters("encoder", "nested")
        self.where = where

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.where == "hook":
            checkpoint["encoder"] = object()

    def configure_optimizers(self) -> Any:
        kind = {"optimizer": Counts, "optimizer wraps": Wraps}.get(self.where, torch.optim.SGD)
        optimizer = kind(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer, Decay() if self.where == "scheduler" else lambda step: 1.0
        )
        return [optimizer], [scheduler]


class Decay:
    def __init__(self) -> None:
        self.lock = object()

    def __call__(self, step: int) -> float:
        return 1.0


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return BoringModel().train_dataloader()

    def state_dict(self) -> dict[str, Any]:
        return {"vocabulary": object()}


def begun(folder: str, where: str, **hyper: Any) -> tuple[str, list[str]]:
    """Collective: every rank must call it. Returns the error of a run that saves, and warnings of hyper-parameters."""
    pl.seed_everything(3)
    callbacks = [Keeps(object() if where == "callback" else None), ModelCheckpoint(folder)]
    data = Data() if where == "datamodule" else None
    options = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 0, "enable_checkpointing": True}
    trainer = tiny.trainer("sharded", callbacks=callbacks, **options)
    error = ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(Brings(where, **hyper), data)
        except StateError as raised:
            error = str(raised)
    return error, [str(one.message) for one in caught if "hyper-parameters" in str(one.message)]


REFUSED = {
    "callback": "callbacks/Keeps/value: builtins.object",
    "hook": "encoder: builtins.object",
    "scheduler": "lr_schedulers/0/lr_lambdas/0/lock: builtins.object",
    "datamodule": "Data/vocabulary: builtins.object",
    "optimizer": "Counts has state of its own, 'k'",
    "optimizer wraps": "Wraps has state of its own, 'base_optimizer'",
}


def begun_everywhere(folder: str) -> dict[str, tuple[str, list[str]]]:
    return {where: begun(f"{folder}/{where}", where) for where in REFUSED}


def test_what_cannot_be_saved_is_refused_by_the_first_save_with_its_path(tmp_path: Path) -> None:
    for found in run_ranks(2, begun_everywhere, str(tmp_path)):
        for where, expected in REFUSED.items():
            assert expected in found[where][0], where
    assert [folder.name for folder in tmp_path.iterdir() if any(folder.iterdir())] == []


def test_hyper_parameters_that_are_missing_are_named_at_a_save_and_at_a_load(tmp_path: Path) -> None:
    nested = {"scale": [1, print]}
    (error, (said,)), _ = run_ranks(2, begun, str(tmp_path), "", encoder=print, nested=nested)
    assert error == "" and "hyper_parameters/nested/scale/1: builtins.builtin_function" in said
    (saved,) = tmp_path.iterdir()
    with pytest.raises(StateError, match=r"(?s)encoder  .*nested/scale/1  .*encoder=…, nested=…"):
        load_from_checkpoint(Brings, saved)
    with pytest.raises(StateError, match=r"path, nested=…\);"):
        load_from_checkpoint(Brings, saved, encoder=print)
    assert load_from_checkpoint(Brings, saved, encoder=1, nested=2).hparams == {"encoder": 1, "nested": 2}


class Configured(BoringModel):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)


class WithConfig(BoringModel):
    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize("kind", [Configured, WithConfig])
def test_a_module_is_constructed_with_its_config(kind: Any, tmp_path: Path) -> None:
    cfg = omegaconf.OmegaConf.create({"net": {"sizes": [1, 2]}, "lr": 0.1})
    run = tiny.trainer("auto", devices=1, max_steps=1, limit_val_batches=0)
    run.fit(module := kind(cfg))
    run.save_checkpoint(tmp_path / "a.ckpt")
    found = load_from_checkpoint(kind, tmp_path / "a.ckpt")
    assert found.hparams == module.hparams and type(found.hparams) is type(module.hparams)
    config = found.hparams if kind is Configured else found.hparams.cfg
    assert type(config) is type(cfg) and config.net.sizes == [1, 2]
