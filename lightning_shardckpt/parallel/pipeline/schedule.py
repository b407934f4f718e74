"""Pipeline schedules: the order of passes and messages of each rank. Pure: no tensors, no communication.

Orders come from ``torch.distributed.pipelining``. GPipe and 1F1B are defined here, since torch has them only as code.
A rank's list has each operation of its stages exactly once:

- ``forward`` of stage s needs ``forward`` of stage s - 1 on the same microbatch
- ``backward`` and ``backward_input`` of stage s need its ``forward``, and ``backward`` or ``backward_input`` of s + 1
- ``backward_weight`` needs its ``backward_input``; no operation waits for it, so it fills idle time

No microbatch waits for another, so an order remains valid without some of its microbatches. That is how schedules that
are defined only for many microbatches run fewer.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lightning_shardckpt.compat.torch_distributed import actions_of, torch_schedule
from lightning_shardckpt.errors import TopologyError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
Direction = Literal["forward", "backward"]
Part = Literal["forward", "backward", "step"]
"""A part of a step: its forward or backward operations, or all."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one stage on one microbatch.

    ``backward`` is the whole backward pass; ``backward_input`` computes the gradients for the previous stage, and
    ``backward_weight`` the rest.
    """

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Receive:
    """The point in a rank's order to post the receive of a message that crosses a boundary for one microbatch."""

    direction: Direction
    boundary: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule over ``ranks`` pipeline ranks with ``stages_per_rank`` stages each, made by `resolve_schedule`.

    >>> schedule = resolve_schedule("1F1B", ranks=2, stages_per_rank=1)
    >>> " ".join(f"{op.kind[0]}{op.microbatch}" for op in schedule.operations(0, microbatches=4))
    'f0 f1 b0 f2 b1 f3 b2 b3'

    Attributes:
        name: for error messages.
        source: "gpipe", "1f1b", or torch's class.
    """

    name: str
    ranks: int
    stages_per_rank: int
    source: str | type

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank

    @property
    def interleaves_backward(self) -> bool:
        """True if a backward may run before a rank's last forward, so that each microbatch needs its own loss."""
        return _interleaves_backward(self)

    def rank_of(self, stage: int) -> int:
        """Return the rank of ``stage``."""
        return _ranks_of_stages(self)[stage]

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of ``rank``, ascending."""
        return [stage for stage, holder in enumerate(_ranks_of_stages(self)) if holder == rank]

    def operations(self, rank: int, microbatches: int) -> Sequence[Op]:
        """Return ``rank``'s operations of one step, in order, for any number of microbatches."""
        return _orders(self, microbatches)[rank]

    def plan(self, rank: int, microbatches: int, part: Part) -> Sequence[Op | Receive]:
        """Return ``rank``'s operations of a part of a step, and between them the points to post receives.

        All ranks follow one global order of messages: an operation sends its message at its end, and the receiver posts
        the receive at the same point of the global order. So sends and receives that run in the order in which they
        were posted, as with NCCL, never deadlock. torch's schedules do the same.
        """
        return _plans(self, microbatches, part)[rank]


def resolve_schedule(name: str, ranks: int, stages_per_rank: int) -> Schedule:
    """Return a schedule by its name, as in the documentation or torch's, in any case.

    Raises:
        TopologyError: if there is no such schedule, or it does not fit ``ranks`` or ``stages_per_rank``.
    """
    if ranks < 1 or stages_per_rank < 1:
        raise TopologyError(
            f"pipeline schedule {name!r}: expected at least 1 rank and 1 stage per rank, "
            f"found {ranks} and {stages_per_rank}."
        )
    canonical = {_normalize(known): known for known in _RULES}.get(_normalize(str(name)))
    if canonical is None:
        raise TopologyError(f"unknown pipeline schedule {name!r}. Expected one of: {', '.join(_RULES)}.")
    torchs, least, most, advice = _RULES[canonical]
    if stages_per_rank < least or (most is not None and stages_per_rank > most):
        bound, plural = "at least" if most is None else "exactly", "s" * (least > 1)
        raise TopologyError(
            f"pipeline schedule {canonical!r} needs {bound} {least} stage{plural} per rank, found {stages_per_rank}. "
            f"{advice}"
        )
    return Schedule(canonical, ranks, stages_per_rank, torch_schedule(torchs) if torchs else canonical)


# ── simulation ──────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _plans(schedule: Schedule, microbatches: int, part: Part) -> list[list[Op | Receive]]:
    orders = [
        [op for op in row if part == "step" or (op.kind == "forward") == (part == "forward")]
        for row in _orders(schedule, microbatches)
    ]
    plans: list[list[Op | Receive]] = [[] for _ in orders]
    for rank, op in _simulate(schedule, orders, forwards_done=part == "backward"):
        plans[rank].append(op)
        message = sent_after(op, schedule.stages)
        if message is not None:
            receiver = schedule.rank_of(message.boundary + (message.direction == "forward"))
            if receiver != rank:
                plans[receiver].append(message)
    return plans


def sent_after(op: Op, stages: int) -> Receive | None:
    """Return the message that an operation sends at its end; None without one."""
    if op.kind == "forward":
        return Receive("forward", op.stage, op.microbatch) if op.stage + 1 < stages else None
    return Receive("backward", op.stage - 1, op.microbatch) if op.stage and op.kind != "backward_weight" else None


