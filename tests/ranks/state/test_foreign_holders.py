"""Holders of state that torch has besides DTensors: what they cut, they say to nobody, so that it must be refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import StateError
from tests.support import tiny
from tests.support.pool import run_ranks


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))


def _stepped(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()


def _said(what: Any, *args: Any) -> str:
    try:
        what(*args)
    except StateError as error:
        return str(error)
    return ""


def try_fsdp1(path: str, original: bool) -> list[Any]:
    """Weights alone come back; with an optimizer, save and load are refused."""
    module = FullyShardedDataParallel(net(0), device_id=torch.device("cpu"), use_orig_params=original)
    optimizer = torch.optim.AdamW(module.parameters())
    _stepped(module, optimizer)
    ckpt.save(f"{path}/weights", {"model": module})
    other = FullyShardedDataParallel(net(1), device_id=torch.device("cpu"), use_orig_params=original)
    ckpt.load(f"{path}/weights", {"model": other})
    same = all(torch.equal(a, b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    state = {"model": module, "optimizer": optimizer}
    return [same, _said(ckpt.save, f"{path}/all", state), _said(ckpt.load, f"{path}/weights", state)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("original", [False, True], ids=["flat", "use_orig_params"])
def test_optimizer_state_of_fsdp1_is_refused_and_its_weights_are_kept(original: bool, tmp_path: Path) -> None:
    for same, saved, loaded in run_ranks(2, try_fsdp1, str(tmp_path), original):
        assert same
        for said in (saved, loaded):
            assert "'model' has FullyShardedDataParallel modules (FSDP1)" in said and "fully_shard" in said


def try_zero(path: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import makes one
        from torch.distributed.optim import ZeroRedundancyOptimizer
    module = net(0)
    optimizer: Any = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.1)
    _stepped(module, optimizer)
    state = {"model": module, "optimizer": optimizer}
    return [_said(ckpt.save, f"{path}/all", state), _said(ckpt.load, f"{path}/all", state)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_zero_redundancy_optimizer_is_refused(tmp_path: Path) -> None:
    for rank in run_ranks(2, try_zero, str(tmp_path)):
        assert all("'optimizer' is a ZeroRedundancyOptimizer" in said for said in rank)


def try_zero_in_a_trainer(path: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer

    class Zero(tiny.TinyLM):
        def configure_optimizers(self) -> Any:
            return ZeroRedundancyOptimizer(self.parameters(), torch.optim.AdamW, lr=0.1)

    strategy = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}
    run = tiny.trainer(strategy, max_steps=1, limit_val_batches=0)
    run.fit(Zero(), tiny.loader())
    return _said(run.save_checkpoint, path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_zero_redundancy_optimizer_of_a_trainer_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(2, try_zero_in_a_trainer, str(tmp_path / "a.ckpt")):
        assert "the optimizer is a ZeroRedundancyOptimizer" in said
