"""Write saves in the background while training goes on.

One thread of each rank, there while it has something to do, takes jobs in the order in which they came: saves, which
all ranks have in the same order, and removals, which only some have. Its steps go over a ``Ranks`` of its own. It never
talks to the user: what it has to say is fetched from it, and its errors are raised where all ranks meet.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from lightning_shardckpt.checkpoint.staging import HostMemory
from lightning_shardckpt.distributed.error_report import ErrorReport, rebuild_error, report_error
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import RankError
from lightning_shardckpt.system.threads import WRITERS, NoThreadError
from lightning_shardckpt.system.workers import Worker

_Failure: TypeAlias = tuple[int, ErrorReport]
"""The number of a save, and its error; a list of two once it has travelled as JSON."""
_LOOK_S = 1.0  # between two looks whether the thread is still there


@dataclass(frozen=True, slots=True)
class _Job:
    """A save, or the removal that follows the save of this number."""

    number: int
    path: str
    work: Callable[[], list[str]]
    memory: HostMemory | None
    """What a save was copied to; None for a removal."""
    done: Future[list[str]]


class Background:
    """The queue of what this rank still has to write and to remove.

    The thread is no daemon: the interpreter does not leave before it has done everything.

    Args:
        ranks: who saves together; nobody else may use this object.
        max_pending: how many saves may wait after the one that is being written; each needs its own host memory.

    Attributes:
        lock: held while the queue is looked at or changed; a forked process has one of its own.
    """

    def __init__(self, ranks: Ranks, max_pending: int = 1) -> None:
        self._ranks, self.max_pending = ranks, max_pending
        self._free: list[HostMemory] = []
        self._count = self._settled = 0  # saves begun; of which it was asked how they ended
        self._failed: set[int] = set()
        self._told: set[int] = set()  # numbers of saves whose failure was raised; this rank may learn of it later
        self.waited = False
        """Whether a save had to wait for room."""
        self.forget()
        WRITERS.add(self)

    def forget(self) -> None:
        """Have nothing to do: at first, and in a forked process, whose parent does what there was."""
        self.lock = threading.RLock()  # a signal handler may save, too
        self._changed = threading.Condition(self.lock)  # taken by the lock alone, see ``threads``
        self._jobs: deque[_Job] = deque()
        self._writer: Worker | None = None
        self._failures: dict[int, Exception] = {}
        self._notes: list[str] = []

    def save(self, path: str, work: Callable[[Ranks], list[str]], memory: HostMemory) -> Future[list[str]]:
        """Queue a save; every rank must, in the same order. ``work`` is called in the thread, with its ranks."""
        self._count += 1
        return self._put(_Job(self._count, path, lambda: work(self._ranks), memory, Future()))

    def remove(self, path: str, work: Callable[[], list[str]]) -> None:
        """Queue a removal; without saves before it, it is done on return.

        It is dropped, with a note, if the save before it failed: what it would remove was to be replaced by that one.
        """
        job = _Job(self._count, path, work, None, Future())
        if self.is_idle():
            self._do(job)
        else:
            self._put(job)

    def memory(self) -> HostMemory:
        """Return the memory to which the last save that ended was copied; new memory if all is in use."""
        with self.lock:
            return self._free.pop() if self._free else HostMemory()

    def settle(self, ranks: Ranks, *, room_for: str | None = None) -> None:
        """Wait for all saves and removals, or for room for a save to a path; raise what failed, each failure once.

        Collective: every rank of ``ranks`` must call it, which are those of the thread that calls.

        Raises:
            Exception: the first failure that was not raised yet, the same on all ranks; others are notes on it.
        """
        if self._settled == self._count:  # the same on all ranks: no save that could fail
            self.drain()
            return
        phase = f"making room to save {room_for!r}" if room_for is not None else "waiting for saves in the background"
        found = ranks.step(phase, lambda: self._await(room_for), _merge_failures)
        if room_for is None:
            self._settled = self._count
        with self.lock:
            self._told |= {number for number, _ in found}
            mine = {number: self._failures.pop(number, None) for number, _ in found}
            self._forget()
        errors = [mine[number] or rebuild_error(report, report["message"]) for number, report in found]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save in the background failed, too: {other}")
            raise errors[0]

    def drain(self) -> None:
        """Wait until everything is done; raises nothing. Not collective."""
        with self.lock:
            while self._jobs and self._is_alive():
                self._changed.wait(_LOOK_S)

    def leave(self, error: BaseException) -> None:
        """Do what is queued, then let the others know that this rank saves no more; see ``Ranks.leave``.

        Failures that were not raised become notes on ``error``.
        """
        self.drain()
        self._ranks.leave(error)
        with self.lock:
            failures, self._failures = self._failures, {}
            self._told |= failures.keys()
            self._forget()
        self._settled = self._count
        for failure in failures.values():
            error.add_note(f"a save in the background had failed: {type(failure).__name__}: {failure}")

    def notes(self) -> list[str]:
        """Sentences for the user that came up since the last call."""
        with self.lock:
            notes, self._notes = self._notes, []
        return notes

    def waiting_saves(self) -> int:
        """Return how many saves wait for the one that is being written."""
        with self.lock:
            return max(sum(job.memory is not None for job in self._jobs) - 1, 0)

    def is_idle(self) -> bool:
        """Return whether nothing is queued or under way."""
        return not self._jobs

    def _is_alive(self) -> bool:
        return self._writer is not None and self._writer.is_running()

    def _put(self, job: _Job) -> Future[list[str]]:
        with self.lock:
            self._jobs.append(job)
            if self._writer is not None:
                return job.done
            self._writer = Worker(self._run, name="shardckpt-writer")
        try:
            self._writer.start()
        except NoThreadError as error:  # then here: other ranks count on it
            self._notes.append(f"training waited for {job.path!r} to be written: {error}")
            self._run()
        return job.done

    def _run(self) -> None:
        while True:
            with self.lock:
                if not self._jobs:
                    self._writer = None
                    return
                job = self._jobs[0]
            self._do(job)
            with self.lock:
                self._jobs.popleft()
                del job  # its memory is another save's from now on
                self._changed.notify_all()

    def _do(self, job: _Job) -> None:
        failure: Exception | None = None
        notes: list[str] = []
        try:
            if job.memory is None and job.number in self._failed:
                notes = [f"not removed: {job.path!r}, since the save that was to replace it failed"]
            else:
                notes = job.work()
        except Exception as error:
            failure = error
        except BaseException as error:  # such as SystemExit, which would end whoever asks
            failure = RankError(
                f"rank {self._ranks.rank} failed while saving {job.path!r}: {type(error).__name__}: {error}"
            )
            failure.__cause__ = error
        with self.lock:
            self._notes += notes
            if job.memory is not None:
                self._free.append(job.memory)
            if failure is not None and job.memory is None:
                self._notes.append(f"not removed: {job.path!r}: {failure}")
            elif failure is not None:
                failure.add_note(f"in the background, while saving {job.path!r}")
                self._failed.add(job.number)
                if job.number not in self._told:
                    self._failures[job.number] = failure
                    atexit.register(self._at_exit)
        if failure is not None and job.memory is not None:
            job.done.set_exception(failure)
        else:
            job.done.set_result(notes)

    def _await(self, room_for: str | None) -> list[_Failure]:
        """Wait; returns the failures that were not raised yet."""
        with self.lock:
            while self._is_alive() and not self._has_room(room_for):
                self.waited = self.waited or room_for is not None
                self._changed.wait(_LOOK_S)
            return [(number, _report(error)) for number, error in sorted(self._failures.items())]

    def _has_room(self, path: str | None) -> bool:
        if path is None:
            return not self._jobs
        saves = [job.path for job in self._jobs if job.memory is not None]
        return len(saves) <= self.max_pending and path not in saves

    def _forget(self) -> None:
        if not self._failures:
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Nobody came to ask: the interpreter shows what is raised here, and leaves."""
        for failure in self._failures.values():
            raise failure


def _report(error: Exception) -> ErrorReport:
    """Return a report as ``rebuild_error`` takes it: an OSError puts its number before the message by itself."""
    found = report_error(error)
    if isinstance(error, OSError) and error.errno is not None:
        found["message"] = str(error.strerror)
    return found


def _merge_failures(of_ranks: list[list[_Failure]]) -> list[_Failure]:
    """Return every failure that some rank knows of, the earliest save's first. Runs on rank 0."""
    found = {number: report for failures in reversed(of_ranks) for number, report in failures}
    return [(number, found[number]) for number in sorted(found)]
