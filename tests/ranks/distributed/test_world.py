"""A rank that fails is named on the others though its process, which may keep the store, ends at once."""

from __future__ import annotations

import atexit
import os
import sys

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system.host import Tuning
from tests.support.pool import join_store_of_rank_0, run_ranks

QUICK = Tuning(watch_s=0.01, exception_agreement_s=0.05, error_delivery_s=0.1)


def fails_in_a_script(who: int) -> None:
    """One rank of a script of Fabric fails, the other one waits for it; rank 0 keeps the store."""
    rank, _ = join_store_of_rank_0()
    strategy = ShardedStrategy()
    strategy.tuning = QUICK
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    model = fabric.setup(nn.Linear(4, 4))
    try:
        for step in range(3):
            if (rank, step) == (who, 2):
                raise ValueError("of mine")
            fabric.backward(model(torch.ones(2, 4)).sum())
    except Exception as error:  # as Python does it at the end of a script
        sys.last_value = error
    atexit._run_exitfuncs()
    os._exit(3)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_in_a_script_of_fabric_is_named_on_the_others(who: int) -> None:
    outcomes = run_ranks(2, fails_in_a_script, who, init_process_group=False, expect_errors=True)
    assert f"rank {who} failed: ValueError: of mine" in outcomes[1 - who].output, outcomes
    assert "failed:" not in outcomes[who].output and "status 3" in outcomes[who].error.message
