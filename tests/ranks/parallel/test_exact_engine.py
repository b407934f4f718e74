"""``fsdp_engine="exact"``: parameters that are gathered where they are used. Oracle: one process."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.errors import UnsupportedCodeError
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_ranks
from tests.sweeps.twins.base import Natural

EXACT = {"fsdp_engine": "exact"}


class KeepsViews(Natural):
    """Computes with views of weights that earlier steps have made."""

    def on_fit_start(self) -> None:
        self.cached = [self.net.head.weight.t(), self.net.head.bias[:2]]

    def loss(self, batch: list[Tensor]) -> Tensor:
        weight, bias = self.cached
        return super().loss(batch) + 0.1 * weight.square().sum() + 0.1 * (bias * 2).sum()


def train(strategy: dict[str, Any] | str) -> dict[str, Tensor]:
    pl.seed_everything(3, verbose=False)
    module = KeepsViews()
    tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False).fit(module)
    return full_state(module)


def test_a_view_of_a_weight_that_is_kept_over_steps_follows_the_weight() -> None:
    (expected,) = run_ranks(1, train, "auto", init_process_group=False)
    for found in run_ranks(2, train, EXACT):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


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
    tiny.trainer(EXACT, max_steps=2, use_distributed_sampler=False).fit(Differs(how))


@pytest.mark.parametrize("how", ["read", "other layer", "loss"])
def test_ranks_that_do_different_things_are_told(how: str) -> None:
    outcomes = run_ranks(2, differ, how, expect_errors=True)
    assert [o.error.type for o in outcomes] == [UnsupportedCodeError.__name__] * 2
