"""Workers do all tasks, or raise the first error when no thread is at work any more, whatever interrupts them."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.local_tensors import HostMemory
from lightning_shardckpt.system.host import run_tasks, start_thread
from tests.support.pool import run_ranks

_START = threading.Thread.start


def refuse_threads(monkeypatch: pytest.MonkeyPatch, after: int = 0) -> None:
    started = list[str]()

    def refused(thread: threading.Thread) -> None:
        if len(started) == after:
            raise RuntimeError("can't start new thread")
        started.append(thread.name)
        _START(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)


def others() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test-")]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_task_is_done_once_by_a_worker_of_each_thread(threads: int) -> None:
    done, opened = list[int | None](), list[threading.Thread]()

    def worker() -> Callable[[int | None], object]:
        opened.append(threading.current_thread())
        return done.append

    run_tasks([None, *range(100)], worker, threads=threads, name="test-worker")
    assert sorted(done, key=str) == sorted([None, *range(100)], key=str)
    assert len(opened) == len(set(opened)) == threads and not others()


def test_a_lack_of_threads_is_an_error_after_which_none_is_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch, after=1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        run_tasks(range(9), lambda: lambda task: None, threads=3, name="test-worker")
    assert not others()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_the_first_error_is_raised_when_all_have_ended_and_drops_other_tasks(error: type[BaseException]) -> None:
    at_work, done = threading.Barrier(3), list[int]()

    def do(task: int) -> None:
        if task < 3:
            at_work.wait(10)
        if task == 1:
            raise error("first")
        time.sleep(0.01)
        done.append(task)

    with pytest.raises(error, match="first"):
        run_tasks(range(999), lambda: do, threads=3, name="test-worker")
    assert len(done) < 900 and not others()


@pytest.mark.parametrize("tasks", [2, 99])  # the main thread waits for the other one to end, or with its next task
@pytest.mark.parametrize("interrupts", [1, 3])
def test_interrupts_are_raised_when_no_thread_is_at_work(interrupts: int, tasks: int) -> None:
    main, ended, both_have_one = threading.get_ident(), list[int](), threading.Barrier(2)

    def do(task: int) -> None:
        both_have_one.wait(10)
        if threading.get_ident() == main:
            return
        for _ in range(interrupts):
            time.sleep(0.1)  # by now the main thread waits
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        ended.append(task)

    with pytest.raises(KeyboardInterrupt):
        run_tasks(range(tasks), lambda: do, threads=2, name="test-worker")
    assert len(ended) == 1 and not others()


# ── an interrupt at any point leaves the others able to go on ─────────────────────────────────────────────────────────


_PATIENCE_S = 1.0
_CHECKS = {"RESUME", "CALL", "JUMP_BACKWARD"}  # after these Python (3.11) lets signal handlers run


def is_interrupted(done: Background, number: int) -> bool:
    """Wait, and be interrupted at the point of this number; whether there were as many."""
    was: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal number
        frame.f_trace_opcodes = True
        if event == "opcode":
            number -= was.get(frame) in _CHECKS
            was[frame] = dis.opname[frame.f_code.co_code[frame.f_lasti]]
        if number < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        done.drain()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def is_usable(done: Background) -> bool:
    thread = threading.Thread(target=done.drain)
    thread.start()
    thread.join(_PATIENCE_S)
    return not thread.is_alive()


def test_an_interrupted_wait_for_saves_keeps_no_lock() -> None:
    found, number = list[bool](), 0
    while is_interrupted(done := Background(Ranks.alone()), number):
        found.append(is_usable(done))
        number += 1
    assert found and all(found)


def interrupted_start(thread: threading.Thread) -> None:
    """The start of a thread that a user interrupts."""
    os.kill(os.getpid(), signal.SIGINT)
    _START(thread)


def test_an_interrupt_comes_when_the_thread_has_been_started(monkeypatch: pytest.MonkeyPatch) -> None:
    go, handler = threading.Event(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    thread = threading.Thread(target=go.wait, name="test-worker")
    with pytest.raises(KeyboardInterrupt):
        start_thread(thread)
    assert thread.is_alive() and signal.getsignal(signal.SIGINT) is handler
    go.set()
    thread.join(_PATIENCE_S)
    assert not thread.is_alive()


def saved_by_a_handler(order: list[str]) -> list[str]:
    """A signal comes while a save is being queued, and its handler saves, too, as SLURM's of Lightning does."""
    writer = Background(Ranks.alone())

    def save(path: str) -> Future[None]:
        return writer.save(path, lambda ranks: writer.note([path]), HostMemory())

    saves = list[Future[None]]()
    signal.signal(signal.SIGUSR1, lambda number, frame: saves.append(save(order[1])))

    really_start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if not saves:
            signal.raise_signal(signal.SIGUSR1)
        really_start(thread)

    threading.Thread.start = interrupted  # type: ignore[method-assign]
    saves.append(save(order[0]))
    writer.drain()
    assert all(one.done() for one in saves)
    return writer.notes()


def test_a_signal_handler_may_save_while_a_save_is_queued() -> None:
    assert run_ranks(1, saved_by_a_handler, ["first", "second"], timeout_s=20) == [["first", "second"]]
