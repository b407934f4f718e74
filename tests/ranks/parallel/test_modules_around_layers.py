"""Modules outside the layers, whose parameters torch gathers together. Oracle: plain Lightning on one process."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt import FSDP, ShardedStrategy
from tests.support.nets import full_state
from tests.support.pool import run_each

BATCH, STEPS = 4, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


class Net(nn.Module):
    """Is a unit itself, since it has a parameter of its own; so its embedding runs inside of another unit."""

    def __init__(self, *, stops: bool) -> None:
        super().__init__()
        self.place, self.stops = nn.Parameter(torch.randn(8) / 8), stops
        self.embed, self.norm, self.head = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.stops):
            x = self.embed(x)
        x = x + self.place
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Trains(pl.LightningModule):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.net = kind, Net(stops=kind == "stops at the embedding")
        self.head, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.double()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        once = self.net(batch)
        if self.kind == "compares with passes without gradients":
            with torch.no_grad():
                twice = self.net(2 * batch)
            return (once - twice).square().mean() + (self.net(3 * batch).detach() - self.other(once)).square().mean()
        if self.kind == "changes what it computed with":
            y = once + 1.0
            z = nn.functional.linear(y, self.other.weight)
            y.mul_(0.0)
            return z.square().mean()
        return self.head(once).square().mean() + self.head(self.other(once)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(kind: str, ranks: int, ignored: list[str]) -> dict[str, Tensor]:
    module = Trains(kind)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=ShardedStrategy(fsdp=FSDP(ignored=ignored)) if ranks > 1 else "auto",
        max_steps=STEPS,
        enable_model_summary=False,
        **options,  # type: ignore[arg-type]  # a dict of flags
    )
    data = torch.randn(BATCH * STEPS, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, DataLoader(data, BATCH // ranks))  # type: ignore[arg-type]  # a tensor has the methods of a data set
    return full_state(module)


KINDS = ("plain", "compares with passes without gradients", "stops at the embedding")
IGNORED = {"sharded": [], "a module whole": ["head"]}


def test_weights_are_those_of_one_process() -> None:
    alone = run_each({kind: (1, train, kind, 1, []) for kind in KINDS})
    found = run_each({(kind, how): (2, train, kind, 2, IGNORED[how]) for kind in KINDS for how in IGNORED})
    for (kind, how), ranks in found.items():
        for rank in ranks:
            torch.testing.assert_close(rank, alone[kind][0], rtol=1e-12, atol=1e-12, msg=f"{kind}, {how}")


def fail(ranks: int) -> str:
    with pytest.raises(RuntimeError) as raised:
        train("changes what it computed with", ranks, [])
    return str(raised.value)


def test_a_change_of_what_a_backward_needs_is_an_error() -> None:
    found = run_each({ranks: (ranks, fail, ranks) for ranks in (1, 2)})
    assert all("modified by an inplace operation" in said for ranks in found.values() for said in ranks), found
