"""Orders in which pipeline stages run microbatches, and in which their messages travel.

Pure values: no tensors, no communication. The orders are those of ``torch.distributed.pipelining``, of a class or a CSV
file of the user's for it, or, where torch has an order only in code, GPipe and 1F1B, spelled out here. One rank's list
holds each operation of its own stages exactly once:

- ``forward`` of stage s needs the same microbatch's ``forward`` of stage s - 1
- ``backward`` and ``backward_input`` of stage s need its own ``forward`` and either of the two of stage s + 1
- ``backward_weight`` needs its own ``backward_input``, and nothing waits for it: it fills what would be idle time

No microbatch waits for another. So an order stays valid when microbatches are left out, which is how the schedules
that are defined for many microbatches only take fewer.
"""

from __future__ import annotations

import csv
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal, get_args

from lightning_shardckpt.compat.torch_distributed import actions_of, has_order, torch_schedule
from lightning_shardckpt.errors import TopologyError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
Direction = Literal["forward", "backward"]
Part = Literal["forward", "backward", "step"]
"""Which operations of a step run together: either half, or all."""
Table = tuple[tuple[str, ...], ...]
"""For each rank, its actions as torch writes them into a CSV file."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one stage on one microbatch.

    ``backward`` is the whole of it; ``backward_input`` makes the gradients that the stage before waits for, and
    ``backward_weight`` the rest.
    """

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Receive:
    """The place in a rank's order where it may begin to receive what crosses a boundary for one microbatch."""

    direction: Direction
    boundary: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One schedule over ``ranks`` pipeline ranks with ``stages_per_rank`` stages each; ``resolve_schedule`` makes it.

    >>> schedule = resolve_schedule("1F1B", ranks=2, stages_per_rank=1)
    >>> " ".join(f"{op.kind[0]}{op.microbatch}" for op in schedule.operations(0, microbatches=4))
    'f0 f1 b0 f2 b1 f3 b2 b3'

    Attributes:
        name: for messages.
        source: a name of ours, torch's class or a subclass of it, or the content of a file.
    """

    name: str
    ranks: int
    stages_per_rank: int
    source: str | type | Table

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank

    @property
    def most_microbatches(self) -> int | None:
        """For how many microbatches a table was written; None for schedules that have an order for any number."""
        if not isinstance(self.source, tuple):
            return None
        return 1 + max((op.microbatch for row in _parsed(self.source) for op in row), default=-1)

    @property
    def interleaves_backward(self) -> bool:
        """True if a backward may come before a rank's last forward, so that each microbatch needs its own loss."""
        return _interleaves_backward(self)

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``."""
        return _ranks_of_stages(self)[stage]

    def stages_of(self, rank: int) -> list[int]:
        """The stages of ``rank``, ascending."""
        return [stage for stage, holder in enumerate(_ranks_of_stages(self)) if holder == rank]

    def operations(self, rank: int, microbatches: int) -> Sequence[Op]:
        """Return ``rank``'s operations of one step, in order, for any number of microbatches."""
        return _orders(self, microbatches)[rank]

    def plan(self, rank: int, microbatches: int, part: Part) -> Sequence[Op | Receive]:
        """Return ``rank``'s operations of a part of a step, and between them where it begins to receive.

        All messages have one order that every rank's plan follows: an operation sends what it made when it is done, and
        the other side begins to receive at that place in its own plan. So even messages that wait for each other, in
        the order in which they were begun, never wait in a circle. torch's schedules place theirs in the same way.
        """
        return _plans(self, microbatches, part)[rank]


