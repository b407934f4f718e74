"""Ranks of FSDP that do different things are told so, in words, and end."""

from __future__ import annotations

import re
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.support import tiny
from tests.support.pool import run_ranks


class Differs(pl.LightningModule):
    """Does something else on each rank."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.layers = how, nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def training_step(self, batch: list[Tensor]) -> Tensor:
        (x,), rank = batch, self.global_rank
        if self.how == "read" and rank == 0:
            self.layers[1].weight.norm()  # type: ignore[operator]  # a Tensor
        if self.how == "other layer":
            return self.layers[rank](x).square().sum()  # type: ignore[no-any-return]  # a Tensor
        first, second = (layer(x).square().sum() for layer in self.layers)
        return first if self.how == "loss" and rank == 0 else first + second  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 4)), 2)


def differ(how: str) -> None:
    tiny.trainer({}, max_steps=2, use_distributed_sampler=False).fit(Differs(how))


@pytest.mark.parametrize("how", ["read", "other layer", "loss"])
def test_ranks_that_do_different_things_are_told_in_words(how: str) -> None:
    outcomes = run_ranks(2, differ, how, expect_errors=True)
    assert {outcome.error.type for outcome in outcomes} <= {"UnsupportedCodeError", "RankError"}
    for outcome in outcomes:
        assert "layers" in outcome.error.message
        assert re.search(r"\b[0-9a-f]{16}", outcome.error.message) is None  # a hash says nothing to a reader
