"""A rank whose heart stops is named; one that left, or only began, is not. Oracle: who was made to do so."""

from __future__ import annotations

import atexit
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public

from lightning_shardckpt.compat.torch_distributed import Store, clone_store, put_bytes
from lightning_shardckpt.distributed.heartbeat import Heartbeat
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system.tuning import Tuning
from tests.support.pool import run_ranks

QUICK = Tuning(heartbeat_s=0.01, silent_s=0.5, exception_meeting_s=0.05, error_delivery_s=0.1)
# Busy machines stall whole processes.
PATIENT = Tuning(heartbeat_s=0.05, silent_s=2, exception_meeting_s=0.05)
ALIVE = Tuning(heartbeat_s=0.01, silent_s=20, exception_meeting_s=0.05, error_delivery_s=0.1)
WORLD = 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return FileStore(str(tmp_path / "store"), 1)


@contextmanager
def beating(store: Store, *ranks: int, tuning: Tuning = ALIVE) -> Iterator[list[Heartbeat]]:
    hearts = [Heartbeat(store, "hearts", rank, WORLD, tuning) for rank in ranks]
    for heart in hearts:
        heart.start()
    try:
        yield hearts
    finally:
        for heart in hearts:
            heart.end()


def texts(hearts: list[Heartbeat], rounds: int) -> list[str | None]:
    """Return what the hearts take for lost, when all do or each has looked so often."""
    deadline = [heart.beats + rounds for heart in hearts]
    while any(h.lost is None and h.beats < most for h, most in zip(hearts, deadline, strict=True)):
        threading.Event().wait(0.01)
    return [heart.lost for heart in hearts]


def test_a_rank_that_falls_silent_is_named_on_all_others(store: Store) -> None:
    put_bytes(clone_store(store, "hearts"), "2", b"7")
    with beating(store, 0, 1, 3, tuning=QUICK) as hearts:
        found = texts(hearts, 1000)
    assert all(text is not None and text.startswith("rank 2 gave no sign of life for 0.5 s") for text in found)


def test_ranks_that_have_left_or_not_begun_are_not_lost(store: Store) -> None:
    put_bytes(clone_store(store, "hearts"), "2", b"left")
    with beating(store, 0, 1, tuning=QUICK) as hearts:
        assert texts(hearts, 60) == [None, None]


def test_a_rank_that_fails_is_named_with_its_error(store: Store) -> None:
    with beating(store, 0, 1, 2, 3) as hearts:
        hearts[3].end(ValueError("of mine"))
        assert texts(hearts[:3], 1000) == ["rank 3 failed: ValueError: of mine"] * 3


@pytest.mark.parametrize(
    ("begun", "is_named"), [((1, 2, 5), True), ((1, 2, 4), False), ((1, 3, 9), False), ((0, 2, 5), False)]
)
def test_a_rank_that_begins_a_batch_of_an_epoch_that_is_over_on_another_is_named(
    begun: tuple[int, int, int], is_named: bool, store: Store
) -> None:
    with beating(store, 0, 1, 2, 3) as hearts:
        hearts[1].batch, hearts[1].is_epoch_over, hearts[2].batch = (1, 2, 4), True, begun
        found = texts(hearts, 1000 if is_named else 60)
    expected = "epoch 2 of the training ended after 4 batches on rank 1, but rank 2 has begun 5: "
    assert all((text or "").startswith(expected) for text in found) if is_named else found == [None] * WORLD


def test_all_end_when_rank_0_has_left_which_may_keep_the_store(store: Store) -> None:
    with beating(store, 0, 1, 2, 3) as hearts:
        hearts[0].end()
        for heart in hearts[1:]:
            assert heart.has_ended(30)
    assert [heart.lost for heart in hearts] == [None] * WORLD


class Kills(logging.Handler):
    """Kills a process when something is logged, which gloo notices."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid = pid

    def emit(self, record: logging.LogRecord) -> None:
        print("logged:", record.getMessage())
        os.kill(self.pid, signal.SIGKILL)


WAITS: dict[str, Callable[[Ranks], object]] = {
    "an agreement": lambda ranks: any_rank(False),
    "a save": lambda ranks: ranks.step("saving", lambda: 0, sum),
    "a collective of torch": lambda ranks: dist.all_reduce(torch.ones(1)),
}


def stopped_before(name: str) -> None:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    ranks = Ranks.of_default_group(600, tuning=PATIENT)
    if name == "a collective of torch":
        logging.getLogger("lightning_shardckpt").addHandler(Kills(pids[1]))
    with pytest.raises(RankError) as raised, ranks.watch():
        WAITS[name](ranks)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        WAITS[name](ranks)
    with suppress(ProcessLookupError):
        os.kill(pids[1], signal.SIGKILL)
    print("raised:", raised.value)
    os._exit(0)  # to destroy the group would wait for its timeout


@pytest.mark.parametrize("name", WAITS)
def test_a_rank_that_is_stopped_is_named_though_its_connections_stay(name: str) -> None:
    other, stopped = run_ranks(2, stopped_before, name, expect_errors=True)
    if "the process that keeps the store" not in other.output:  # rank 1 may have locked its file
        assert re.search("raised: .*rank 1 gave no sign of life", other.output), other
        assert ("logged: rank 1 gave no sign of life" in other.output) == (name == "a collective of torch")
    assert "SIGKILL" in stopped.error.message


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
    strategy.tuning = ALIVE
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
