"""Waits and starts of threads that Ctrl-C at any point leaves intact.

``threading.Event``, ``Semaphore``, ``with`` of a ``Condition``, and ``Thread.start``, which has an Event, take a lock
in several steps of Python code. Ctrl-C between two of them leaves it taken, and the next one waits forever (Python
3.11). A Lock or an RLock is taken in one step, also by ``with``; a Condition of an RLock gives it back in one.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


class Done:
    """Set once, by one thread; others wait for it. An interrupt ends a wait and leaves all as it was."""

    def __init__(self) -> None:
        self._busy, self._is_set = threading.Lock(), False
        self._busy.acquire()

    def set(self) -> None:
        """Let go of those that wait."""
        self._is_set = True
        self._busy.release()

    def is_set(self) -> bool:
        """Return whether ``set`` was called."""
        return self._is_set

    def wait(self) -> None:
        """Wait until ``set`` was called."""
        with self._busy:
            pass


class NoThreadError(RuntimeError):
    """The system gives no more threads, or the interpreter is about to end. Not what a handler of a signal raises."""


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Signals, which Python handles in the main thread, wait until the end of the block.

    Their handlers are put off rather than the signals blocked: another thread could receive those for the main one.
    """
    came = list[int]()
    with ExitStack() as later:
        later.callback(_raise_all, came)
        if threading.current_thread() is threading.main_thread():
            for number in _INTERRUPTS:
                if callable(handler := signal.getsignal(number)):
                    later.callback(signal.signal, number, handler)
                    signal.signal(number, lambda number, frame: came.append(number))
        yield


def start(*threads: threading.Thread) -> None:
    """Start threads, with signals deferred.

    Raises:
        NoThreadError: if there is no more; those before have been started.
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
