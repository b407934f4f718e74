"""Threads that do one job each, with one way to fail, to be interrupted and to do without a thread.

``Worker`` runs one function, ``run_tasks`` shares tasks between the calling thread and others. For both:

- The first error counts, KeyboardInterrupt in the calling thread included; tasks that nobody has begun are dropped.
- It is raised in the calling thread when every thread has ended, whatever interrupts that wait: files and memory that a
  thread uses may be gone afterwards.
- Where the system gives no more threads, or the interpreter is about to end, the threads that there are do the work, at
  the least the calling one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TypeVar

from lightning_shardckpt.system.threads import Done, NoThreadError, start

T = TypeVar("T")


class Worker:
    """A thread that calls ``work`` once. Its error is kept, not shown.

    Args:
        work: what to do.
        name: of the thread, as debuggers show it.
        daemon: whether the interpreter may end without it.
    """

    def __init__(self, work: Callable[[], object], *, name: str, daemon: bool = False) -> None:
        self._work, self._ended = work, Done()
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self.error: BaseException | None = None
        """What ``work`` raised, once it has."""

    def start(self) -> None:
        """Start the thread.

        Raises:
            NoThreadError: if the system gives none; nothing is done then, and ``end`` returns at once.
        """
        start(self._thread)

    def start_or_run(self) -> None:
        """Start the thread; without one, do the work before returning."""
        try:
            self.start()
        except NoThreadError:
            self._run()

    def is_running(self) -> bool:
        """Return whether the thread was started and has not ended."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait until the work is done; for any thread. An interrupt ends the wait and leaves the work going on."""
        self._ended.wait()
        if self._thread.ident is not None:
            self._thread.join()

    def has_ended(self, timeout_s: float) -> bool:
        """Wait for up to ``timeout_s``; whether the work is done."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return self._ended.is_set()

    def end(self, on_interrupt: Callable[[BaseException], object]) -> None:
        """Wait for the end of the thread, if it was started, in spite of interrupts; ``on_interrupt`` is told of each.

        ``Thread.join`` alone takes a thread for ended when it is interrupted (Python 3.11).
        """
        if self._thread.ident is None:
            return
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as error:
                on_interrupt(error)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
        finally:
            self._ended.set()


def run_tasks(
    tasks: Iterable[T],
    open_worker: Callable[[], AbstractContextManager[Callable[[T], object]]],
    *,
    threads: int,
    name: str,
    on_failure: Callable[[], object] = lambda: None,
) -> None:
    """Do all tasks, in the calling thread and in others; return when every thread has ended.

    Args:
        tasks: begun in this order; one thread at a time takes the next one.
        open_worker: entered once by each thread, for what it needs of its own; gives what does one task.
        threads: at most so many, the calling one included.
        name: of the other threads.
        on_failure: called after each error, by any thread: to let go of tasks that wait for others, or take long.

    Raises:
        BaseException: the first error of any thread, or of ``tasks``.
    """
    left, taking = iter(tasks), threading.Lock()
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        on_failure()

    def take_part() -> None:
        try:
            with open_worker() as do:
                while not failures:
                    with taking:
                        task = next(left, _END)
                    if task is _END:
                        return
                    do(task)  # type: ignore[arg-type]  # not the mark
        except BaseException as error:
            fail(error)

    others = [Worker(take_part, name=name) for _ in range(threads - 1)]
    try:
        try:
            for other in others:
                other.start()
        except NoThreadError:
            pass  # those that there are do it
        take_part()
    except BaseException as error:  # an interrupt
        fail(error)
    for other in others:
        other.end(fail)
    _raise_first(failures)


def _raise_first(failures: list[BaseException]) -> None:
    """Raise the first one, if any, and let go of all: their tracebacks know the memory of those that failed."""
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()


_END = object()
