"""What a step writes to loggers is noted, and written later. Oracle: the same calls on the loggers themselves."""

from __future__ import annotations

from collections import UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.loggers.logger import Logger

from lightning_shardckpt.strategy.user_steps import LoggerCall, record_loggers


class Summary(UserDict[str, Any]):
    """A mapping of a class of its own, as wandb has one."""


class Writer:
    def __init__(self) -> None:
        self.lines: list[Any] = []
        self.summary = Summary()
        self.folder, self.rate = Path("runs"), 0.5

    def add_scalar(self, name: str, value: Any, step: int = 0) -> None:
        self.lines.append((name, float(value), step))


class Notes(Logger):
    name = version = "notes"

    def __init__(self) -> None:
        super().__init__()
        self.writer = Writer()

    @property
    def experiment(self) -> Writer:
        return self.writer

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.writer.lines.append((metrics, step))

    def log_hyperparams(self, params: Any) -> None:
        self.writer.lines.append(params)


def write(logger: Any) -> None:
    assert isinstance(logger, Notes) and logger.name == "notes"
    logger.experiment.add_scalar("loss", torch.tensor(0.5), step=3)
    logger.experiment.summary["best"] = 2
    logger.experiment.summary.update(worst=3)
    assert str(logger.experiment.folder / "a") == "runs/a" and logger.experiment.rate * 2 == 1
    logger.log_metrics({"accuracy": 0.25}, 3)


def test_calls_are_noted_and_repeated_on_the_loggers() -> None:
    loggers, oracle = [Notes(), Notes()], Notes()
    trainer: Any = SimpleNamespace(loggers=loggers)
    noted: list[LoggerCall] = []
    with record_loggers(trainer, noted.append):
        write(trainer.loggers[1])
    assert trainer.loggers is loggers
    assert not loggers[1].writer.lines and not loggers[1].writer.summary
    for call in noted:
        call.repeat(loggers, torch.device("cpu"))
    write(oracle)
    assert vars(loggers[1].writer) == vars(oracle.writer)
    assert not loggers[0].writer.lines