def resolve_schedule(wanted: str | type, ranks: int, stages_per_rank: int) -> Schedule:
    """Return the schedule that is ``wanted``.

    Args:
        wanted: a name, in our spelling or torch's, upper or lower case; the path of a CSV file as torch writes it; or a
            class that was written for torch.
        ranks: of the pipeline.
        stages_per_rank: how many parts of the layers each of them has.

    Raises:
        TopologyError: there is no such schedule, it does not fit ``ranks`` or ``stages_per_rank``, or it is no order
            that can run.
    """
    if ranks < 1 or stages_per_rank < 1:
        raise TopologyError(
            f"pipeline schedule {wanted!r}: expected at least 1 rank and 1 stage per rank, "
            f"found {ranks} and {stages_per_rank}."
        )
    if isinstance(wanted, type):
        if not has_order(wanted):
            raise TopologyError(
                f"pipeline_schedule={wanted.__qualname__} is no subclass of "
                "torch.distributed.pipelining.schedules.PipelineScheduleMulti, which has an order (pipeline_order)."
            )
        schedule = Schedule(wanted.__qualname__, ranks, stages_per_rank, wanted)
    elif wanted.lower().endswith(".csv"):
        schedule = Schedule(wanted, ranks, stages_per_rank, _read(wanted))
    else:
        return _named(wanted, ranks, stages_per_rank)
    _check(schedule)
    return schedule


def bubble_fraction(schedule: Schedule, microbatches: int, *, forward: float = 1.0, backward: float = 2.0) -> float:
    """The share of its time in a step in which the average rank waits, if communication took no time.

    Args:
        schedule: the order to simulate.
        microbatches: how many microbatches a step has, at least 1.
        forward: time of one stage's forward of one microbatch, in any unit.
        backward: time of its backward in the same unit; each of its two parts takes half of it.
    """
    cost = {"forward": forward, "backward": backward, "backward_input": backward / 2, "backward_weight": backward / 2}
    clock, done, busy = [0.0] * schedule.ranks, dict[tuple[str, int, int], float](), 0.0
    for rank, op in _run(schedule, _orders(schedule, microbatches)):
        start = max([clock[rank], *(done[need] for need in _needs(op, schedule.stages))])
        clock[rank] = done[_result(op)] = start + cost[op.kind]
        busy += cost[op.kind]
    return 1 - busy / (schedule.ranks * max(clock))


# ── running an order ────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _plans(schedule: Schedule, microbatches: int, part: Part) -> list[list[Op | Receive]]:
    orders = [
        [op for op in row if part == "step" or (op.kind == "forward") == (part == "forward")]
        for row in _orders(schedule, microbatches)
    ]
    plans: list[list[Op | Receive]] = [[] for _ in orders]
    for rank, op in _run(schedule, orders, forwards_done=part == "backward"):
        plans[rank].append(op)
        message = sent_after(op, schedule.stages)
        if message is not None:
            to = schedule.rank_of(message.boundary + (message.direction == "forward"))
            if to != rank:
                plans[to].append(message)
    return plans


def sent_after(op: Op, stages: int) -> Receive | None:
    """Return the message that an operation gives to another stage."""
    if op.kind == "forward":
        return Receive("forward", op.stage, op.microbatch) if op.stage + 1 < stages else None
    return Receive("backward", op.stage - 1, op.microbatch) if op.stage and op.kind != "backward_weight" else None


def needed_by(op: Op, stages: int) -> Receive | None:
    """Return the message from another stage that an operation begins with."""
    if op.kind == "forward":
        return Receive("forward", op.stage - 1, op.microbatch) if op.stage else None
    last = op.stage + 1 == stages
    return None if last or op.kind == "backward_weight" else Receive("backward", op.stage, op.microbatch)


def _run(
    schedule: Schedule, orders: Sequence[Sequence[Op]], *, forwards_done: bool = False
) -> Iterator[tuple[int, Op]]:
    """Yield the operations of all ranks in an order in which each finds what it needs; in turns, as torch does.

    Raises:
        TopologyError: if the ranks would wait for each other.
    """
    todo, done = [deque(row) for row in orders], set[tuple[str, int, int]]()
    while any(todo):
        before = len(done)
        for rank, row in enumerate(todo):
            if row and all(n in done or (forwards_done and n[0] == "forward") for n in _needs(row[0], schedule.stages)):
                op = row.popleft()
                done.add(_result(op))
                yield rank, op
        if len(done) == before:
            waiting = {rank: str(row[0]) for rank, row in enumerate(todo) if row}
            raise TopologyError(f"pipeline schedule {schedule.name}: its ranks wait for each other for ever, {waiting}")


