"""A run that an exception ended goes on where it was. Oracles: plain Lightning on one process, the run without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.support import tiny
from tests.support.pool import run_ranks


class Told(DummyLogger):
    """Keeps the steps at which a loss was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | None] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.steps += [step] if "loss" in metrics else []


class Net(pl.LightningModule):
    """Notes what runs, and fails once: in a step of training or validation, or before one."""

    def __init__(self, fails: tuple[str, int] | None) -> None:
        super().__init__()
        self.layers, self.events, self.restarting = nn.Linear(4, 4), list[str](), list[bool]()
        self._fails, self._validated = fails, 0

    def _happens(self, event: str, number: int) -> None:
        if self._fails == (event, number):
            raise OSError(event)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self._happens("train start", self.global_step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self._happens("train", self.global_step)
        self.restarting.append(self.trainer.fit_loop.restarting)
        self.events.append(f"train {self.current_epoch}.{batch_idx}")
        loss: Tensor = nn.functional.dropout(self.layers(batch / 100)).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._happens("validate", self._validated)
        self._validated += 1
        self.events.append(f"validate {self.current_epoch}.{batch_idx}")
        self.log("val", self.layers(batch / 100).square().mean(), sync_dist=True)

    def on_validation_end(self) -> None:
        self.events.append("validated")

    def on_train_epoch_start(self) -> None:
        self.events.append("epoch")

    def on_train_epoch_end(self) -> None:
        self.events.append("epoch end")

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}


def loader(batches: int, world: int) -> DataLoader[Any]:
    return DataLoader([torch.full((4,), float(i)) for i in range(2 * batches * world)], batch_size=2)  # type: ignore[arg-type]


def fit(
    strategy: Any, fails: tuple[str, int] | None, directory: str, resume: bool = False, **options: Any
) -> dict[str, Any]:
    pl.seed_everything(9 if resume else 1)
    net, path, logger = Net(fails), f"{directory}/on_exception.ckpt" if resume else None, Told()
    saving = [] if resume else [OnExceptionCheckpoint(directory)]
    more: dict[str, Any] = {"max_epochs": 2, "callbacks": saving, "enable_checkpointing": not resume, "logger": logger}
    trainer = tiny.trainer(strategy, **more | options)
    with suppress(OSError), warnings.catch_warnings():
        if isinstance(strategy, str):
            warnings.simplefilter("ignore")
        trainer.fit(net, loader(4, trainer.world_size), loader(4, trainer.world_size), ckpt_path=path)
    rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
    found = {"events": net.events, "restarting": net.restarting, "logged": logger.steps, "rates": rates}
    return found | {"state": tiny.full_state(net, []), "step": trainer.global_step}


HALF, STEPS = {"val_check_interval": 2}, {"max_steps": 7}
# What fails, as (event, how many were before it), and options of the Trainer. Four batches an epoch, of each kind.
CASES: dict[str, tuple[tuple[str, int], dict[str, Any]]] = {
    "validation at an epoch's end": (("validate", 1), {}),
    "validation at the last epoch's end": (("validate", 5), {}),
    "validation in an epoch": (("validate", 1), HALF),
    "second validation of an epoch": (("validate", 5), HALF),
    "validation with max_steps": (("validate", 2), STEPS),
    "last batch of an epoch": (("train", 3), {}),
    "before the last batch of the last epoch": (("train start", 7), HALF),
    "batch after a validation": (("train", 2), HALF),
}


ON_TWO = ("second validation of an epoch", "validation with max_steps", "before the last batch of the last epoch")
RUNS = [(1, name) for name in CASES] + [(2, name) for name in ON_TWO]


def run_all(strategy: Any, directory: str, names: list[str]) -> dict[str, Any]:
    """Of each case the run without an exception, which those with the same options share, its run and the next one."""
    found, straight = {}, dict[str, dict[str, Any]]()
    for name in names:
        (fails, options), where = CASES[name], f"{directory}/{name}"
        if repr(options) not in straight:
            straight[repr(options)] = fit(strategy, None, f"{directory}/straight", **options)
        first = fit(strategy, fails, where, **options)
        found[name] = straight[repr(options)], first, fit(strategy, None, where, True, **options)
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Any], list[dict[str, Any]]]:
    @cache
    def find(world: int, plain: bool) -> list[dict[str, Any]]:
        names, directory = [name for ranks, name in RUNS if ranks == world], str(tmp_path_factory.mktemp("runs"))
        return run_ranks(world, run_all, "auto" if plain else {}, directory, names, timeout_s=300)

    return find


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), RUNS)
def test_what_an_exception_interrupted_goes_on(world: int, name: str, seen: Callable[[int, bool], Any]) -> None:
    """As under plain Lightning, where the rest of a validation is as many batches as it had left."""
    (oracle,) = seen(1, True)
    for rank in seen(world, False):
        straight, first, resumed = rank[name]
        _, plain_first, plain_resumed = oracle[name]
        assert (first["events"], resumed["events"]) == (plain_first["events"], plain_resumed["events"])
        assert resumed["restarting"] == plain_resumed["restarting"]
        assert tiny.differences(straight["state"], resumed["state"]) == []
        assert (resumed["step"], resumed["rates"]) == (straight["step"], straight["rates"])
        assert straight["logged"] == first["logged"] + resumed["logged"]
