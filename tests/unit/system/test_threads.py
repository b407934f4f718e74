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
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.tensor_bytes import HostMemory
from lightning_shardckpt.system.threads import NoThreadError, Worker
from tests.support.pool import run_ranks

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


_START = threading.Thread.start


def interrupted_start(thread: threading.Thread) -> None:
    """The start of a thread that a user interrupts."""
    os.kill(os.getpid(), signal.SIGINT)
    _START(thread)


def test_an_interrupt_comes_when_the_thread_has_been_started(monkeypatch: pytest.MonkeyPatch) -> None:
    go, handler = threading.Event(), signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    worker = Worker(go.wait, name="test-worker")
    with pytest.raises(KeyboardInterrupt):
        worker.start()
    assert worker.is_running() and signal.getsignal(signal.SIGINT) is handler
    go.set()
    assert worker.has_ended(_PATIENCE_S)


def test_what_a_handler_raises_is_not_taken_for_a_lack_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    def lost(number: int, frame: Any) -> None:
        raise RuntimeError("the machine goes")

    before, worker = signal.signal(signal.SIGINT, lost), Worker(lambda: None, name="test-worker")
    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    try:
        with pytest.raises(RuntimeError, match="the machine goes") as raised:
            worker.start()
    finally:
        signal.signal(signal.SIGINT, before)
        assert worker.has_ended(_PATIENCE_S)
    assert not isinstance(raised.value, NoThreadError)
    monkeypatch.setattr(threading.Thread, "start", none)
    with pytest.raises(NoThreadError, match="new thread"):
        Worker(lambda: None, name="test-worker").start()


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
