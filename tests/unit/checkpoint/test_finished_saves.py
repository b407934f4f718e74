"""What is remembered of complete saves. Nothing here looks at a clock: times are compared that follow each other."""

from __future__ import annotations

import threading

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.save_series import FinishedSaves
from lightning_shardckpt.checkpoint.staging import HostMemory
from lightning_shardckpt.distributed.ranks import Ranks


def nothing_waits() -> int:
    return 0


def test_a_save_that_is_complete_before_its_call_returns_has_blocked_for_all_of_its_time() -> None:
    saves = FinishedSaves()
    with saves.measure("a", 3, nothing_waits) as complete:
        complete(7)
        assert saves.latest() == ()  # how long the call blocks is not known yet
    (save,) = saves.latest()
    assert (save.path, save.step, save.nbytes, save.pending) == ("a", 3, 7, 0)
    assert save.blocked_s >= save.duration_s >= 0


def test_a_save_that_is_complete_after_its_call_has_returned_has_blocked_for_the_call() -> None:
    saves = FinishedSaves()
    with saves.measure("a", None, lambda: 2) as complete:
        pass
    assert saves.latest() == ()
    thread = threading.Thread(target=lambda: complete(7))
    thread.start()
    thread.join()
    (save,) = saves.latest()
    assert save.pending == 2 and save.blocked_s <= save.duration_s


def test_the_latest_hundred_are_kept() -> None:
    saves = FinishedSaves()
    for step in range(105):
        with saves.measure("a", step, nothing_waits) as complete:
            complete(step)
    assert [save.step for save in saves.latest()] == list(range(5, 105))


def test_saves_that_wait_are_those_behind_the_one_that_is_written() -> None:
    background, release, counts = Background(Ranks.alone(), max_pending=2), threading.Event(), list[int]()

    def work(ranks: Ranks) -> list[str]:
        assert release.wait(20)
        counts.append(background.waiting_saves())
        return []

    for name in "abc":
        background.save(name, work, HostMemory())
    background.remove("a", list)  # is no save
    release.set()
    background.drain()
    assert counts == [2, 1, 0] and background.waiting_saves() == 0
