"""On one device, the Trainer does under ShardedStrategy what it does under its own: loops, logging, callbacks."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import ShardCkptIO, ShardedStrategy
from tests.support.pool import run_ranks


def loader(count: int, size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    inputs, classes = torch.randn(count, 4, generator=generator), torch.randint(3, (count,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), batch_size=size)


class Plain(pl.LightningModule):
    """Notes down what it sees."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        self.seen: list[Any] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "extra": loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.seen.append(float(outputs["extra"]) if outputs else outputs)

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        loss = self.loss(batch)
        self.log("val", loss, sync_dist=True)
        self.seen += [index, dataloader_idx, float(loss)]

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.net(batch[0]).mean())

    def predict_step(self, batch: Any, index: int) -> Any:
        return self.net(batch[0]).argmax(-1)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_epoch"}}

    def train_dataloader(self) -> Any:
        return loader(12)

    def val_dataloader(self) -> Any:
        return loader(8)

    def test_dataloader(self) -> Any:
        return loader(8)

    predict_dataloader = test_dataloader


class TwoLoaders(Plain):
    def val_dataloader(self) -> Any:
        return [loader(8), loader(4)]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


class Combined(TwoLoaders):
    def train_dataloader(self) -> Any:
        return {"a": loader(12), "b": loader(8)}

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch["a"], index)


class SkipsBatches(Plain):
    def training_step(self, batch: Any, index: int) -> Any:
        return None if index == 1 else super().training_step(batch, index)


class DoesNotOptimize(Plain):
    def configure_optimizers(self) -> Any:
        return None


Made = tuple[type[Plain], dict[str, Any]]
CASES: dict[str, Made] = {
    "nothing special": (Plain, {}),
    "validation in the epoch": (Plain, {"val_check_interval": 1}),
    "accumulation": (Plain, {"accumulate_grad_batches": 2}),
    "sanity check": (Plain, {"num_sanity_val_steps": 2}),
    "bf16-true": (Plain, {"precision": "bf16-true"}),
    "two validation loaders": (TwoLoaders, {}),
    "combined loaders": (Combined, {}),
    "skipped batches": (SkipsBatches, {}),
    "no optimizer": (DoesNotOptimize, {}),
    "fast_dev_run": (Plain, {"fast_dev_run": 2}),
    "max_steps": (Plain, {"max_steps": 4, "max_epochs": -1}),
    "early stopping": (Plain, {"max_epochs": 5, "callbacks": lambda: [EarlyStopping("train", 0.0, 1, mode="max")]}),
    "learning rates logged": (Plain, {"logger": True, "callbacks": lambda: [LearningRateMonitor()]}),
    "averaged weights": (TwoLoaders, {"max_epochs": 4, "callbacks": lambda: [StochasticWeightAveraging(0.01, 1)]}),
    "checkpoints": (
        Plain,
        {"enable_checkpointing": True, "callbacks": lambda: [ModelCheckpoint("kept", monitor="val", save_last=True)]},
    ),
}


def _trainer(sharded: bool, options: dict[str, Any]) -> pl.Trainer:
    more = {"strategy": ShardedStrategy(), "plugins": [ShardCkptIO()]} if sharded else {}
    defaults = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, "num_sanity_val_steps": 0, **more}
    return pl.Trainer(
        accelerator="cpu",
        devices=1,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=os.getcwd(),
        **{**defaults, **options},
    )


def _seen(name: str, sharded: bool) -> list[Any]:
    kind, options = CASES[name]
    callbacks: Callable[[], list[pl.Callback]] = options.get("callbacks", list)
    pl.seed_everything(1, verbose=False)
    module, trainer = kind(), _trainer(sharded, {**options, "callbacks": callbacks()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
        counts = trainer.current_epoch, trainer.global_step
        logged = {key: float(value) for key, value in trainer.callback_metrics.items()}
        results = [trainer.test(module, verbose=False), trainer.validate(module, verbose=False)]
        predicted = [] if options.get("fast_dev_run") else [found.tolist() for found in trainer.predict(module) or ()]
    weights = {key: value.tolist() for key, value in module.state_dict().items()}
    return [module.seen, counts, logged, results, predicted, weights]


def run_all(sharded: bool) -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        found = {name: _seen(name, sharded) for name in CASES}
        os.chdir("/")
    return found


@cache
def _both() -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    (alone,) = run_ranks(1, run_all, False, init_process_group=False, timeout_s=200)
    (sharded,) = run_ranks(1, run_all, True, timeout_s=200)
    return alone, sharded


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_trainer_does_what_it_does_under_its_own_strategy(name: str) -> None:
    alone, sharded = _both()
    assert sharded[name] == alone[name]
