"""Sweeps: the same action with a fault at each of its calls in turn, on each of its ranks."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tests.sweeps.faults.inject import READING, WRITES, Fault, FaultKind
from tests.sweeps.faults.trial import Outcome, Scenario, attempt, prepared, scratch, spread

ERRNOS = (
    errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENAMETOOLONG,
)  # fmt: skip
WORKERS, WAITING_WORKERS = 3, 16  # the latter where ranks wait for each other most of the time


@dataclass(frozen=True, slots=True)
class Job:
    """One fault of one scenario, whose old state is in ``template``."""

    scenario: Scenario
    template: str
    folder: str
    rank: int
    fault: Fault


def kills(calls: Sequence[str]) -> Iterator[Fault]:
    """Death before each call, and in the middle of each write. An opening to read changes nothing."""
    number = 0
    for call in calls:
        if call.split()[0] == READING:
            continue
        number += 1
        yield Fault("kill", number)
        if call.split()[0] in WRITES:
            yield Fault("half", number)


def errors(
    calls: Sequence[str], codes: Sequence[int] = ERRNOS, kinds: Sequence[FaultKind] = ("errno", "sticky")
) -> Iterator[Fault]:
    """Each error at each call, once and from there on; and writes that write half."""
    for number, call in enumerate(calls, 1):
        for code in codes:
            yield from (Fault(kind, number, code) for kind in kinds)
        if call.split()[0] in WRITES:
            yield from (Fault("short", number), Fault("short from on", number))


def sweep(
    scenario: Scenario, faults_of: Callable[[Sequence[str]], Iterable[Fault]], *, every: int = 1
) -> list[Outcome]:
    """Every fault, or one of ``every``, on every rank of a scenario, each in a trial of its own."""
    with scratch() as folder:
        template, ends = prepared(scenario, folder)
        jobs = [
            Job(scenario, template, folder, rank, fault)
            for rank, end in enumerate(ends)
            for fault in faults_of(end.calls)
        ]
        return spread(_attempt, jobs[::every], WORKERS if scenario.world == 1 else WAITING_WORKERS)


def _attempt(job: Job) -> Outcome:
    return attempt(job.scenario, job.template, job.folder, job.rank, job.fault)


def problems(outcomes: Iterable[Outcome]) -> list[str]:
    """What no fault may lead to, as sentences."""
    return [f"{o.scenario}: {o.fault} on rank {o.rank}: {said}" for o in outcomes for said in o.problems]
