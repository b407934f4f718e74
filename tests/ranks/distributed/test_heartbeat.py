"""A rank whose heart stops is named; one that left, or only began, is not. Oracle: who was made to do so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public

from lightning_shardckpt.compat.torch_distributed import Store, own_view, put_bytes
from lightning_shardckpt.distributed.heartbeat import Heartbeat, heartbeat
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.tuning import Tuning
from tests.support.pool import run_ranks

QUICK = Tuning(heartbeat_s=0.01, silent_s=0.2, exception_meeting_s=0.05)
WORLD = 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return own_view(FileStore(str(tmp_path / "store"), 1), "hearts")


@contextmanager
def beating(store: Store, *ranks: int) -> Iterator[list[Heartbeat]]:
    hearts = [Heartbeat(store, rank, WORLD, QUICK) for rank in ranks]
    for heart in hearts:
        heart.start()
    try:
        yield hearts
    finally:
        for heart in hearts:
            heart.stop()


def texts(hearts: list[Heartbeat], rounds: int) -> list[str | None]:
    """Return what the hearts take for lost, when all do or each has looked so often."""
    deadline = [heart.beats + rounds for heart in hearts]
    while any(h.lost is None and h.beats < most for h, most in zip(hearts, deadline, strict=True)):
        pass
    return [heart.lost for heart in hearts]


def test_a_rank_that_falls_silent_is_named_on_all_others(store: Store) -> None:
    put_bytes(store, "2", b"7")
    with beating(store, 0, 1, 3) as hearts:
        found = texts(hearts, 1000)
    assert all(text is not None and text.startswith("rank 2 gave no sign of life for 0.2 s") for text in found)


def test_ranks_that_have_left_or_not_begun_are_not_lost(store: Store) -> None:
    put_bytes(store, "2", b"left")
    with beating(store, 0, 1) as hearts:
        assert texts(hearts, 60) == [None, None]


def test_a_rank_that_fails_is_named_with_its_error(store: Store) -> None:
    with beating(store, 0, 1, 2, 3) as hearts:
        hearts[3].stop(ValueError("of mine"))
        assert texts(hearts[:3], 1000) == ["rank 3 failed: ValueError: of mine"] * 3


def collective() -> None:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    with pytest.raises(RankError) as raised, heartbeat(QUICK):
        any_rank(False)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        any_rank(False)
    os.kill(pids[1], signal.SIGKILL)
    print(raised.value)
    os._exit(0)  # to destroy the group would wait for its timeout


def test_a_rank_that_is_stopped_is_named_though_its_connections_stay() -> None:
    other, stopped = run_ranks(2, collective, expect_errors=True)
    assert "rank 1 gave no sign of life" in other.output and "SIGKILL" in stopped.error.message
