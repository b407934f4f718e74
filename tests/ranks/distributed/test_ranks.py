"""A failure on one rank reaches all, by name and class, and nothing hangs; with each store that torch has."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import World
from lightning_shardckpt.errors import CorruptionError, MismatchError, RankError, StateError
from lightning_shardckpt.system.host import TUNING, Tuning
from tests.support.pool import join_store_of_rank_0, run_ranks

WORLD = 3


def store_of(kind: str, folder: Path) -> Callable[[], Any]:
    """Makes the store as each rank sees it."""
    if kind == "file":
        return lambda: dist.FileStore(str(folder / "store"), WORLD)
    if kind == "hash":
        shared = dist.HashStore()
        return lambda: shared
    server = dist.TCPStore("127.0.0.1", 0, WORLD, is_master=True, wait_for_workers=False)
    return lambda: dist.TCPStore("127.0.0.1", server.port, WORLD, is_master=False)


@pytest.fixture(params=["file", "hash", "tcp"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Any]:
    return store_of(request.param, tmp_path)


@pytest.fixture
def quick_store(tmp_path: Path) -> Callable[[], Any]:
    """For what does not depend on the store."""
    return store_of("hash", tmp_path)


def member(store: Any, rank: int, timeout_s: float, number: int = 0, tuning: Tuning = TUNING) -> Ranks:
    """One of the ranks that the threads of this process play; instances are counted per process otherwise."""
    return Ranks(World(store, rank, WORLD), range(WORLD), timeout_s, name=str(number), tuning=tuning)


def together(
    store: Callable[[], Any], fn: Callable[[Ranks], Any], timeout_s: float = 20, tuning: Tuning = TUNING
) -> list[Any]:
    """``fn`` on every rank, each in a thread of its own; what it returned or raised."""
    results: list[Any] = [None] * WORLD

    def run(rank: int, ranks: Ranks) -> None:
        try:
            results[rank] = fn(ranks)
        except BaseException as error:
            results[rank] = error

    made = [member(store(), rank, timeout_s, tuning=tuning) for rank in range(WORLD)]
    threads = [threading.Thread(target=run, args=(rank, ranks)) for rank, ranks in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def raising(error: BaseException) -> Any:
    raise error


def test_every_rank_gets_what_rank_0_made_of_the_results_of_all(store: Callable[[], Any]) -> None:
    done: list[int] = []

    def steps(ranks: Ranks) -> list[Any]:
        work = lambda i: done.append(i) or [i, ranks.rank]  # noqa: E731
        lead = lambda found: {"all": found, "done": len(done)}  # noqa: E731  # when all have done their work
        return [ranks.step("adding", lambda i=i: work(i), lead) for i in range(5)]

    expected = [{"all": [[i, rank] for rank in range(WORLD)], "done": WORLD * (i + 1)} for i in range(5)]
    assert together(store, steps) == [expected] * WORLD


def test_the_error_of_one_rank_is_raised_on_all_and_names_it(store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        ranks.step("saving x", lambda: raising(StateError("a lambda")) if ranks.rank == 1 else None, lambda found: None)

    for error in together(store, step):
        assert type(error) is StateError
        assert str(error) == "rank 1 failed while saving x: StateError: a lambda"


class Odd(OSError):
    """An error that only one rank may know."""


ERRORS: list[tuple[BaseException, type[Exception], int | None]] = [
    (FileExistsError(errno.EEXIST, "in the way"), FileExistsError, errno.EEXIST),
    (OSError(errno.ENOSPC, "No space left on device", "/x"), OSError, errno.ENOSPC),
    (CorruptionError("bits"), CorruptionError, None),
    (ValueError("value"), RankError, None),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"), RankError, None),
    (Odd("odd"), RankError, None),
    (KeyError("key"), RankError, None),
    (RuntimeError("lone \udc80 surrogate"), RankError, None),
]


def test_the_class_of_an_error_is_the_same_on_all_ranks(quick_store: Callable[[], Any]) -> None:
    def steps(ranks: Ranks) -> list[BaseException]:
        found: list[BaseException] = []
        for error, _, _ in ERRORS:
            try:
                ranks.step("x", lambda e=error: raising(e) if ranks.rank == 2 else None, lambda found: None)
            except Exception as raised:
                found.append(raised)
        return found

    for rank, found in enumerate(together(quick_store, steps)):
        for raised, (error, kind, number) in zip(found, ERRORS, strict=True):
            assert (type(raised), getattr(raised, "errno", None)) == (kind, number)
            assert f"rank 2 failed while x: {type(error).__name__}: {error}" in str(raised)
            assert raised.__cause__ is (error if rank == 2 else None)


def test_after_an_error_of_a_rank_of_rank_0_or_of_json_the_next_step_works(quick_store: Callable[[], Any]) -> None:
    def steps(ranks: Ranks) -> Any:
        odd = ranks.rank == 1
        for work, lead, said in (
            (lambda: raising(StateError("x")) if odd else None, lambda found: None, "rank 1 .*: StateError"),
            (lambda: object() if odd else None, lambda found: None, "rank 1 .*: TypeError"),
            (lambda: None, lambda found: raising(StateError("x")), "rank 0 .*: StateError"),
            (lambda: None, lambda found: object(), "rank 0 .*: TypeError"),
        ):
            with pytest.raises((StateError, RankError), match=said):
                ranks.step("x", work, lead)
        return ranks.step("x", lambda: ranks.rank, sum)

    assert together(quick_store, steps) == [3] * WORLD


@pytest.mark.parametrize(("absent", "timeout_s", "grace_s"), [(2, 2.0, 5.0), (0, 0.3, 0.2)])
def test_a_rank_that_does_not_come_is_named(
    absent: int, timeout_s: float, grace_s: float, quick_store: Callable[[], Any]
) -> None:
    def step(ranks: Ranks) -> None:
        if ranks.rank != absent:
            ranks.step("saving x", lambda: None, lambda found: None)

    found = together(quick_store, step, timeout_s=timeout_s, tuning=Tuning(rank_grace_s=grace_s))
    assert found.pop(absent) is None
    said = "got no answer from rank 0" if absent == 0 else "rank(s) [2] of 3 did not answer within 2 s"
    for error in found:
        assert isinstance(error, RankError)
        assert said in str(error) and "while saving x" in str(error)


def test_a_thread_that_waits_keeps_no_other_thread_of_its_process_waiting(store: Callable[[], Any]) -> None:
    """Rank 0 waits in a step of one thread, for ranks that first take a step with its other thread."""
    clients = [store() for _ in range(WORLD)]  # one per process, as torch has it
    slow, quick = ([member(c, r, 20, number) for r, c in enumerate(clients)] for number in (1, 2))
    entered, between = threading.Event(), threading.Event()
    found: dict[str, Any] = {}

    def wait_for_the_others() -> None:
        entered.set()
        found["slow"] = slow[0].step("slow", lambda: 0, sum)

    def first_quick_then_slow(rank: int) -> None:
        entered.wait()
        found[f"quick {rank}"] = quick[rank].step("quick", lambda: rank, sum)
        if rank:
            found[f"slow {rank}"] = slow[rank].step("slow", lambda: rank, sum)
        else:
            between.set()

    threads = [threading.Thread(target=wait_for_the_others)]
    threads += [threading.Thread(target=first_quick_then_slow, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    assert between.wait(10)
    for thread in threads:
        thread.join(30)
    assert found == dict.fromkeys(["slow", "quick 0", "quick 1", "quick 2", "slow 1", "slow 2"], 3)


def test_a_long_run_leaves_no_keys_behind() -> None:
    store = dist.HashStore()

    def steps(ranks: Ranks) -> None:
        for _ in range(50):
            ranks.step("x", lambda: None, lambda found: None)

    together(lambda: store, lambda ranks: None)
    before = store.num_keys()  # who they are
    together(lambda: store, steps)
    assert store.num_keys() <= 2 * before + 1


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def dying(who: int, phase: int) -> str:
    """A rank is killed: before it reports (0), as rank 0 after all reports (1), or between two steps (2)."""
    ranks = Ranks.of_group(timeout_s=600)
    ranks.step("beginning", lambda: None, lambda found: None)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    mine = ranks.rank == who
    try:
        if mine and phase == 2:
            die()
        ranks.step("saving x", lambda: die() if mine and phase == 0 else None, lambda f: die() if phase == 1 else None)
    except RankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "who, phase",
    [(1, 0), (0, 1), pytest.param(1, 2, marks=pytest.mark.slow)],
)
def test_a_rank_that_is_killed_is_named_long_before_the_timeout(who: int, phase: int) -> None:
    outcomes = run_ranks(WORLD, dying, who, phase, expect_errors=True, grace_s=20, timeout_s=60)
    assert outcomes.pop(who).killed
    for outcome in outcomes:
        assert f"rank {who} failed while saving x: RankError: its process, pid " in outcome.value
        assert "is gone" in outcome.value


def fails_and_ends() -> str:
    """Rank 0 keeps the store, and its process ends with an error; rank 1 asks seldom."""
    rank, _ = join_store_of_rank_0()

    def work() -> None:
        if rank == 0:
            threading.Event().wait(0.2)
            raise OSError("no room")

    try:
        tuning = TUNING if rank == 0 else Tuning(rank_poll_s=0.7, rank_longest_poll_s=0.7)
        Ranks.of_group(timeout_s=10, tuning=tuning).step("saving x", work, lambda found: None)
    except Exception as error:
        said = str(error)
    dist.destroy_process_group()
    return said


def test_ranks_that_ask_late_hear_of_the_error_with_which_rank_0_ends() -> None:
    expected = ["rank 0 failed while saving x: OSError: no room"] * 2
    assert run_ranks(2, fails_and_ends, init_process_group=False) == expected


def test_ranks_in_different_calls_learn_who_is_where(quick_store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        ranks.step("loading y" if ranks.rank == 2 else "saving x", lambda: None, lambda found: None)

    for error in together(quick_store, step):
        assert type(error) is MismatchError
        assert "rank 0 is saving x, rank 2 is loading y" in str(error)


def disagreeing(path: str, what: str) -> tuple[str, str, list[str]]:
    from lightning_shardckpt.checkpoint import checkpoint
    from lightning_shardckpt.checkpoint.background import SaveGroup
    from lightning_shardckpt.checkpoint.save_job import RunInfo
    from lightning_shardckpt.state.trainer import Snapshot

    ranks = Ranks.of_group(timeout_s=30)
    mine = f"{path}-{ranks.rank}" if what == "path" else path
    run_info = RunInfo(step=ranks.rank if what == "step" else 0)
    try:
        checkpoint.save(mine, lambda: Snapshot({}, {}, {}), SaveGroup(ranks), run=run_info)
    except Exception as error:
        return type(error).__name__, str(error), os.listdir(os.path.dirname(path))
    return "", "", []


@pytest.mark.parametrize("what", ["path", "step"])
def test_ranks_that_disagree_all_learn_who_wants_what(what: str, tmp_path: Path) -> None:
    for kind, said, left in run_ranks(2, disagreeing, str(tmp_path / "a.ckpt"), what):
        assert (kind, left) == ("MismatchError", [])
        assert f"disagree about the {what} of this save: rank 0: " in said
        assert "rank 1: " in said
