"""After one rank failed alone, the next run in these processes says why it can't begin. Oracle: who fails."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt.system.tuning import Tuning
from tests.support import tiny
from tests.support.pool import run_ranks

REPLICAS = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}


class Net(pl.LightningModule):
    def __init__(self, failing: list[int]) -> None:
        super().__init__()
        self.layers, self.failing = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), failing

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index == 2 and self.global_rank in self.failing:
            raise OSError("of mine")
        for layer in self.layers:
            batch = layer(batch)
        return batch.square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val", self.training_step(batch, index), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def run_twice(strategy: dict[str, Any], failing: list[int], first: str) -> list[str]:
    """Run until it fails, then fit another module; return both ends."""
    ends, rows = [], DataLoader(torch.ones(16, 4), batch_size=2)  # type: ignore[arg-type]  # a Sequence does
    tuning = Tuning(watch_s=0.05, exception_agreement_s=0.5)
    for name, ranks in ((first, failing), ("fit", [])):
        trainer = tiny.trainer(strategy | {"timeout_s": 600.0}, tuning, max_epochs=1)
        try:
            getattr(trainer, name)(Net(ranks), rows)
            ends.append("ok")
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


@pytest.mark.parametrize(
    ("strategy", "first"), [({}, "fit"), ({}, "validate"), (REPLICAS, "fit")], ids=["FSDP", "validate", "replicas"]
)
def test_a_run_after_one_rank_failed_alone_says_why_it_cannot_begin(strategy: dict[str, Any], first: str) -> None:
    failed, other = run_ranks(2, run_twice, strategy, [0], first)
    assert failed[0] == "OSError: of mine"
    assert other[0] == "RankError: rank 0 failed: OSError: of mine"
    assert failed[1] == other[1]
    assert "cannot begin: an earlier one ended on rank(s) [1] in a collective" in other[1]


@pytest.mark.parametrize("strategy", [{}, REPLICAS], ids=["FSDP", "replicas"])
def test_a_run_after_all_ranks_failed_trains(strategy: dict[str, Any]) -> None:
    assert run_ranks(2, run_twice, strategy, [0, 1], "fit") == [["OSError: of mine", "ok"]] * 2
