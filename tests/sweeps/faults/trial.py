"""Trials: an action of one or more processes, a fault at one call of one of them, and what loads afterwards."""

from __future__ import annotations

import errno
import faulthandler
import os
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import World
from lightning_shardckpt.system.host import Tuning
from tests.sweeps.faults.inject import NO_FAULT, READING, WRITES, Change, Fault, Interposer

Found = Literal["old", "new", "mixed", "lost"]
ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ESTALE, errno.EMFILE)
ERRNOS += (errno.ENAMETOOLONG,)
WORKERS, WAITING_WORKERS = 3, 16  # the latter where ranks wait for each other most of the time
HUNG_S = 30.0  # a rank that lives for so long after the start of a trial hangs
LOOK_S = 0.1  # how often a rank looks for dead ones: Ranks' default makes a sweep ten times as long, and no better


@dataclass(frozen=True, slots=True)
class Scenario:
    """An action that brings a root from an old to a new state.

    ``prepare`` and ``act`` are collective; ``found`` tells which of the states a root is in, by loading from it;
    ``repeat`` does what a job does when it comes back, and must leave the new state and no temporaries.
    """

    name: str
    world: int
    prepare: Callable[[str, Ranks], None]
    act: Callable[[str, Ranks], None]
    found: Callable[[str], Found]
    repeat: Callable[[str], None]
    exchange: bool = True  # whether the file system can exchange two names
    prepared_by: int = 0  # how many ranks prepare, if not ``world``
    named: bool = True  # whether errors name the rank and the path
    durable: bool = True  # whether it survives a loss of power


@dataclass(frozen=True, slots=True)
class End:  # how the action ended on one rank
    how: Literal["returned", "raised", "killed", "hung"]
    message: str = ""
    calls: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:  # what came of a fault in a rank
    scenario: str
    rank: int
    fault: Fault
    found: Found
    ends: tuple[End, ...]
    problems: tuple[str, ...]


