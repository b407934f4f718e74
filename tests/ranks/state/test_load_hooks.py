"""Code that modules run when they are loaded runs through every door, as in torch's ``load_state_dict``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import load, save
from tests.support import tiny
from tests.support.load_hooks import CASES, contents, same
from tests.support.pool import run_ranks


def all_cases(stored: bool) -> nn.Module:
    """All modules of the table as one, between two without hooks."""
    modules = {name: (case.stored if stored else case.fresh)() for name, case in CASES.items()}
    torch.manual_seed(5 if stored else 6)
    return nn.ModuleDict({"begin": nn.Linear(4, 4), **modules, "end": nn.Linear(4, 4)})


def by_torch() -> dict[str, Any]:
    """The oracle: torch's own load on a fresh module."""
    module = all_cases(False)
    module.load_state_dict(all_cases(True).state_dict())
    return contents(module)


def by_functions(path: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Each case alone, then all as one module."""
    found = dict[str, Any]()
    for name, case in CASES.items():
        save(f"{path}-{name}", {"model": case.stored()})
        module = case.fresh()
        load(f"{path}-{name}", {"model": module})
        found |= {f"{name}.{key}": value for key, value in contents(module).items()}
    save(path, {"model": all_cases(True)})
    one, other = all_cases(False), {"a": all_cases(False), "b": nn.Linear(2, 2)}
    load(path, {"model": one})
    save(path, {"a": all_cases(True), "b": nn.Linear(2, 2)}, overwrite=True)
    load(path, other)
    return found, [contents(one), contents(other["a"])]


@pytest.mark.parametrize("world", [1, 2])
def test_functions_load_as_torch_does(tmp_path: Path, world: int) -> None:
    expected = by_torch()
    alone = {name: value for name, value in expected.items() if not name.startswith(("begin", "end"))}
    for found, together in run_ranks(world, by_functions, str(tmp_path / "a")):
        assert same(found, alone) == []
        assert [same(one, expected) for one in together] == [[], []]


class Holder(pl.LightningModule):
    """All cases in a Trainer's module, which has hooks itself, one of which needs what a pipeline has on one stage."""

    def __init__(self, stored: bool = False) -> None:
        super().__init__()
        self.cases = all_cases(stored)
        self.seen: dict[str, Any] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("begin", "end"):
            x = self.cases.get_submodule(name)(x)
        return x

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch[0]).sum()
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("loss", self(batch[0]).sum(), sync_dist=True)

    test_step = predict_step = validation_step

    def on_fit_start(self) -> None:
        self.seen = contents(self.cases)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def data() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=1)


def by_trainer(path: str, strategy: dict[str, Any], entries: list[str]) -> list[dict[str, Any]]:
    save(path, {"model": Holder(True)})
    found = []
    for entry in entries:
        module, trainer = Holder(), tiny.trainer(strategy, max_steps=1, limit_train_batches=1)
        getattr(trainer, entry)(module, data(), ckpt_path=path)
        found.append(module.seen)
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_trainer_loads_as_torch_does(tmp_path: Path, world: int) -> None:
    expected = by_torch()
    strategy = {"data_parallel_shard_size": world}
    for every in run_ranks(world, by_trainer, str(tmp_path / "a"), strategy, ["validate", "test"]):
        assert [same(one, expected) for one in every] == [[], []]
