"""Threads that do one job each, with one way to fail, to be interrupted and to do without a thread.

``Worker`` runs one function, ``run_tasks`` shares tasks between the calling thread and others, ``TaskQueue`` does tasks
while more of them are being made. For all of them:

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
from queue import SimpleQueue
from typing import Generic, TypeVar

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


class TaskQueue(Generic[T]):
    """Tasks that a few threads do in the order in which they are put, while the calling thread makes more.

    Threads are started as tasks come. To be used by one thread, which must call ``end``; nothing bounds the queue but
    what ``release`` gives back.

    Args:
        do: does a task.
        threads: at most so many, beside the calling one.
        name: of the threads.
        release: called by the thread that took a task, when it is done or dropped.
    """

    def __init__(
        self,
        do: Callable[[T], object],
        *,
        threads: int,
        name: str,
        release: Callable[[T], object] = lambda task: None,
    ) -> None:
        self._do, self._release = do, release
        self._tasks = SimpleQueue[tuple[T] | None]()
        self._threads, self._name = threads, name
        self._workers: list[Worker] = []
        self._failures: list[BaseException] = []

    def put(self, task: T) -> None:
        """Have a task done.

        Raises:
            BaseException: what an earlier task failed with; this one is dropped, and released, then.
        """
        if len(self._workers) < self._threads:
            self._add_worker()
        if self._workers:
            self._tasks.put((task,))
        else:
            self._run(task)
        if self._failures:
            raise self._failures[0]

    def fail(self, error: BaseException) -> None:
        """Drop what is queued; ``end`` raises the first error."""
        self._failures.append(error)

    def end(self) -> None:
        """Wait until everything that was put is done or dropped, and the threads have ended.

        Raises:
            BaseException: the first that a task failed with, or that ``fail`` was told, or that interrupted the wait.
        """
        for _ in self._workers:
            self._tasks.put(None)
        for worker in self._workers:
            worker.end(self.fail)
        self._workers.clear()  # they know this object, which would stay with what the tasks left
        _raise_first(self._failures)

    def _add_worker(self) -> None:
        worker = Worker(self._take_tasks, name=self._name)
        self._workers.append(worker)
        try:
            worker.start()
        except NoThreadError:
            self._workers.remove(worker)

    def _take_tasks(self) -> None:
        while (taken := self._tasks.get()) is not None:
            self._run(*taken)
            del taken  # its memory, while this thread waits

    def _run(self, task: T) -> None:
        try:
            if not self._failures:
                self._do(task)
        except BaseException as error:
            self._failures.append(error)
        finally:
            self._release(task)


def _raise_first(failures: list[BaseException]) -> None:
    """Raise the first one, if any, and let go of all: their tracebacks know the memory of those that failed."""
    if failures:
        try:
            raise failures[0]
        finally:
            failures.clear()


_END = object()
