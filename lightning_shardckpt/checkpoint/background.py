"""Write saves in the background while training goes on.

One thread per rank, which exists while there are jobs, does them in order: saves, which all ranks have in the same
order, and removals, which only some ranks have. Its steps use a ``Ranks`` of its own. It prints nothing: the caller
collects its notes, and its errors are raised in a step of all ranks.
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
"""The number of a save, and its error; a list of two after an exchange as JSON."""
_CHECK_S = 1.0  # between two checks that the thread is alive


@dataclass(frozen=True, slots=True)
class _Job:
    """A save, or a removal that follows the save with this number."""

    number: int
    path: str
    work: Callable[[], list[str]]
    memory: HostMemory | None
    """The host memory that holds the save's copies; None for a removal."""
    done: Future[list[str]]


class Background:
    """The queue of saves and removals of this rank.

    The thread is not a daemon, so the interpreter does not exit before all jobs are done.

    Args:
        ranks: the ranks that save together; for exclusive use by this object.
        max_pending: the number of saves that may wait while another is being written; each needs its own host memory.

    Attributes:
        lock: held while the queue is read or changed; a forked process gets a new one.
    """

    def __init__(self, ranks: Ranks, max_pending: int = 1) -> None:
        self._ranks, self.max_pending = ranks, max_pending
        self._free: list[HostMemory] = []
        self._count = self._settled = 0  # saves begun; saves whose outcome was collected
        self._failed: set[int] = set()
        self._reported: set[int] = set()  # numbers of saves whose failure was raised, perhaps before it reached here
        self.waited = False
        """True if a save had to wait for room."""
        self.forget()
        WRITERS.add(self)

    def forget(self) -> None:
        """Empty the queue: at construction, and in a forked process, whose parent does the jobs."""
        self.lock = threading.RLock()  # reentrant: a signal handler may save
        self._changed = threading.Condition(self.lock)  # acquired through ``lock`` only, see ``system.threads``
        self._jobs: deque[_Job] = deque()
        self._writer: Worker | None = None
        self._failures: dict[int, Exception] = {}
        self._notes: list[str] = []

    def save(self, path: str, work: Callable[[Ranks], list[str]], memory: HostMemory) -> Future[list[str]]:
        """Queue a save. Every rank must queue the same saves in the same order.

        Args:
            path: of the checkpoint.
            work: called in the thread with the ranks of this object; returns notes for the user.
            memory: holds the copies that ``work`` writes; reused by a later save.

        Returns:
            A future of the notes.
        """
        self._count += 1
        return self._put(_Job(self._count, path, lambda: work(self._ranks), memory, Future()))

    def remove(self, path: str, work: Callable[[], list[str]]) -> None:
        """Queue a removal, or do it at once if the queue is empty.

        It is dropped, with a note, if the save before it failed, since that save was to replace the removed checkpoint.
        """
        job = _Job(self._count, path, work, None, Future())
        if self.is_idle():
            self._do(job)
        else:
            self._put(job)

    def memory(self) -> HostMemory:
        """Return the host memory of the last finished save, or new memory if all is in use."""
        with self.lock:
            return self._free.pop() if self._free else HostMemory()

    def settle(self, ranks: Ranks, *, room_for: str | None = None) -> None:
        """Wait for all saves and removals, or for room for another save, and raise failures, each once.

        Collective: every rank of ``ranks`` must call it.

        Args:
            ranks: the ranks of the calling thread, not those of this object.
            room_for: the path of the next save; None waits for all jobs.

        Raises:
            Exception: the first failure that was not raised yet, the same on all ranks, with the others as notes.
        """
        if self._settled == self._count:  # the same on all ranks: no save is pending
            self.drain()
            return
        phase = f"making room to save {room_for!r}" if room_for is not None else "waiting for saves in the background"
        failures = ranks.step(phase, lambda: self._wait_for_room(room_for), _merge_failures)
        if room_for is None:
            self._settled = self._count
        with self.lock:
            self._reported |= {number for number, _ in failures}
            own = {number: self._failures.pop(number, None) for number, _ in failures}
            self._unregister_if_raised()
        errors = [own[number] or rebuild_error(report, report["message"]) for number, report in failures]
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"another save in the background failed, too: {other}")
            raise errors[0]

    def drain(self) -> None:
        """Wait until all jobs are done; raises nothing. Not collective."""
        with self.lock:
            while self._jobs and self._is_alive():
                self._changed.wait(_CHECK_S)

    def leave(self, error: BaseException) -> None:
        """Finish the queue, then tell the other ranks that this one saves no more; see ``Ranks.leave``.

        Failures that were not raised yet are added to ``error`` as notes. Not collective.
        """
        self.drain()
        self._ranks.leave(error)
        with self.lock:
            failures, self._failures = self._failures, {}
            self._reported |= failures.keys()
            self._unregister_if_raised()
        self._settled = self._count
        for failure in failures.values():
            error.add_note(f"a save in the background had failed: {type(failure).__name__}: {failure}")

    def notes(self) -> list[str]:
        """Return the sentences for the user since the last call."""
        with self.lock:
            notes, self._notes = self._notes, []
        return notes

    def is_idle(self) -> bool:
        """Return True if no job is queued or running."""
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
        except NoThreadError as error:  # run here, since the other ranks wait for this one
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
                del job  # from now on its memory belongs to another save
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
        except BaseException as error:  # such as SystemExit, which would end the process that collects it
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
                if job.number not in self._reported:
                    self._failures[job.number] = failure
                    atexit.register(self._at_exit)
        if failure is not None and job.memory is not None:
            job.done.set_exception(failure)
        else:
            job.done.set_result(notes)

    def _wait_for_room(self, room_for: str | None) -> list[_Failure]:
        """Wait for room, or without a path for all jobs; return the failures that were not raised yet."""
        with self.lock:
            while self._is_alive() and not self._has_room(room_for):
                self.waited = self.waited or room_for is not None
                self._changed.wait(_CHECK_S)
            return [(number, _report(error)) for number, error in sorted(self._failures.items())]

    def _has_room(self, path: str | None) -> bool:
        if path is None:
            return not self._jobs
        saves = [job.path for job in self._jobs if job.memory is not None]
        return len(saves) <= self.max_pending and path not in saves

    def _unregister_if_raised(self) -> None:
        if not self._failures:
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Raise a failure that no caller collected; the interpreter prints it at exit."""
        for failure in self._failures.values():
            raise failure


def _report(error: Exception) -> ErrorReport:
    """Return a report for ``rebuild_error``; OSErrors without their number, which the class prepends to the message."""
    report = report_error(error)
    if isinstance(error, OSError) and error.errno is not None:
        report["message"] = str(error.strerror)
    return report


def _merge_failures(of_ranks: list[list[_Failure]]) -> list[_Failure]:
    """Return the failures of all ranks in the order of saves, the lowest rank's for each save. Runs on rank 0."""
    reports = {number: report for failures in reversed(of_ranks) for number, report in failures}
    return [(number, reports[number]) for number in sorted(reports)]
