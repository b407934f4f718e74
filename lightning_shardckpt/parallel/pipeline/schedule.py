"""Pipeline schedules: the order of passes and messages of each rank. Pure: no tensors, no communication.

A rank's list has each operation of its stages exactly once:

- ``forward`` of stage s needs ``forward`` of stage s - 1 on the same microbatch
- ``backward`` of stage s needs its ``forward``, and ``backward`` of s + 1

No microbatch waits for another, so an order remains valid without some of its microbatches. That is how an order that
is defined only for some numbers of microbatches runs fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lightning_shardckpt.compat.torch_distributed import interleaved_1f1b
from lightning_shardckpt.errors import TopologyError

Direction = Literal["forward", "backward"]
Part = Literal["forward", "backward", "step"]
"""A part of a step: its forward or backward operations, or all."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of one stage on one microbatch."""

    kind: Direction
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
    """

    name: str
    ranks: int
    stages_per_rank: int

    @property
    def stages(self) -> int:
        """The number of stages over all ranks."""
        return self.ranks * self.stages_per_rank

    @property
    def interleaves_backward(self) -> bool:
        """True if a backward may run before a rank's last forward, so that each microbatch needs its own loss."""
        return self.name in ("1f1b", "interleaved_1f1b")

    def rank_of(self, stage: int) -> int:
        """Return the rank of ``stage``."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of ``rank``, ascending."""
        return list(range(rank, self.stages, self.ranks))

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


def resolve_schedule(wanted: str, ranks: int, stages_per_rank: int) -> Schedule:
    """Return a schedule.

    Args:
        wanted: a name, as in the documentation or torch's, in any case.
        ranks: the number of ranks of the pipeline.
        stages_per_rank: the number of stages of each rank.

    Raises:
        TopologyError: if there is no such schedule, or it does not fit ``ranks`` or ``stages_per_rank``.
    """
    if ranks < 1 or stages_per_rank < 1:
        raise TopologyError(
            f"pipeline schedule {wanted!r}: expected at least 1 rank and 1 stage per rank, "
            f"found {ranks} and {stages_per_rank}."
        )
    name = {_normalize(known): known for known in _NAMES}.get(_normalize(str(wanted)))
    if name is None:
        raise TopologyError(
            f"unknown pipeline schedule {wanted!r}. Expected one of: {', '.join(_NAMES)}. Schedules that compute the "
            "gradients of inputs and of weights in two passes (zero bubble, DualPipeV), and schedules of your own, are "
            'not supported: for a small bubble use "interleaved_1f1b".'
        )
    if name == "1f1b" and stages_per_rank > 1:
        raise TopologyError(
            f"pipeline schedule '1f1b' needs exactly 1 stage per rank, found {stages_per_rank}. With more use "
            "'interleaved_1f1b'."
        )
    if name == "interleaved_1f1b" and stages_per_rank == 1:
        raise TopologyError(
            "pipeline schedule 'interleaved_1f1b' needs at least 2 stages per rank, found 1. With 1 use '1f1b'."
        )
    return Schedule(name, ranks, stages_per_rank)


_NAMES = ("gpipe", "looped_bfs", "1f1b", "interleaved_1f1b")


def _normalize(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def bubble_fraction(schedule: Schedule, microbatches: int, *, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the share of a step's time in which the average rank is idle, without the time of communication.

    Args:
        schedule: the order to simulate.
        microbatches: the number of microbatches, at least 1.
        forward: the time of one stage's forward on one microbatch, in any unit.
        backward: the time of its backward in the same unit.
    """
    cost = {"forward": forward, "backward": backward}
    clock, done, busy = [0.0] * schedule.ranks, dict[tuple[str, int, int], float](), 0.0
    for rank, op in _simulate(schedule, _orders(schedule, microbatches)):
        start = max([clock[rank], *(done[need] for need in _needs(op, schedule.stages))])
        clock[rank] = done[op.kind, op.stage, op.microbatch] = start + cost[op.kind]
        busy += cost[op.kind]
    return 1 - busy / (schedule.ranks * max(clock))


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
    return Receive("backward", op.stage - 1, op.microbatch) if op.stage else None


def needed_by(op: Op, stages: int) -> Receive | None:
    """Return the message that an operation needs from another stage; None without one."""
    if op.kind == "forward":
        return Receive("forward", op.stage - 1, op.microbatch) if op.stage else None
    return Receive("backward", op.stage, op.microbatch) if op.stage + 1 < stages else None


def _simulate(
    schedule: Schedule, orders: Sequence[Sequence[Op]], *, forwards_done: bool = False
) -> Iterator[tuple[int, Op]]:
    """Yield the ranks and operations in an executable order, one operation per rank in turn, as torch does."""
    todo, done = [deque(row) for row in orders], set[tuple[str, int, int]]()
    while any(todo):
        for rank, row in enumerate(todo):
            if row and all(n in done or (forwards_done and n[0] == "forward") for n in _needs(row[0], schedule.stages)):
                op = row.popleft()
                done.add((op.kind, op.stage, op.microbatch))
                yield rank, op


def _needs(op: Op, stages: int) -> list[tuple[str, int, int]]:
    """Return the results that ``op`` needs."""
    if op.kind == "forward":
        return [("forward", op.stage - 1, op.microbatch)] if op.stage else []
    after = [("backward", op.stage + 1, op.microbatch)] if op.stage + 1 < stages else []
    return [("forward", op.stage, op.microbatch), *after]


# ── orders ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=64)
def _orders(schedule: Schedule, microbatches: int) -> list[list[Op]]:
    """Return the operations of each rank in one step."""
    if schedule.name == "interleaved_1f1b":
        return [[Op(*op) for op in row if op[2] < microbatches] for row in _interleaved(schedule, microbatches)]
    order = _one_forward_one_backward if schedule.name == "1f1b" else _gpipe
    return [list(order(schedule, rank, microbatches)) for rank in range(schedule.ranks)]


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


def _interleaved(schedule: Schedule, microbatches: int) -> list[list[tuple[Direction, int, int]]]:
    """Return the orders of torch's Interleaved1F1B, for more microbatches if it has none for this number."""
    ranks = schedule.ranks
    count = next(n for n in range(microbatches, microbatches + ranks) if n % max(1, n // ranks) == 0)
    return interleaved_1f1b(ranks, schedule.stages_per_rank, count)