def _needs(op: Op, stages: int) -> list[tuple[str, int, int]]:
    """The results that must be there before ``op`` can start."""
    if op.kind == "forward":
        return [("forward", op.stage - 1, op.microbatch)] if op.stage else []
    if op.kind == "backward_weight":
        return [("backward", op.stage, op.microbatch)]
    after = [("backward", op.stage + 1, op.microbatch)] if op.stage + 1 < stages else []
    return [("forward", op.stage, op.microbatch), *after]


def _result(op: Op) -> tuple[str, int, int]:
    """Return the result for which other operations wait; a whole backward and its first part give the same."""
    return "backward" if op.kind == "backward_input" else op.kind, op.stage, op.microbatch


# ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _orders(schedule: Schedule, microbatches: int) -> list[list[Op]]:
    """Every rank's operations of one step."""
    if schedule.source == "gpipe":
        return [list(_forwards_then_backwards(schedule, rank, microbatches)) for rank in range(schedule.ranks)]
    if schedule.source == "1f1b":
        return [list(_one_forward_one_backward(schedule, rank, microbatches)) for rank in range(schedule.ranks)]
    rows = schedule.source if isinstance(schedule.source, tuple) else _torchs(schedule, microbatches)
    return [[op for op in row if op.microbatch < microbatches] for row in _parsed(rows)]


