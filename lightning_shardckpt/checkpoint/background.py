"""Write saves in the background while training goes on, one at a time.

One thread per rank, which exists while there are jobs, does them in order: a save, which all ranks have, and what
follows it on some ranks only: removals of older checkpoints, and exports. Its steps use a ``Ranks`` of its own. It
prints nothing: the caller collects its notes, and the error of a save is raised in a step of all ranks.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.state.local_tensors import HostMemory
from lightning_shardckpt.system.host import WRITERS, NoThreadError, start_thread

V = TypeVar("V")
_CHECK_S = 1.0  # between two checks that the thread is alive


class Background:
    """The pending save of this rank, and what follows it.

    The thread is not a daemon, so the interpreter does not exit before all jobs are done. It alone uses ``ranks``.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, ranks.is_background = ranks, True
        self._free: HostMemory | None = None
        self.forget()

    def forget(self) -> None:
        """Empty the queue: at construction, and in a forked process, whose parent does the jobs."""
        self.lock = threading.RLock()  # reentrant: a signal handler may save
        self._changed = threading.Condition(self.lock)  # acquired through ``lock`` only, see ``system.host``
        self._jobs = deque[Callable[[], None]]()
        self._writer: threading.Thread | None = None
        self._failure: Exception | None = None  # of the last save
        self._is_pending = False  # until ``settle`` has collected its outcome
        self._notes: list[str] = []

    def memory(self) -> HostMemory:
        """Return the host memory of the last save, or new memory if it is in use: a signal handler may save, too."""
        with self.lock:
            memory, self._free = self._free, None
        return memory or HostMemory()

    def save(self, path: str, work: Callable[[Ranks], None], memory: HostMemory) -> Future[None]:
        """Queue a save, after ``settle``; return a future, which can't be cancelled.

        Every rank must queue the same saves in the same order. ``memory`` holds the copies that ``work`` writes, and is
        reused by a later save.
        """
        self._is_pending, self._failure = True, None
        done = Future[None]()
        done.set_running_or_notify_cancel()

        def write() -> None:
            failure: Exception | None = None
            try:
                work(self._ranks)
            except Exception as error:
                failure = error
            except BaseException as error:  # such as SystemExit, which would end the process that collects it
                kind = type(error).__name__
                failure = RankError(f"rank {self._ranks.rank} failed while saving {path!r}: {kind}: {error}")
                failure.__cause__ = error
            with self.lock:
                self._free = memory
            if failure is None:
                done.set_result(None)
            else:
                failure.add_note(f"in the background, while saving {path!r}")
                self._failure = failure
                atexit.register(self._at_exit)
                done.set_exception(failure)

        self._put(path, write)
        return done

    def follow(self, path: str, work: Callable[[], list[str]], problem: str, *, at_once: bool = False) -> None:
        """Queue work that follows the last save, and is dropped, with a note, if that save failed.

        ``work`` returns notes for the user; its failure becomes one, which begins with ``problem``. With ``at_once``,
        the calling thread does the work if no jobs are queued.
        """

        def do() -> None:
            if self._failure is not None:
                self.note([f"{problem}: {path!r}, since the save before it failed"])
                return
            try:
                self.note(work())
            except Exception as error:
                self.note([f"{problem}: {path!r}: {error}"])

        if at_once and not self._jobs:
            do()
        else:
            self._put(path, do)

    def settle(self, ranks: Ranks, *, before: str | None = None) -> None:
        """Wait until all jobs are done, and raise the failure of the last save, once.

        Collective: every rank of ``ranks`` must call it.

        Args:
            ranks: those of the calling thread.
            before: the path of the next save, if one waits.

        Raises:
            Exception: this rank's failure of the save; a RankError with the lowest rank's, if only others failed.
        """
        if not self._is_pending:  # the same on all ranks
            self.drain()
            return

        def report() -> str | None:
            self.drain()
            return None if self._failure is None else f"{type(self._failure).__name__}: {self._failure}"

        phase = f"waiting to save {before!r}" if before is not None else "waiting for saves in the background"
        failed: str | None = ranks.step(phase, report, lambda reports: next(filter(None, reports), None))
        self._collect()
        if failed is not None:
            raise self._failure or RankError(failed)

    def drain(self) -> None:
        """Wait until all jobs are done; raises nothing. Not collective."""
        with self.lock:
            while self._jobs and self._writer is not None and self._writer.is_alive():
                self._changed.wait(_CHECK_S)

    def leave(self, error: BaseException) -> None:
        """Finish the queue, on a rank that takes no further step with the others.

        A failure that was not raised yet is added to ``error`` as a note. Not collective.
        """
        self.drain()
        if self._is_pending and (failure := self._failure) is not None:
            error.add_note(f"a save in the background had failed: {type(failure).__name__}: {failure}")
        self._collect()

    def note(self, notes: Iterable[str]) -> None:
        """Add sentences for the user."""
        with self.lock:
            self._notes += notes

    def notes(self) -> list[str]:
        """Return the sentences for the user since the last call."""
        with self.lock:
            notes, self._notes = self._notes, []
        return notes

    def _put(self, path: str, job: Callable[[], None]) -> None:
        WRITERS.add(self)
        with self.lock:
            self._jobs.append(job)
            if self._writer is not None:
                return
            self._writer = threading.Thread(target=self._run, name="shardckpt-writer")
        try:
            start_thread(self._writer)
        except NoThreadError as error:  # run here, since the other ranks wait for this one
            self._notes.append(f"training waited for {path!r} to be written: {error}")
            self._run()

    def _run(self) -> None:
        while True:
            with self.lock:
                if not self._jobs:
                    self._writer = None
                    return
                job = self._jobs[0]
            job()
            with self.lock:
                self._jobs.popleft()
                del job  # from now on its memory belongs to another save
                self._changed.notify_all()

    def _collect(self) -> None:
        self._is_pending = False
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Raise a failure that no caller collected; the interpreter prints it at exit."""
        if self._is_pending and self._failure is not None:
            raise self._failure


# ── the ranks that save together ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class SaveGroup:
    """The ranks that save and load together, their pending save, and what saves keep for the next one.

    Attributes:
        ranks: the ranks.
        background: writes asynchronous saves, does what follows saves, and has the notes for the user.
        members: their ranks in the default process group; None if they are all its ranks, in order.
        plans: arguments and result of each function that planned the last save; no tensors.
    """

    ranks: Ranks = field(default_factory=Ranks.alone)
    background: Background = field(default_factory=lambda: Background(Ranks.alone()))
    members: tuple[int, ...] | None = None
    plans: dict[Callable[..., Any], tuple[tuple[Any, ...], Any]] = field(default_factory=dict)

    def planned(self, make: Callable[..., V], *arguments: Any) -> V:
        """Return ``make(*arguments)``, or its last result if that had equal ones; neither may change afterwards."""
        if make not in self.plans or self.plans[make][0] != arguments:
            self.plans[make] = arguments, make(*arguments)
        result: V = self.plans[make][1]
        return result
