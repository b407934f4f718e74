"""What is gathered in the dtype of autocast. Oracle: one process under plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt import FSDP
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_each

WIDTH, BLOCKS, STEPS = 16, 3, 3


class Block(nn.Module):
    """Layers of each kind, used in a way that a test chooses."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.conv = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [parameter.dtype for parameter in self.parameters()]
        assert {*seen} == {torch.float32}
        hidden = self.norm(torch.tanh(FORWARDS.get(self.how, Block.plain)(self, x)))
        mixed = self.conv(hidden.view(len(x), 2, WIDTH)).view(len(x), 2 * WIDTH)
        return x + self.down(mixed)

    def plain(self, x: Tensor) -> Tensor:
        return self.up(x)

    def penalized(self, x: Tensor) -> Tensor:
        return self.up(x) + self.up.weight.square().sum() * 1e-3

    def many_times(self, x: Tensor) -> Tensor:
        return sum(self.up(x * n) for n in range(1, 8))


FORWARDS: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "penalized": Block.penalized,
    "many times": Block.many_times,
}
HOWS = ["plain", *FORWARDS]


class Module(pl.LightningModule):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(BLOCKS))
        self.out = nn.Linear(WIDTH, 4)
        self.outputs = list[Tensor]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        self.outputs.append(self.out(batch).detach())
        return self.out(batch).float().square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


Trained = tuple[dict[str, Tensor], list[Tensor]]


def _train(how: str, precision: Any, strategy: Any) -> Trained:
    """Train on the same batches on every rank, so that the mean of their gradients is that of one process."""
    pl.seed_everything(5, verbose=False)
    module = Module(how)
    plugins = [MixedPrecision(precision, "cpu")]
    trainer = tiny.trainer(strategy, max_steps=STEPS, plugins=plugins, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(torch.randn(8 * STEPS, WIDTH), batch_size=8))
    return full_state(module), module.outputs


WAYS: list[tuple[str, str, dict[str, Any]]] = [
    *(("bf16-mixed", how, {}) for how in HOWS if how != "many times"),
    ("16-mixed", "many times", {}),
    ("bf16-mixed", "many times", {"fsdp": FSDP(activation_checkpointing=True)}),
    ("bf16-mixed", "many times", {"fsdp": FSDP(cpu_offload=True, reshard_after_forward=False)}),
]
"""Precision, layers, and options of the strategy."""


def test_layers_gathered_in_the_dtype_of_autocast_train_as_on_one_process() -> None:
    alone = run_each({(precision, how): (1, _train, how, precision, "auto") for precision, how, _ in WAYS})
    found = run_each({n: (2, _train, how, precision, options) for n, (precision, how, options) in enumerate(WAYS)})
    for number, ranks in found.items():
        (expected,) = alone[WAYS[number][:2]]
        for rank in ranks:
            torch.testing.assert_close(rank, expected, rtol=0, atol=0, msg=lambda text, n=number: f"{WAYS[n]}: {text}")
