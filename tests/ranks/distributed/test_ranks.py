"""A failure on one rank reaches all, by name and class, and nothing hangs; with each store that torch has."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CorruptionError, MismatchError, RankError, StateError
from lightning_shardckpt.system.tuning import TUNING, Tuning
from tests.support.pool import run_ranks

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


def member(
    store: Any, rank: int, timeout_s: float, number: int = 0, tuning: Tuning = TUNING, world: int = WORLD
) -> Ranks:
    """One of the ranks that the threads of this process play; instances are counted per process otherwise."""
    return Ranks(store, rank, world, timeout_s, name=str(number), tuning=tuning)


def together(
    store: Callable[[], Any],
    fn: Callable[[Ranks], Any],
    timeout_s: float = 20,
    tuning: Tuning = TUNING,
    world: int = WORLD,
) -> list[Any]:
    """``fn`` on every rank, each in a thread of its own; what it returned or raised."""
    results: list[Any] = [None] * world

    def run(rank: int, ranks: Ranks) -> None:
        try:
            results[rank] = fn(ranks)
        except BaseException as error:
            results[rank] = error

    made = [member(store(), rank, timeout_s, tuning=tuning, world=world) for rank in range(world)]
    threads = [threading.Thread(target=run, args=(rank, ranks)) for rank, ranks in enumerate(made)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def raising(error: BaseException) -> Any:
    raise error


def test_every_rank_gets_what_rank_0_made_of_all_results(store: Callable[[], Any]) -> None:
    def steps(ranks: Ranks) -> list[Any]:
        return [ranks.step("adding", lambda i=i: [i, ranks.rank], lambda found: {"all": found}) for i in range(5)]

    expected = [{"all": [[i, rank] for rank in range(WORLD)]} for i in range(5)]
    assert together(store, steps) == [expected] * WORLD


def test_rank_0_acts_when_all_have_done_their_work(quick_store: Callable[[], Any]) -> None:
    done: list[int] = []

    def work(ranks: Ranks) -> int:
        time.sleep(0.02 * ranks.rank)
        done.append(ranks.rank)
        return ranks.rank

    together(quick_store, lambda ranks: ranks.step("working", lambda: work(ranks), lambda found: done.append(-1)))
    assert sorted(done[:WORLD]) == list(range(WORLD))
    assert done[WORLD:] == [-1]


def test_the_error_of_one_rank_is_raised_on_all_and_names_it(store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        ranks.step("saving x", lambda: raising(StateError("a lambda")) if ranks.rank == 1 else None, lambda found: None)

    for error in together(store, step):
        assert type(error) is StateError
        assert str(error) == "rank 1 failed while saving x: StateError: a lambda"


def test_an_error_of_rank_0_alone_reaches_all(quick_store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        ranks.step("committing", lambda: None, lambda found: raising(CorruptionError("no")))

    for error in together(quick_store, step):
        assert type(error) is CorruptionError
        assert str(error) == "rank 0 failed while committing: CorruptionError: no"


class Odd(OSError):
    """An error that only one rank may know."""


ERRORS: list[tuple[BaseException, type[Exception], int | None]] = [
    (FileExistsError("in the way"), FileExistsError, None),
    (FileExistsError(errno.EEXIST, "in the way"), FileExistsError, errno.EEXIST),
    (OSError(errno.ENOSPC, "No space left on device", "/x"), OSError, errno.ENOSPC),
    (PermissionError(errno.EACCES, "denied"), PermissionError, errno.EACCES),
    (CorruptionError("bits"), CorruptionError, None),
    (ValueError("value"), RankError, None),
    (UnicodeDecodeError("utf-8", b"x", 0, 1, "reason"), RankError, None),
    (Odd("odd"), RankError, None),
    (KeyError("key"), RankError, None),
    (RankError("of a rank"), RankError, None),
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


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_a_rank_that_is_told_to_end_ends_and_says_so_to_the_others(
    kind: type[BaseException], who: int, quick_store: Callable[[], Any]
) -> None:
    def step(ranks: Ranks) -> None:
        ranks.step("x", lambda: raising(kind(3)) if ranks.rank == who else None, lambda found: None)

    for rank, error in enumerate(together(quick_store, step)):
        assert type(error) is (kind if rank == who else RankError)
        assert rank == who or f"rank {who} failed while x: {kind.__name__}: 3" in str(error)


@pytest.mark.parametrize("who", [0, 1])
def test_a_result_that_is_not_json_is_an_error_on_all_ranks_at_once(who: int, quick_store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        if who == 0:
            ranks.step("x", lambda: None, lambda found: object())
        else:
            ranks.step("x", lambda: object() if ranks.rank == who else None, lambda found: None)

    for error in together(quick_store, step):
        assert isinstance(error, RankError)
        assert f"rank {who} failed while x: TypeError" in str(error)


def test_after_an_error_the_next_step_works(quick_store: Callable[[], Any]) -> None:
    def steps(ranks: Ranks) -> Any:
        with pytest.raises(StateError):
            ranks.step("x", lambda: raising(StateError("x")) if ranks.rank == 1 else None, lambda found: None)
        with pytest.raises(StateError):
            ranks.step("x", lambda: None, lambda found: raising(StateError("x")))
        return ranks.step("x", lambda: ranks.rank, sum)

    assert together(quick_store, steps) == [3] * WORLD


def test_a_rank_that_does_not_come_is_named(quick_store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        if ranks.rank != 2:
            ranks.step("saving x", lambda: None, lambda found: None)

    first, second, absent = together(quick_store, step, timeout_s=2.0, tuning=Tuning(rank_grace_s=5.0))
    for error in (first, second):
        assert isinstance(error, RankError)
        assert "rank(s) [2] of 3 did not answer within 2 s while saving x" in str(error)
    assert absent is None


def test_if_rank_0_does_not_come_the_others_say_so(quick_store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        if ranks.rank != 0:
            ranks.step("saving x", lambda: None, lambda found: None)

    absent, *others = together(quick_store, step, timeout_s=0.3, tuning=Tuning(rank_grace_s=0.2))
    assert absent is None
    for rank, error in enumerate(others, start=1):
        assert isinstance(error, RankError)
        assert f"rank {rank} got no answer from rank 0" in str(error)
        assert "while saving x" in str(error)


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


def test_one_process_needs_no_store() -> None:
    ranks = Ranks.alone()
    assert (ranks.rank, ranks.world) == (0, 1)
    assert ranks.step("x", lambda: 5, lambda found: found) == [5]
    with pytest.raises(ZeroDivisionError):
        ranks.step("x", lambda: 1 // 0, lambda found: found)


# ── processes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def dying(who: int, phase: int) -> str:
    """A rank is killed: before it reports (0), as rank 0 after all reports (1), or between two steps (2)."""
    ranks = Ranks.of_default_group(600)
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


def stopping(who: int) -> str:
    """A rank is stopped; the others wake it when both have given up, so that it can end."""
    ranks, store = Ranks.of_default_group(2), dist.distributed_c10d._get_default_store()
    store.set(f"pid/{ranks.rank}", str(os.getpid()))
    ranks.step("beginning", lambda: None, lambda found: None)
    try:
        ranks.step(
            "saving x", lambda: os.kill(os.getpid(), signal.SIGSTOP) if ranks.rank == who else None, lambda found: None
        )
    except RankError as error:
        if ranks.rank != who:
            store.set(f"gave up/{ranks.rank}", "")
            store.wait([f"gave up/{rank}" for rank in range(WORLD) if rank != who])
            os.kill(int(store.get(f"pid/{who}")), signal.SIGCONT)
        return str(error)
    return ""


def test_a_rank_that_is_stopped_is_named_when_the_time_is_up() -> None:
    found = run_ranks(WORLD, stopping, 1, timeout_s=60)
    for rank in (0, 2):
        assert "rank(s) [1] of 3 did not answer within 2 s" in found[rank]
        assert "while saving x" in found[rank] and "stopped" in found[rank]


def fails_and_ends() -> str:
    """Rank 0 keeps the store, as under Lightning's launcher, and its process ends with an error; rank 1 asks seldom."""
    shared, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        shared.set("port", str(server.port))
    else:
        server = dist.TCPStore("127.0.0.1", int(shared.get("port")), 2, is_master=False)

    def work() -> None:
        if rank == 0:
            threading.Event().wait(0.2)
            raise OSError("no room")

    try:
        tuning = TUNING if rank == 0 else Tuning(rank_poll_s=0.7, rank_longest_poll_s=0.7)
        Ranks(server, rank, 2, 10, tuning=tuning).step("saving x", work, lambda found: None)
    except Exception as error:
        return str(error)
    return ""


