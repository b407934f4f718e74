"""Threads with common rules for errors, interrupts and a lack of threads; the saves that they still write.

Ctrl-C is safe at any point. ``threading.Event``, ``Semaphore``, ``with`` of a ``Condition``, and ``Thread.start``,
which uses an Event, take a lock in several steps of Python code. Ctrl-C between two of them leaves the lock taken, and
the next taker waits forever (Python 3.11). A Lock or an RLock is taken in one step, also by ``with``; a Condition of an
RLock releases it in one.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

T = TypeVar("T")
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
_END = object()


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
    handlers = {number: handler for number in _INTERRUPTS if callable(handler := signal.getsignal(number))}
    if threading.current_thread() is not threading.main_thread():
        handlers.clear()
    try:
        for signum in handlers:
            signal.signal(signum, lambda number, frame: received.append(number))
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in received:
            signal.raise_signal(number)


def cores_per_rank() -> int:
    """Return this rank's share of the host's cores, by the launcher's variables; at least one.

    A lower bound if only WORLD_SIZE is set.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or "1"
    return max(len(os.sched_getaffinity(0)) // max(int(size) if size.isdecimal() else 1, 1), 1)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, with signals deferred.

    Raises:
        NoThreadError: if the system can't.
    """
    with signals_deferred():
        try:
            thread.start()
        except RuntimeError as error:
            raise NoThreadError(str(error)) from error


def run_tasks(tasks: Iterable[T], new_worker: Callable[[], Callable[[T], object]], *, threads: int, name: str) -> None:
    """Do all tasks in the calling thread and others; return when every thread has ended.

    The first error counts, including KeyboardInterrupt in the calling thread; tasks that have not begun are dropped. It
    is raised after every thread has ended, since the caller may free files and memory that the threads use. An
    interrupt of that wait is raised after it.

    Args:
        tasks: begun in this order; one thread at a time takes the next one.
        new_worker: called once by each thread; returns the function that does one task.
        threads: the number, including the calling one.
        name: of the other threads.

    Raises:
        BaseException: the first error of any thread, or of ``tasks``.
    """
    remaining, taking, failures = iter(tasks), threading.Lock(), list[BaseException]()

    def work() -> None:
        try:
            do = new_worker()
            while not failures:
                with taking:
                    task = next(remaining, _END)
                if task is _END:
                    return
                do(task)  # type: ignore[arg-type]  # not _END
        except BaseException as error:
            failures.append(error)

    others = [threading.Thread(target=work, name=name) for _ in range(threads - 1)]
    try:
        for thread in others:
            start_thread(thread)
        work()
    except BaseException as error:  # an interrupt, or a lack of threads
        failures.append(error)
    try:
        with signals_deferred():  # when interrupted, `join` regards the thread as ended (Python 3.11)
            for thread in others:
                if thread.ident is not None:
                    thread.join()
        if failures:
            raise failures[0]
    finally:
        failures.clear()  # their tracebacks hold references to the threads' memory


# ── saves in the background ───────────────────────────────────────────────────────────────────────────────────────────


WRITERS: WeakSet[Any] = WeakSet()
"""Background writers: ``drain`` waits for their work, ``forget`` drops it in a forked child, whose parent does it."""


def drain_all() -> None:
    """Wait for all saves of this process, since a load may read any of them. Not collective; raises nothing."""
    for writer in list(WRITERS):
        writer.drain()


def _forget_all() -> None:
    for writer in list(WRITERS):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
