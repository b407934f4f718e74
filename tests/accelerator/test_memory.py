"""The peak of device memory in a step of FSDP. Oracle: ``fully_shard`` under Lightning's strategy."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import ShardedStrategy
from tests.accelerator.ranks import run_on_gpus

WORDS, WIDTH, BLOCKS, STEPS = 256, 256, 8, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(pl.LightningModule):
    """Half of a transformer; notes the most memory of the last step."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.by_hand, self.peak = by_hand, 0

    def configure_model(self) -> None:
        if self.by_hand:
            for block in self.blocks:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self, mesh=self.device_mesh["data_parallel"])

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[0].flatten())

    def on_train_batch_start(self, *args: Any) -> None:
        torch.cuda.reset_peak_memory_stats()

    def on_train_batch_end(self, *args: Any) -> None:
        self.peak = torch.cuda.max_memory_allocated()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def _batches() -> Tensor:
    return torch.randint(WORDS, (STEPS, 4, 32), generator=torch.Generator().manual_seed(0))


def _with_trainer(strategy: Any, by_hand: bool) -> int:
    net = Net(by_hand)
    trainer = pl.Trainer(
        accelerator="cuda", devices=2, strategy=strategy, max_steps=STEPS, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(net, DataLoader(TensorDataset(_batches().flatten(0, 1)), 4))
    return net.peak


def _above(run: Callable[[], int]) -> int:
    """The peak above what earlier runs in this process left behind."""
    gc.collect()
    before = torch.cuda.memory_allocated()
    return run() - before


def _peaks() -> dict[str, int]:
    warnings.simplefilter("ignore")  # of Lightning's strategy
    lightnings = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return {
        "Lightning's": _above(partial(_with_trainer, lightnings, by_hand=True)),
        "ours": _above(partial(_with_trainer, ShardedStrategy(), by_hand=False)),
    }


def test_a_step_needs_no_more_memory_than_with_fully_shard_alone() -> None:
    for peaks in run_on_gpus(2, _peaks):
        assert peaks["ours"] <= 1.02 * peaks["Lightning's"], peaks