@contextmanager
def scratch() -> Iterator[str]:
    """An empty folder, in memory where possible: the trials are about calls, not about a disk."""
    memory = "/dev/shm"
    with tempfile.TemporaryDirectory(prefix="faults-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield folder


def spread(fn: Callable[[Any], Any], jobs: Sequence[Any], workers: int) -> list[Any]:
    """``[fn(job) for job in jobs]`` in forks of this process, which must have one thread."""
    with tempfile.TemporaryDirectory() as folder:
        pids = []
        for worker in range(min(workers, len(jobs))):
            pid = os.fork()
            if pid == 0:
                _in_child(Path(folder, f"{worker}"), lambda w=worker: [fn(job) for job in jobs[w::workers]])
            pids.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            raise RuntimeError(f"workers of {fn} ended with {codes}; see their output")
        results: list[Any] = [None] * len(jobs)
        for worker in range(len(pids)):
            results[worker::workers] = pickle.loads(Path(folder, f"{worker}").read_bytes())
    return results


def _in_child(report: Path, work: Callable[[], Any]) -> None:
    code = 1
    try:
        report.write_bytes(pickle.dumps(work()))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def together(
    scenario: Scenario, root: str, collective: Callable[[str, Ranks], None], rank: int, fault: Fault, record: bool
) -> tuple[End, ...]:
    """Run ``collective`` on every rank of a scenario, each in a fork; ``rank`` has the fault."""
    with tempfile.TemporaryDirectory(dir=os.path.dirname(root)) as folder:
        started = time.monotonic()
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pids: dict[int, int] = {}
        for each in range(scenario.world):
            pid = os.fork()
            if pid == 0:
                signal.pthread_sigmask(signal.SIG_SETMASK, old)
                own = fault if each == rank else NO_FAULT
                take_part = partial(_take_part, scenario, root, collective, each, own, record, folder)
                _in_child(Path(folder, f"{each}"), take_part)
            pids[pid] = each
        codes = _wait(dict(pids), started + HUNG_S)
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        return tuple(_end(Path(folder, f"{each}"), codes[each]) for each in range(scenario.world))


def _take_part(
    scenario: Scenario, root: str, collective: Any, rank: int, fault: Fault, record: bool, folder: str
) -> End:
    stacks = os.open(os.path.join(folder, f"{rank}.stacks"), os.O_WRONLY | os.O_CREAT)
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
    ranks = Ranks.alone()
    if scenario.world > 1:
        store = dist.FileStore(os.path.join(folder, "store"), scenario.world)  # type: ignore[attr-defined]
        world, tuning = World(store, rank, scenario.world), Tuning(host_look_s=LOOK_S)
        ranks = Ranks(world, range(scenario.world), HUNG_S / 2, tuning=tuning)
    return acted(scenario, root, lambda: collective(root, ranks), fault, record)


def acted(scenario: Scenario, root: str, work: Callable[[], None], fault: Fault, record: bool) -> End:
    """Run ``work`` with a fault in this process, which lives on unless it is killed."""
    how, message = "returned", ""
    with Interposer(root, fault, record=record, exchange=scenario.exchange) as interposer:
        try:
            work()
        except Exception as error:
            how, message = "raised", f"{type(error).__name__}: {error}"
    return End(how, message, tuple(interposer.calls), tuple(interposer.changes))  # type: ignore[arg-type]


def _wait(running: dict[int, int], deadline: float) -> dict[int, int | None]:
    """The exit code by rank; None for one that had to be killed at the deadline."""
    codes: dict[int, int | None] = {}
    while running and (left := deadline - time.monotonic()) > 0:
        for pid in list(running):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        if running:
            signal.sigtimedwait({signal.SIGCHLD}, min(left, 1.0))
    for sent in (signal.SIGUSR2, signal.SIGKILL) if running else ():
        for pid in running:
            os.kill(pid, sent)
        if sent == signal.SIGUSR2:
            signal.sigtimedwait({signal.SIGCHLD}, 1.0)  # faulthandler writes the stacks
    for pid, rank in running.items():
        os.waitpid(pid, 0)
        codes[rank] = None
    return codes


def _end(report: Path, code: int | None) -> End:
    if code is None:
        stacks = report.with_suffix(".stacks")  # of a rank that took part
        return End("hung", stacks.read_text() if stacks.exists() else "before it began")
    if code == -signal.SIGKILL:
        return End("killed")
    if code != 0:
        return End("raised", f"exit status {code}: an error outside of the action; see its output")
    return pickle.loads(report.read_bytes())  # type: ignore[no-any-return]


def prepared(scenario: Scenario, folder: str) -> tuple[str, tuple[End, ...]]:
    """A root in the old state to copy for each trial, and the calls that each rank makes in the action."""
    template = os.path.join(folder, "template", "root")
    os.makedirs(template)
    preparing = replace(scenario, world=scenario.prepared_by or scenario.world)
    ends = together(preparing, template, scenario.prepare, 0, NO_FAULT, False)
    if any(end.how != "returned" for end in ends):
        raise RuntimeError(f"{scenario.name}: cannot prepare: {[end.message for end in ends]}")
    ends = action(scenario, template, os.path.join(folder, "count", "root"), 0, Fault("errno"), False)
    if any(end.how != "returned" for end in ends):
        raise RuntimeError(f"{scenario.name}: fails without a fault: {[end.message for end in ends]}")
    return template, ends


def action(scenario: Scenario, template: str, root: str, rank: int, fault: Fault, record: bool) -> tuple[End, ...]:
    """Run the action on a copy of a prepared root."""
    shutil.copytree(template, root, symlinks=True)
    if scenario.world == 1 and fault.kind not in ("kill", "half"):
        return (acted(scenario, root, lambda: scenario.act(root, Ranks.alone()), fault, record),)
    return together(scenario, root, scenario.act, rank, fault, record)


def attempt(scenario: Scenario, template: str, folder: str, rank: int, fault: Fault) -> Outcome:
    """One trial in a new folder, which is removed: the action with a fault, what loads then, and what comes next."""
    with tempfile.TemporaryDirectory(dir=folder) as own:
        root = os.path.join(own, "root")
        ends = action(scenario, template, root, rank, fault, False)
        found = scenario.found(root)
        problems = [*judged(scenario, root, rank, fault, ends, found), *repeated(scenario, root)]
    return Outcome(scenario.name, rank, fault, found, ends, tuple(p.replace(own, "") for p in problems))


def repeated(scenario: Scenario, root: str) -> Iterator[str]:
    """What is wrong after the job came back and had no fault."""
    end = acted(scenario, root, lambda: scenario.repeat(root), NO_FAULT, False)
    if end.how != "returned":
        yield f"next: a save without faults fails: {end.message}"
    elif (found := scenario.found(root)) != "new":
        yield f"next: {found} after a save without faults"
    if left := leftovers(root):
        yield f"next: left behind: {left}"


def leftovers(root: str) -> list[str]:
    """Temporaries below a root."""
    return sorted(n for _, folders, files in os.walk(root) for n in (*folders, *files) if n.startswith(".tmp-"))


def judged(scenario: Scenario, root: str, rank: int, fault: Fault, ends: Sequence[End], found: Found) -> Iterator[str]:
    """What no fault may lead to; the first word is the kind."""
    if found in ("mixed", "lost"):
        yield f"{found}: ends {[(end.how, end.message) for end in ends]}"
    for each, end in enumerate(ends):
        if end.how == "hung":
            yield f"hung: rank {each}: {end.message}"
        if end.how == "returned" and found != "new":
            yield f"undetected: rank {each} returned, what loads is {found}"
        if end.how == "raised" and scenario.named:
            together = sum(end.how == "raised" for end in ends) > 1
            said = _not_said(root, rank if together else None, fault, end)
            yield from (f"message: {what}: {end.message}" for what in said)
    dead = {rank} if fault.kind in ("kill", "half") else set()
    if {each for each, end in enumerate(ends) if end.how == "killed"} != dead:
        yield f"killed: {[end.how for end in ends]}, expected rank {dead}"


def _not_said(root: str, rank: int | None, fault: Fault, end: End) -> Iterator[str]:
    if rank is not None and f"rank {rank}" not in end.message and f"rank(s) [{rank}]" not in end.message:
        yield "no rank"
    if root not in end.message:
        yield "no path"
    if fault.errno and os.strerror(fault.errno) not in end.message:
        yield f"no {os.strerror(fault.errno)!r}"


# ── sweeps: a fault at each call in turn, on each rank ───────────────────────────────────────────────────────────────


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


def errors(calls: Sequence[str], codes: Sequence[int] = ERRNOS) -> Iterator[Fault]:
    """Each error at each call, once and from there on; writes of half, after which the disk is full or is not."""
    for number, call in enumerate(calls, 1):
        for code in codes:
            yield from (Fault("errno", number, code), Fault("sticky", number, code))
        if call.split()[0] in WRITES:
            yield from (Fault("short", number), Fault("short from on", number), Fault("full", number, errno.ENOSPC))


def sweep(scenario: Scenario, faults_of: Callable[[Any], Iterable[Fault]], *, every: int = 1) -> list[Outcome]:
    """Every fault, or one of ``every``, on every rank of a scenario, each in a trial of its own."""
    with scratch() as folder:
        template, ends = prepared(scenario, folder)
        jobs = [(rank, fault) for rank, end in enumerate(ends) for fault in faults_of(end.calls)]
        workers = WORKERS if scenario.world == 1 else WAITING_WORKERS
        return spread(lambda job: attempt(scenario, template, folder, *job), jobs[::every], workers)


def problems(outcomes: Iterable[Outcome]) -> list[str]:
    """What no fault may lead to, as sentences."""
    return [f"{o.scenario}: {o.fault} on rank {o.rank}: {said}" for o in outcomes for said in o.problems]