def _forwards_then_backwards(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """GPipe (arXiv:1811.06965); with several stages per rank breadth first."""
    stages = range(rank, schedule.stages, schedule.ranks)
    yield from (Op("forward", stage, m) for stage in stages for m in range(microbatches))
    yield from (Op("backward", stage, m) for stage in reversed(stages) for m in range(microbatches))


def _one_forward_one_backward(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """1F1B: a rank has at most ``ranks - rank`` microbatches between forward and backward."""
    ahead = min(schedule.ranks - 1 - rank, microbatches)
    for m in range(microbatches + ahead):
        if m < microbatches:
            yield Op("forward", rank, m)
        if m >= ahead:
            yield Op("backward", rank, m - ahead)


def _torchs(schedule: Schedule, microbatches: int) -> Table:
    """Return the actions of one of torch's classes, for more microbatches if it has no order for so many."""
    refused: Exception | None = None
    for count in range(microbatches, microbatches + 2 * schedule.stages + 1):
        try:
            rows = actions_of(schedule.source, schedule.ranks, schedule.stages_per_rank, count)
            return tuple(map(tuple, rows))
        except ValueError as error:
            refused = refused or error
    raise TopologyError(f"pipeline schedule {schedule.name}: {refused}") from refused


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_OTHER = re.compile(r"\d*(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")  # ours, in their own places
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")
_ALL: tuple[Kind, ...] = get_args(Kind)
_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


@lru_cache(maxsize=64)
def _parsed(rows: Table) -> list[list[Op]]:
    """Raises a TopologyError for text that is no action of torch's."""
    return [[op for text in row for op in _ops_of(text.strip())] for row in rows]


def _ops_of(text: str) -> Iterator[Op]:
    together = _TOGETHER.fullmatch(text)
    for word in together[1].split(";") if together else [text]:
        action = _ACTION.fullmatch(word.strip())
        if action:
            yield Op(_KINDS[action[2]], int(action[1]), int(action[3]))
        elif word and not _OTHER.fullmatch(word):
            raise TopologyError(
                f"a pipeline schedule has the action {text!r}; expected torch's spelling: stage, kind and microbatch, "
                "as in 0F1, where F is a forward, B a backward, and I and W its parts for inputs and weights"
            )


def _read(path: str) -> Table:
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            return tuple(tuple(row) for row in csv.reader(file) if any(row))
    except (OSError, ValueError) as error:
        raise TopologyError(f"pipeline_schedule={path!r} cannot be read as a CSV file: {error}") from error


@lru_cache(maxsize=64)
def _interleaves_backward(schedule: Schedule) -> bool:
    for row in _orders(schedule, schedule.most_microbatches or 2 * schedule.stages):
        forwards = [op.kind == "forward" for op in row]
        if any(forwards[sum(forwards) :]):
            return True
    return False


@lru_cache(maxsize=64)
def _ranks_of_stages(schedule: Schedule) -> list[int]:
    found = {op.stage: rank for rank, row in enumerate(_orders(schedule, 1)) for op in row}
    return [found[stage] for stage in range(schedule.stages)]


def _check(schedule: Schedule) -> None:
    """Raise a TopologyError for an order of somebody else's that would not do."""
    count = schedule.most_microbatches or 2 * schedule.stages
    orders = _orders(schedule, count)
    wanted = Counter((stage, m) for stage in range(schedule.stages) for m in range(count))
    ops = [op for row in orders for op in row]
    found = {kind: Counter((op.stage, op.microbatch) for op in ops if op.kind == kind) for kind in _ALL}
    backwards = found["backward"] + found["backward_input"]
    held = [len({op.stage for op in row}) for row in orders]
    if held != [schedule.stages_per_rank] * schedule.ranks:
        raise TopologyError(
            f"pipeline schedule {schedule.name} has ranks with {held} stages; expected {schedule.ranks} ranks with "
            f"{schedule.stages_per_rank} each (pipeline_parallel_size and pipeline_stages_per_rank)"
        )
    if not found["forward"] == backwards == wanted or found["backward_input"] != found["backward_weight"]:
        raise TopologyError(
            f"pipeline schedule {schedule.name}: expected one forward (F) and one backward (B, or I and W) of every "
            f"stage on each of {count} microbatches, found others"
        )
    for _ in _run(schedule, orders):
        pass


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Rule:
    """For how many stages per rank a named schedule is defined, and torch's name if the order is torch's."""

    torch: str | None = None
    fewest: int = 1
    most: int | None = None
    instead: str = ""


_ONE_STAGE = "With 1 stage per rank use '1f1b'."
_V_STAGES = "With 1 stage per rank use '1f1b', with more than 2 'interleaved_zero_bubble'."
_RULES = {
    "gpipe": _Rule(),
    "1f1b": _Rule(most=1, instead="With more stages per rank use 'interleaved_1f1b'."),
    "interleaved_1f1b": _Rule("Interleaved1F1B", fewest=2, instead=_ONE_STAGE),
    "looped_bfs": _Rule("LoopedBFS"),
    "interleaved_zero_bubble": _Rule("InterleavedZeroBubble", fewest=2, instead=_ONE_STAGE),
    "zbv_zero_bubble": _Rule("ZBVZeroBubble", fewest=2, most=2, instead=_V_STAGES),
    "dualpipe_v": _Rule("DualPipeV", fewest=2, most=2, instead=_V_STAGES),
}


def _named(name: str, ranks: int, stages_per_rank: int) -> Schedule:
    canonical = {_plain(known): known for known in _RULES}.get(_plain(name))
    if canonical is None:
        raise TopologyError(
            f"unknown pipeline schedule {name!r}. Expected the path of a CSV file, a class that was written for torch, "
            f"or one of: {', '.join(_RULES)}."
        )
    rule = _RULES[canonical]
    if stages_per_rank < rule.fewest or (rule.most is not None and stages_per_rank > rule.most):
        bound = "at least" if rule.most is None else "exactly"
        raise TopologyError(
            f"pipeline schedule {canonical!r} needs {bound} {rule.fewest} stage{'s' * (rule.fewest > 1)} per rank, "
            f"found {stages_per_rank}. {rule.instead}"
        )
    return Schedule(canonical, ranks, stages_per_rank, torch_schedule(rule.torch) if rule.torch else canonical)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
