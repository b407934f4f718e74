"""Start threads and wait for them, safely interruptible by Ctrl-C at any point; list the saves that they still write.

``threading.Event``, ``Semaphore``, ``with`` of a ``Condition``, and ``Thread.start``, which uses an Event, take a lock
in several steps of Python code. Ctrl-C between two of them leaves the lock taken, and the next taker waits forever
(Python 3.11). A Lock or an RLock is taken in one step, also by ``with``; a Condition of an RLock releases it in one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol
from weakref import WeakSet

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Latch:
    """A one-time event: one thread sets it once, others wait for it. An interrupt ends a wait and changes nothing."""

    def __init__(self) -> None:
        self._unset, self._is_set = threading.Lock(), False
        self._unset.acquire()

    def set(self) -> None:
        """End all waits."""
        self._is_set = True
        self._unset.release()

    def is_set(self) -> bool:
        """Return True once ``set`` was called."""
        return self._is_set

    def wait(self) -> None:
        """Wait until ``set`` is called."""
        with self._unset:
            pass


class NoThreadError(RuntimeError):
    """The system can start no more threads, or the interpreter is about to exit.

    A class of its own distinguishes it from a RuntimeError that a signal handler raises.
    """


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer signal handlers, which Python runs in the main thread, to the end of the block.

    Replaces the handlers instead of blocking the signals, since another thread could receive a blocked signal.
    """
    received = list[int]()
    with ExitStack() as on_exit:
        on_exit.callback(_raise_all, received)
        if threading.current_thread() is threading.main_thread():
            for number in _INTERRUPTS:
                if callable(handler := signal.getsignal(number)):
                    on_exit.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, frame: received.append(number))
        yield


def start(*threads: threading.Thread) -> None:
    """Start threads, with signals deferred.

    Raises:
        NoThreadError: if the system starts no more; the threads before the failing one have been started.
    """
    with signals_deferred():
        for thread in threads:
            try:
                thread.start()
            except RuntimeError as error:
                raise NoThreadError(str(error)) from error


def _raise_all(signals: list[int]) -> None:
    for number in signals:
        signal.raise_signal(number)


# ── saves in the background ───────────────────────────────────────────────────────────────────────────────────────────


class PendingWriter(Protocol):
    """A background writer."""

    def drain(self) -> None:
        """Wait until all queued work is done; raises nothing. Not collective."""

    def forget(self) -> None:
        """Drop the queue in a forked child: the parent process does the work."""


WRITERS: WeakSet[PendingWriter] = WeakSet()


def drain_all() -> None:
    """Wait for all saves of this process, since a load may read any of them. Not collective; raises nothing."""
    for writer in list(WRITERS):
        writer.drain()


def _forget_all() -> None:
    for writer in list(WRITERS):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