def needed_by(op: Op, stages: int) -> Receive | None:
    """Return the message that an operation needs from another stage; None without one."""
    if op.kind == "forward":
        return Receive("forward", op.stage - 1, op.microbatch) if op.stage else None
    last = op.stage + 1 == stages
    return None if last or op.kind == "backward_weight" else Receive("backward", op.stage, op.microbatch)


def _simulate(
    schedule: Schedule, orders: Sequence[Sequence[Op]], *, forwards_done: bool = False
) -> Iterator[tuple[int, Op]]:
    """Yield the ranks and operations in an executable order, one operation per rank in turn, as torch does.

    Raises:
        TopologyError: if the ranks would deadlock.
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
            raise TopologyError(f"pipeline schedule {schedule.name}: its ranks wait for each other forever, {waiting}")


def _needs(op: Op, stages: int) -> list[tuple[str, int, int]]:
    """Return the results that ``op`` needs."""
    if op.kind == "forward":
        return [("forward", op.stage - 1, op.microbatch)] if op.stage else []
    if op.kind == "backward_weight":
        return [("backward", op.stage, op.microbatch)]
    after = [("backward", op.stage + 1, op.microbatch)] if op.stage + 1 < stages else []
    return [("forward", op.stage, op.microbatch), *after]


def _result(op: Op) -> tuple[str, int, int]:
    """Return the result of ``op`` for `_needs`; ``backward`` and ``backward_input`` have the same."""
    return "backward" if op.kind == "backward_input" else op.kind, op.stage, op.microbatch


# ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _orders(schedule: Schedule, microbatches: int) -> list[list[Op]]:
    """Return the operations of each rank in one step."""
    if schedule.source in ("gpipe", "1f1b"):
        order = _gpipe if schedule.source == "gpipe" else _one_forward_one_backward
        return [list(order(schedule, rank, microbatches)) for rank in range(schedule.ranks)]
    rows = _torch_actions(schedule, microbatches)
    return [[op for text in row for op in _parse_action(text) if op.microbatch < microbatches] for row in rows]


def _gpipe(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """Yield the operations of GPipe (arXiv:1811.06965); with several stages per rank breadth first."""
    stages = range(rank, schedule.stages, schedule.ranks)
    yield from (Op("forward", stage, m) for stage in stages for m in range(microbatches))
    yield from (Op("backward", stage, m) for stage in reversed(stages) for m in range(microbatches))


def _one_forward_one_backward(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """Yield the operations of 1F1B: a rank has at most ``ranks - rank`` microbatches between forward and backward."""
    ahead = min(schedule.ranks - 1 - rank, microbatches)
    for m in range(microbatches + ahead):
        if m < microbatches:
            yield Op("forward", rank, m)
        if m >= ahead:
            yield Op("backward", rank, m - ahead)


def _torch_actions(schedule: Schedule, microbatches: int) -> list[list[str]]:
    """Return the actions of a torch class, for more microbatches if it has no order for this number."""
    first_error: Exception | None = None
    for count in range(microbatches, microbatches + 2 * schedule.stages + 1):
        try:
            return actions_of(schedule.source, schedule.ranks, schedule.stages_per_rank, count)
        except ValueError as error:
            first_error = first_error or error
    raise TopologyError(f"pipeline schedule {schedule.name}: {first_error}") from first_error


_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")
_IGNORED = re.compile(r"\d*(UNSHARD|RESHARD|REDUCE_GRAD|(SEND|RECV)_[FB])\d*")  # `plan` and FSDP decide on these
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def _parse_action(text: str) -> Iterator[Op]:
    overlap = _OVERLAP.fullmatch(text)
    for word in overlap[1].split(";") if overlap else [text]:
        action = _ACTION.fullmatch(word.strip())
        if action:
            yield Op(_KINDS[action[2]], int(action[1]), int(action[3]))
        elif word and not _IGNORED.fullmatch(word):
            raise TopologyError(
                f"a pipeline schedule has the action {text!r}; expected torch's spelling: stage, kind and microbatch, "
                "as in 0F1, where F is a forward, B a backward, and I and W its parts for inputs and weights"
            )


@lru_cache(maxsize=64)
def _interleaves_backward(schedule: Schedule) -> bool:
    for row in _orders(schedule, 2 * schedule.stages):
        forwards = [op.kind == "forward" for op in row]
        if any(forwards[sum(forwards) :]):
            return True
    return False


@lru_cache(maxsize=64)
def _ranks_of_stages(schedule: Schedule) -> list[int]:
    ranks = {op.stage: rank for rank, row in enumerate(_orders(schedule, 1)) for op in row}
    return [ranks[stage] for stage in range(schedule.stages)]


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


_V = "With 1 stage per rank use '1f1b', with more than 2 'interleaved_zero_bubble'."
_ONE_STAGE = "With 1 stage per rank use '1f1b'."
_RULES: dict[str, tuple[str | None, int, int | None, str]] = {
    "gpipe": (None, 1, None, ""),
    "1f1b": (None, 1, 1, "With more stages per rank use 'interleaved_1f1b'."),
    "interleaved_1f1b": ("Interleaved1F1B", 2, None, _ONE_STAGE),
    "looped_bfs": ("LoopedBFS", 1, None, ""),
    "interleaved_zero_bubble": ("InterleavedZeroBubble", 2, None, _ONE_STAGE),
    "zbv_zero_bubble": ("ZBVZeroBubble", 2, 2, _V),
    "dualpipe_v": ("DualPipeV", 2, 2, _V),
}
"""By name: torch's class, if it has one, the least and most stages per rank, and advice for others."""


def _normalize(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