def test_ranks_that_ask_late_hear_of_the_error_with_which_rank_0_ends() -> None:
    assert run_ranks(2, fails_and_ends) == ["rank 0 failed while saving x: OSError: no room"] * 2


def slow_in_turn() -> list[int]:
    """Whoever is slow, in its own work or as rank 0 after all others, has the whole timeout each time."""
    ranks = Ranks.of_default_group(3)
    slow = [threading.Event().wait] * 2  # no signal comes: a wait of that many seconds

    def work(who: int) -> int:
        if ranks.rank == who:
            slow[0](2.0)
        return ranks.rank

    def lead(found: list[int]) -> int:
        slow[1](2.5)
        return sum(found)

    return [ranks.step("saving x", lambda w=who: work(w), lead) for who in (0, 2)]


@pytest.mark.slow
def test_a_slow_rank_is_waited_for() -> None:
    assert run_ranks(WORLD, slow_in_turn, timeout_s=60) == [[3, 3]] * WORLD


def test_ranks_in_different_calls_learn_who_is_where(quick_store: Callable[[], Any]) -> None:
    def step(ranks: Ranks) -> None:
        ranks.step("loading y" if ranks.rank == 2 else "saving x", lambda: None, lambda found: None)

    for error in together(quick_store, step):
        assert type(error) is MismatchError
        assert "rank 0 is saving x, rank 2 is loading y" in str(error)


def disagreeing(path: str, what: str) -> tuple[str, str, list[str]]:
    from lightning_shardckpt.checkpoint import checkpoint
    from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
    from lightning_shardckpt.state.snapshot import Snapshot

    ranks = Ranks.of_default_group(30)
    mine = f"{path}-{ranks.rank}" if what == "path" else path
    run_info = RunInfo(step=ranks.rank if what == "step" else 0)
    try:
        checkpoint.save(mine, lambda: Snapshot({}, {}, {}), ranks=ranks, run=run_info, options=SaveOptions(1))
    except Exception as error:
        return type(error).__name__, str(error), os.listdir(os.path.dirname(path))
    return "", "", []


@pytest.mark.parametrize("what", ["path", "step"])
def test_ranks_that_disagree_all_learn_who_wants_what(what: str, tmp_path: Path) -> None:
    for kind, said, left in run_ranks(2, disagreeing, str(tmp_path / "a.ckpt"), what):
        assert (kind, left) == ("MismatchError", [])
        assert f"disagree about the {what} of this save: rank 0: " in said
        assert "rank 1: " in said
