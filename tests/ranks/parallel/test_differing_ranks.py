"""Ranks of FSDP that do different things, or write different numbers, are told so, in words, and end."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support import tiny
from tests.support.pool import run_each, run_ranks


class Differs(pl.LightningModule):
    """Does something else on each rank, from the first step or the third one on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        (x,), rank, (first, second) = batch, self.global_rank, self.layers
        if self.how == "read" and rank == 0:
            second.weight.norm()
        if self.how == "other layer":
            return self.layers[rank](x).square().sum()
        if self.how == "another order later" and (index, rank) == (2, 1):
            first, second = second, first
        one, other = first(x).square().sum(), second(x).square().sum()
        return one if self.how == "loss" and rank == 0 else one + other

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def differ(how: str) -> None:
    data = DataLoader(TensorDataset(torch.ones(8, 4)), 2)
    tiny.train(Differs(how), {}, 4, data=data, use_distributed_sampler=False)


@pytest.mark.parametrize("how", ["read", "other layer", "loss", "another order later"])
def test_ranks_that_do_different_things_are_told_in_words(how: str) -> None:
    outcomes = run_ranks(2, differ, how, expect_errors=True)
    assert {outcome.error.type for outcome in outcomes} <= {"UnsupportedCodeError", "RankError"}
    for outcome in outcomes:
        assert "layers" in outcome.error.message
        assert re.search(r"\b[0-9a-f]{16}", outcome.error.message) is None  # a hash says nothing to a reader


class Writes(tiny.TinyLM):
    """Writes a number of the rank's own batch, or of all, in one of several places."""

    def __init__(self, where: str, *, reduced: bool) -> None:
        super().__init__()
        self.where, self.reduced = where, reduced

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        loss = outputs["loss"].detach()
        number = 1e-3 * float(self.all_gather(loss).mean() if self.reduced else loss)
        if self.where == "a weight":
            with torch.no_grad():
                self.head.weight.mul_(1 - number)
        elif self.where == "many weights":
            torch._foreach_mul_([p.data for p in self.parameters()], 1 - number)
        elif self.where == "the learning rate":
            self.trainer.optimizers[0].param_groups[0]["lr"] = number


def write(where: str, reduced: bool, strategy: dict[str, Any], steps: int) -> str:
    pl.seed_everything(1)
    try:
        tiny.train(Writes(where, reduced=reduced), strategy, steps)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_numbers_of_a_rank_s_own_are_an_error_at_the_next_batch() -> None:
    ways: list[tuple[str, bool, int, int]] = [  # where, reduced or not, ranks, steps; also after the last batch
        ("a weight", True, 2, 3), ("a weight", False, 4, 1), ("many weights", False, 2, 1),
        ("the learning rate", False, 2, 3),
    ]  # fmt: skip
    hsdp = {"data_parallel_replicate_size": 2}
    calls = {way: (way[2], write, way[0], way[1], hsdp if way[2] == 4 else {}, way[3]) for way in ways}
    for (_, reduced, *_), ranks in (found := run_each(calls)).items():
        for said in ranks:
            told = said.startswith("UnsupportedCodeError: the ranks wrote different numbers into sharded parameters")
            assert told != reduced and ("into a tensor of shape (" in said) != reduced, found
