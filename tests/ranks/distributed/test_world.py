"""A rank that dies or fails is named on all others; one that left, is slow or only began is not lost.

Oracle: which rank was made to do so.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.distributed import FileStore

from lightning_shardckpt.compat.torch_distributed import Store, clone_store
from lightning_shardckpt.distributed.world import World
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system.tuning import Tuning
from tests.support.pool import run_ranks

QUICK = Tuning(watch_s=0.01, exception_agreement_s=0.05, error_delivery_s=0.1)
SIZE = 4


@pytest.fixture
def worlds(tmp_path: Path) -> list[World]:
    """All ranks, played by this process."""
    store: Store = FileStore(str(tmp_path / "store"), 1)
    return [World(clone_store(store, "world"), rank, SIZE) for rank in range(SIZE)]


def sentences(worlds: list[World]) -> list[str | None]:
    """Return the sentences about lost ranks after two looks: what one rank reports in the first, all read then."""
    for world in worlds * 2:
        world.look(at_once=True)
    return [world.lost for world in worlds]


def test_a_rank_that_fails_is_named_with_its_error(worlds: list[World]) -> None:
    worlds[3].end(ValueError("of mine"))
    assert sentences(worlds[:3]) == ["rank 3 failed: ValueError: of mine"] * 3


def test_a_rank_that_fails_in_a_run_is_named_in_this_run_alone(worlds: list[World]) -> None:
    with pytest.raises(RankError, match="rank 2 failed: ValueError: of mine"), worlds[0].run():
        with worlds[1].run(), pytest.raises(ValueError, match="of mine"), worlds[2].run(), worlds[2].run():
            raise ValueError("of mine")
        assert sentences(worlds) == ["rank 2 failed: ValueError: of mine", None, None, None]
    assert worlds[0].lost is None


def test_ranks_that_have_left_are_gone_but_not_lost(worlds: list[World]) -> None:
    worlds[2].end()
    assert sentences(worlds) == [None] * SIZE
    assert [list(world.gone) for world in worlds] == [[2], [2], [], [2]]


@pytest.mark.parametrize(("ends", "begun", "is_named"), [(4, 5, True), (4, 4, False), (6, 5, False)])
def test_a_rank_that_begins_a_batch_of_an_epoch_that_is_over_on_another_is_named(
    ends: int, begun: int, is_named: bool, worlds: list[World]
) -> None:
    with suppress(RankError), worlds[1].run(), worlds[2].run():
        worlds[1].batch, worlds[2].batch = (2, ends), (2, begun)
        with worlds[1].epoch_over():
            found = sentences([worlds[2]])
    expected = f"epoch 2 of the training ended after {ends} batches on rank 1, but rank 2 has begun {begun}: "
    assert (found[0] or "").startswith(expected) if is_named else found == [None]


def test_the_next_epoch_and_the_next_run_are_not_compared(worlds: list[World]) -> None:
    with worlds[1].run():
        pass
    with worlds[0].run(), worlds[1].run():
        worlds[0].batch, worlds[1].batch = (0, 4), (0, 9)
        with worlds[0].epoch_over():
            worlds[1].look()
        worlds[0].batch = 1, 9
        assert sentences(worlds) == [None] * SIZE


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def fails_in_a_script(who: int) -> None:
    """One rank of a script of Fabric fails, the other one waits for it; rank 0 keeps the store."""
    rank, rendezvous = int(os.environ["RANK"]), FileStore("rendezvous", 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        rendezvous.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(rendezvous.get("port")), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
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
    del store, rendezvous
    atexit._run_exitfuncs()
    os._exit(3)


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_fails_in_a_script_of_fabric_is_named_on_the_others(who: int) -> None:
    outcomes = run_ranks(2, fails_in_a_script, who, init_process_group=False, expect_errors=True)
    assert f"rank {who} failed: ValueError: of mine" in outcomes[1 - who].output, outcomes
    assert "failed:" not in outcomes[who].output and "status 3" in outcomes[who].error.message
