"""Pipeline schedules: the order of passes and messages of each rank. Pure: no tensors, no communication.

A rank's list has each operation of its stages exactly once: ``forward`` of stage s needs ``forward`` of stage s - 1 on
the same microbatch, and ``backward`` of stage s needs its ``forward``, and ``backward`` of stage s + 1. No microbatch
waits for another, so an order remains valid without some of its microbatches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from lightning_shardckpt.compat.torch_distributed import interleaved_order
from lightning_shardckpt.errors import TopologyError

Pass = Literal["forward", "backward"]
Part = Literal["forward", "backward", "step"]
"""A part of a step: its forward or backward operations, or all."""


@dataclass(frozen=True, slots=True)
class Op:
    """A forward or backward pass of one stage on one microbatch."""

    kind: Pass
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Receive:
    """The point in a rank's order to post the receive of a message that crosses a boundary for one microbatch."""

    direction: Pass
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
        return self.name != "gpipe"

    def rank_of(self, stage: int) -> int:
        """Return the rank of ``stage``."""
        return stage % self.ranks

    def stages_of(self, rank: int) -> Sequence[int]:
        """Return the stages of ``rank``, ascending."""
        return range(rank, self.stages, self.ranks)

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


_STAGES = {"gpipe": (1, None), "1f1b": (1, 1), "interleaved_1f1b": (2, None)}
"""By name: the least and the most stages per rank."""


def resolve_schedule(name: str, ranks: int, stages_per_rank: int) -> Schedule:
    """Return a schedule by its name, as in the documentation or torch's, in any case.

    Raises:
        TopologyError: if there is no such schedule, or it does not fit ``stages_per_rank``.
    """
    wanted = str(name).lower().replace("_", "")
    known = next((one for one in _STAGES if one.replace("_", "") == wanted), None)
    if known is None:
        raise TopologyError(f"unknown pipeline schedule {name!r}. Expected one of: {', '.join(_STAGES)}.")
    least, most = _STAGES[known]
    if stages_per_rank < least or (most is not None and stages_per_rank > most):
        raise TopologyError(
            f"pipeline schedule {known!r} does not fit {stages_per_rank} stages per rank: '1f1b' needs 1, "
            "'interleaved_1f1b' at least 2, and 'gpipe' fits any number."
        )
    return Schedule(known, ranks, stages_per_rank)


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


@lru_cache(maxsize=64)
def _plans(schedule: Schedule, microbatches: int, part: Part) -> list[list[Op | Receive]]:
    """Return the plans of all ranks, from a simulation: one operation per rank in turn, as torch does."""
    orders = _orders(schedule, microbatches)
    todo = [deque(op for op in row if part in ("step", op.kind)) for row in orders]
    plans: list[list[Op | Receive]] = [[] for _ in todo]
    sent: set[Receive | None] = {None}
    while any(todo):
        ready = [rank for rank, row in enumerate(todo) if row and needed_by(row[0], schedule.stages) in sent]
        assert ready  # the orders don't deadlock
        for rank in ready:
            op = todo[rank].popleft()
            plans[rank].append(op)
            message = sent_after(op, schedule.stages)
            sent.add(message)
            if message is not None:
                receiver = schedule.rank_of(message.boundary + (message.direction == "forward"))
                if receiver != rank:
                    plans[receiver].append(message)
    return plans


@lru_cache(maxsize=64)
def _orders(schedule: Schedule, microbatches: int) -> list[list[Op]]:
    """Return the operations of each rank in one step.

    torch has GPipe (arXiv:1811.06965; with several stages per rank breadth first) and 1F1B only as code. In 1F1B a rank
    has at most ``ranks - rank`` microbatches between forward and backward.
    """
    if schedule.name == "interleaved_1f1b":
        rows = interleaved_order(schedule.ranks, schedule.stages_per_rank, microbatches)
        return [[Op(*operation) for operation in row if operation[2] < microbatches] for row in rows]
    orders = []
    for rank in range(schedule.ranks):
        stages = schedule.stages_of(rank)
        forwards = [Op("forward", stage, m) for stage in stages for m in range(microbatches)]
        backwards = [Op("backward", stage, m) for stage in reversed(stages) for m in range(microbatches)]
        ahead = min(schedule.ranks - 1 - rank, microbatches) if schedule.name == "1f1b" else len(forwards)
        order = forwards[:ahead]
        for number, backward in enumerate(backwards):
            order += [*forwards[ahead + number : ahead + number + 1], backward]
        orders.append(order)
    return orders
