"""Rank 0, which may keep the store, leaves when the others have heard of the last step. Oracle: a complete run."""

from __future__ import annotations

import atexit
import gc
import os

import pytest
import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.distributed.host_numbers import notices
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system.tuning import TUNING, Tuning
from tests.support import tiny
from tests.support.pool import run_ranks

SELDOM = Tuning(rank_poll_s=0.7, rank_longest_poll_s=0.7, host_look_s=0.0)


def end_with_the_store(door: str) -> str:
    """Rank 0 keeps the store, as under Lightning's launcher, and ends; rank 1 asks it seldom."""
    rank, rendezvous = int(os.environ["RANK"]), dist.FileStore("rendezvous", 2)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        rendezvous.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(rendezvous.get("port")), 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tuning = SELDOM if rank else TUNING
    if door == "fabric":
        strategy = ShardedStrategy()
        strategy.tuning = tuning
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=[ShardCkptIO()])
        fabric.launch()
        fabric.save("a", {"net": nn.Linear(2, 2), "x": torch.ones(2)})
    elif door == "a script":
        # Rank 0 answers when rank 1 has looked for the answer in vain, and looks again only after rank 0 has ended.
        notices.append(lambda *_: rendezvous.set("looked", "") if rank else None)
        Ranks.of_default_group(tuning=tuning).step("saving", lambda: rank, lambda rows: len(rendezvous.get("looked")))
    else:
        io = ShardCkptIO(use_async=door == "trainer, asynchronous")
        trainer = tiny.trainer({}, tuning, plugins=[io], max_steps=1, callbacks=[tiny.SaveAt(1, "a")])
        trainer.fit(tiny.TinyLM(), tiny.loader())
    if rank == 0:
        gc.collect()  # what rank 0 waits for must not depend on the life of an object
        if "trainer" not in door:
            atexit._run_exitfuncs()  # as Python does it at the end of a script
        os._exit(0)  # as the processes of multiprocessing end
    return "complete"


@pytest.mark.parametrize(
    "door",
    [
        pytest.param("trainer", marks=pytest.mark.sweep),
        pytest.param("trainer, asynchronous", marks=pytest.mark.slow),
        pytest.param("fabric", marks=pytest.mark.sweep),
        "a script",
    ],
)
def test_a_complete_run_ends_without_an_error_on_all_ranks(door: str) -> None:
    _, other = run_ranks(2, end_with_the_store, door, init_process_group=False, expect_errors=True)
    assert (other.value, other.error) == ("complete", None)
