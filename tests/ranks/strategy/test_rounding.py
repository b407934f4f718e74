"""Mixed precision on tensor-parallel ranks differs from one process by the rounding of partial sums alone.

Oracle: one process whose layers compute the parts of the two ranks one after another, and add them in their order.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.data import DataLoader, TensorDataset

from tests.support import tiny
from tests.support.pool import run_ranks

TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"up": "colwise", "down": "rowwise"}}


class UpByParts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x.view_as(x), part) for part in self.weight.chunk(2)], -1)


class DownByParts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        first, second = (linear(*part) for part in zip(x.chunk(2, -1), self.weight.chunk(2, -1), strict=True))
        return first + second


class Net(pl.LightningModule):
    """AdamW's first steps have the size of its rate whatever the gradient, so it shows each rounding of a small one."""

    def __init__(self, by_parts: bool) -> None:
        super().__init__()
        up, down = (UpByParts, DownByParts) if by_parts else (nn.Linear, nn.Linear)
        self.up, self.down = up(16, 32, bias=False), down(32, 16, bias=False)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, target = batch
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))).float(), target)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def fit(strategy: dict[str, Any], by_parts: bool) -> dict[str, Tensor]:
    pl.seed_everything(1)
    data = TensorDataset(torch.randn(64, 16), torch.randn(64, 16))
    # on CPUs Lightning takes this in place of 16-mixed, too
    run = tiny.trainer(strategy, max_steps=8, precision="bf16-mixed", limit_val_batches=0)
    run.fit(net := Net(by_parts), DataLoader(data, batch_size=8))
    return {name: tiny.whole(parameter) for name, parameter in net.named_parameters()}


def fit_both(strategy: dict[str, Any]) -> list[dict[str, Tensor]]:
    return [fit(strategy, by_parts) for by_parts in (False, True)]


def test_mixed_precision_of_tensor_parallel_ranks_is_that_of_one_process_which_sums_by_parts() -> None:
    ((whole, by_parts),) = run_ranks(1, fit_both, {})
    for rank in run_ranks(2, fit, TP2, False):
        assert tiny.differences(rank, by_parts) == []
        assert tiny.differences(rank, whole) == ["down.weight", "up.weight"]
