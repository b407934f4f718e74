"""An interrupt at any point leaves the others able to go on. Oracle of waits: ``threading.Event``, which does not."""

from __future__ import annotations

import dis
import os
import signal
import sys
import threading
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.staging import HostMemory
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.system.threads import Latch, NoThreadError, start
from tests.support.pool import run_ranks

_PATIENCE_S = 1.0
_CHECKS = {"RESUME", "CALL", "JUMP_BACKWARD"}  # after these Python (3.11) lets signal handlers run


def is_interrupted(done: Any, number: int) -> bool:
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
        done.wait()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def is_usable(done: Any) -> bool:
    thread = threading.Thread(target=done.wait)
    thread.start()
    thread.join(_PATIENCE_S)
    if not thread.is_alive():
        return True
    done._cond.release()  # an Event's
    thread.join()
    return False


@pytest.mark.parametrize("kind", [Latch, threading.Event])
def test_an_interrupted_wait_keeps_no_lock(kind: Any) -> None:
    found, number = list[bool](), 0
    while True:
        done = kind()
        done.set()
        if not is_interrupted(done, number):
            break
        found.append(is_usable(done))
        number += 1
    assert found and all(found) == (kind is Latch)


def test_a_wait_ends_when_it_is_set_and_not_before() -> None:
    done, ended = Latch(), list[int]()
    waiting = [threading.Thread(target=lambda: (done.wait(), ended.append(1))) for _ in range(3)]
    for thread in waiting:
        thread.start()
    assert not done.is_set() and not ended
    done.set()
    for thread in waiting:
        thread.join()
    done.wait()
    assert done.is_set() and ended == [1, 1, 1]


class Interrupting(threading.Thread):
    """Whose start a user interrupts."""

    def start(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        super().start()


def test_an_interrupt_comes_when_all_threads_have_been_started() -> None:
    done, handler = Latch(), signal.getsignal(signal.SIGINT)
    threads = [Interrupting(target=done.wait) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        start(*threads)
    assert all(thread.is_alive() for thread in threads)
    assert signal.getsignal(signal.SIGINT) is handler
    done.set()
    for thread in threads:
        thread.join()


def test_what_a_handler_raises_is_not_taken_for_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def lost(number: int, frame: Any) -> None:
        raise RuntimeError("the machine goes")

    before, done = signal.signal(signal.SIGINT, lost), Latch()
    try:
        with pytest.raises(RuntimeError, match="the machine goes") as raised:
            start(Interrupting(target=done.wait))
    finally:
        signal.signal(signal.SIGINT, before)
        done.set()
    assert not isinstance(raised.value, NoThreadError)
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(NoThreadError, match="new thread"):
        start(threading.Thread())


def saved_by_a_handler(order: list[str]) -> list[str]:
    """A signal comes while a save is being queued, and its handler saves, too, as SLURM's of Lightning does."""
    writer = Background(Ranks.alone())

    def save(path: str) -> Future[list[str]]:
        return writer.save(path, lambda ranks: [path], HostMemory())

    saves = list[Future[list[str]]]()
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
