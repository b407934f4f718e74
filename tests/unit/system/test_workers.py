"""Workers do all tasks, or raise the first error when no thread is at work any more, whatever interrupts them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest

from lightning_shardckpt.system.threads import NoThreadError, Worker, run_tasks

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
@pytest.mark.parametrize("given", [0, 1, 9])
def test_every_task_is_done_once_by_a_worker_that_is_opened_and_closed_once_per_thread(
    threads: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_threads(monkeypatch, after=given)
    done, opened, closed = list[int | None](), list[threading.Thread](), list[threading.Thread]()

    @contextmanager
    def worker() -> Iterator[Callable[[int | None], object]]:
        opened.append(threading.current_thread())
        yield done.append
        closed.append(threading.current_thread())

    run_tasks([None, *range(100)], worker, threads=threads, name="test-worker")
    assert sorted(done, key=str) == sorted([None, *range(100)], key=str)
    assert len(opened) == len(set(opened)) == min(threads, given + 1) and set(opened) == set(closed)
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
        run_tasks(range(999), lambda: nullcontext(do), threads=3, name="test-worker")
    assert len(done) < 900 and not others()


def test_an_error_of_the_tasks_or_of_opening_a_worker_is_one_of_all() -> None:
    def tasks() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        run_tasks(tasks(), lambda: nullcontext(lambda task: None), threads=3, name="test-worker")

    def unopened() -> nullcontext[Callable[[int], object]]:
        raise OSError("not opened")

    with pytest.raises(OSError, match="not opened"):
        run_tasks([1], unopened, threads=3, name="test-worker")


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
        run_tasks(range(tasks), lambda: nullcontext(do), threads=2, name="test-worker")
    assert len(ended) == 1 and not others()


def test_a_worker_without_a_thread_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_threads(monkeypatch)
    done = list[int]()
    worker = Worker(lambda: done.append(1), name="test-worker")
    with pytest.raises(NoThreadError):
        worker.start()
    worker.end(lambda error: pytest.fail(str(error)))  # at once
    assert not done and not worker.has_ended(0)
