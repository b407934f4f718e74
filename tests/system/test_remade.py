"""Strategies and ShardCkptIO pickle and copy, before and after a run. Oracle: an object with the same arguments."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_shardckpt import ShardCkptIO, ShardedStrategy, fabric
from tests.support import tiny
from tests.support.pool import run_ranks

WAYS: list[Callable[[Any], Any]] = [lambda one: pickle.loads(pickle.dumps(one)), copy.deepcopy, copy.copy]


class Own(ShardedStrategy):
    def __init__(self, ranks: int) -> None:
        super().__init__(data_parallel_shard_size=ranks, timeout_s=7.5)


@pytest.mark.parametrize("way", WAYS, ids=["pickle", "deepcopy", "copy"])
def test_what_comes_back_has_the_same_arguments(way: Callable[[Any], Any]) -> None:
    for made in (Own(2), fabric.ShardedStrategy(tensor_parallel_size=2)):
        found = way(made)
        assert type(found) is type(made) and found is not made and found.axis_sizes == made.axis_sizes
    io = way(ShardCkptIO(5.5, use_async=True, replicas="first"))
    assert (io.save_options.size_per_shard, io.is_async, io.save_options.replicas) == (5.5, True, "first")
    with pytest.raises(TypeError):
        ShardedStrategy(tensor_size=2)  # type: ignore[call-arg]  # refused as before


def used_again(way: int) -> bool:
    """Collective: every rank must call it. Returns whether a run with a copy of a used strategy equals one without."""

    def trained(strategy: Any, io: Any) -> dict[str, Any]:
        torch.manual_seed(3)
        options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        limits: dict[str, Any] = {"max_steps": 2, "limit_val_batches": 0, "logger": False}
        run = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, plugins=[io], **limits, **options)
        run.fit(module := tiny.TinyLM(), tiny.loader())
        return tiny.full_state(module, run.optimizers)

    strategy, io = Own(2), ShardCkptIO(use_async=True)
    expected = trained(strategy, io)
    return tiny.differences(trained(*map(WAYS[way], (strategy, io))), expected) == []


@pytest.mark.parametrize("way", [0, 1])
def test_a_copy_of_a_used_strategy_trains(way: int) -> None:
    assert run_ranks(2, used_again, way) == [True, True]
