"""Modules of torch that compute otherwise in evaluation when the class of their parameters has functions of its own."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt.errors import ShardCkptError
from tests.support import tiny
from tests.support.pool import run_ranks


class Padded(pl.LightningModule):
    """Looks at the outputs at padding, too."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.seen = list[Tensor]()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        is_padding = torch.tensor([[False, False, False, True]]).expand(len(x), 4)
        encoded = self.encoder(x, src_key_padding_mask=is_padding)
        return encoded, self.attention(encoded, encoded, encoded, need_weights=False)[0]

    def training_step(self, x: Tensor) -> Tensor:
        return self(x)[1][:, :3].square().mean()

    def validation_step(self, x: Tensor) -> None:
        self.seen += self(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.01)


def look(strategy: dict[str, Any] | str, nested: bool) -> list[Tensor]:
    pl.seed_everything(3, verbose=False)
    module = Padded(nested)
    loader = DataLoader(torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(3)), 4)
    trainer = tiny.trainer(strategy, max_steps=1, precision="64-true", use_distributed_sampler=False)
    trainer.fit(module, loader, loader)
    return module.seen


def refused(strategy: dict[str, Any]) -> None:
    with pytest.raises(ShardCkptError, match="Build it with enable_nested_tensor=False"):
        look(strategy, True)


def test_attention_in_evaluation_is_that_of_one_process_and_encoders_that_would_leave_out_padding_are_refused() -> None:
    (expected,) = run_ranks(1, look, "auto", False, init_process_group=False)
    assert len(expected) > 1
    for found in run_ranks(2, look, {}, False):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    run_ranks(2, refused, {})
