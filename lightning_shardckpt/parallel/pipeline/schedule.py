"""Orders in which pipeline stages run microbatches.

Pure values: no tensors, no communication. One rank's list holds each operation of its own stages exactly once. A rank
that runs its list in order, and waits for what an operation needs, never deadlocks:

- ``forward`` of stage s needs the same microbatch's ``forward`` of stage s - 1
- ``backward`` and ``backward_input`` of stage s need its own ``forward`` and either of the two of stage s + 1
- ``backward_weight`` needs its own ``backward_input``, and nothing waits for it: it fills what would be idle time

No microbatch waits for another. So an order stays valid when microbatches are left out, which is how the schedules
that are defined for many microbatches only take fewer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lightning_shardckpt.errors import TopologyError

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


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
class Schedule:
    """One schedule over ``ranks`` pipeline ranks with ``stages_per_rank`` stages each; ``resolve_schedule`` makes it.

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
        """True if a backward may come before a rank's last forward, so that each microbatch needs its own loss."""
        return _RULES[self.name].order is not _forwards_then_backwards

    def rank_of(self, stage: int) -> int:
        """The rank that holds ``stage``: round and round, or down and up again for the schedules in a V."""
        if _RULES[self.name].in_v and stage >= self.ranks:
            return 2 * self.ranks - 1 - stage
        return stage % self.ranks

    def stages_of(self, rank: int) -> list[int]:
        """The stages of ``rank``, ascending."""
        return [stage for stage in range(self.stages) if self.rank_of(stage) == rank]

    def operations(self, rank: int, microbatches: int) -> list[Op]:
        """Return ``rank``'s operations of one step, in order, for any number of microbatches; a stage's ascend."""
        return list(_RULES[self.name].order(self, rank, microbatches))


def resolve_schedule(name: str, ranks: int, stages_per_rank: int) -> Schedule:
    """Return the schedule called ``name``, in our spelling or torch's, upper or lower case.

    Raises:
        TopologyError: no schedule has this name, or this one does not fit ``ranks`` or ``stages_per_rank``.
    """
    canonical = {_plain(known): known for known in _RULES}.get(_plain(name))
    if canonical is None:
        raise TopologyError(f"unknown pipeline schedule {name!r}. Expected one of: {', '.join(_RULES)}.")
    if ranks < 1 or stages_per_rank < 1:
        raise TopologyError(
            f"pipeline schedule {canonical!r}: expected at least 1 rank and 1 stage per rank, "
            f"found {ranks} and {stages_per_rank}."
        )
    rule = _RULES[canonical]
    if stages_per_rank < rule.fewest or (rule.most is not None and stages_per_rank > rule.most):
        bound = "at least" if rule.most is None else "exactly"
        raise TopologyError(
            f"pipeline schedule {canonical!r} needs {bound} {rule.fewest} stage{'s' * (rule.fewest > 1)} per rank, "
            f"found {stages_per_rank}. {rule.instead}"
        )
    return Schedule(canonical, ranks, stages_per_rank)


def bubble_fraction(schedule: Schedule, microbatches: int, *, forward: float = 1.0, backward: float = 2.0) -> float:
    """The share of its time in a step in which the average rank waits, if communication took no time.

    Args:
        schedule: the order to simulate.
        microbatches: how many microbatches a step has, at least 1.
        forward: time of one stage's forward of one microbatch, in any unit.
        backward: time of its backward in the same unit; each of its two parts takes half of it.
    """
    cost = {"forward": forward, "backward": backward, "backward_input": backward / 2, "backward_weight": backward / 2}
    todo = [deque(schedule.operations(rank, microbatches)) for rank in range(schedule.ranks)]
    busy = sum(cost[op.kind] for ops in todo for op in ops)
    clock = [0.0] * schedule.ranks
    done: dict[tuple[str, int, int], float] = {}
    while any(todo):
        before = len(done)
        for rank, ops in enumerate(todo):
            while ops and all(need in done for need in _needs(ops[0], schedule.stages)):
                op = ops.popleft()
                start = max([clock[rank], *(done[need] for need in _needs(op, schedule.stages))])
                clock[rank] = done[_result(op)] = start + cost[op.kind]
        assert len(done) > before, f"{schedule} deadlocks with {microbatches} microbatches"
    return 1 - busy / (schedule.ranks * max(clock))


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


def _forwards_then_backwards(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """GPipe (arXiv:1811.06965); with several stages per rank breadth first (arXiv:2211.05953)."""
    stages = schedule.stages_of(rank)
    yield from (Op("forward", stage, m) for stage in stages for m in range(microbatches))
    yield from (Op("backward", stage, m) for stage in reversed(stages) for m in range(microbatches))


def _one_forward_one_backward(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """1F1B, and its interleaved form (arXiv:2104.04473): as many forwards as it takes, then in turn.

    A rank has at most ``ranks - rank`` microbatches between forward and backward, or with v stages per rank and rounds
    of n microbatches (v - 1) n + 2 (ranks - rank) - 1 of one stage each.
    """
    after = schedule.ranks - 1 - rank
    yield from _in_turn(schedule, rank, microbatches, warmup=after if schedule.stages_per_rank == 1 else 2 * after)


def _interleaved_zero_bubble(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """ZB-H1 (arXiv:2401.10241), interleaved: the weights' part comes ``rank`` backwards later.

    The last ranks start late and are the first to have a gradient: they put the weights' part off to the end, where
    the first ranks have caught up. Every rank holds at most (v - 1) n + ``ranks`` microbatches of one stage, as rank 0.
    """
    ops = _in_turn(schedule, rank, microbatches, warmup=schedule.ranks - 1 - rank)
    postponed: deque[Op] = deque()
    for op in ops:
        if op.kind != "backward":
            yield op
            continue
        yield Op("backward_input", op.stage, op.microbatch)
        postponed.append(Op("backward_weight", op.stage, op.microbatch))
        if len(postponed) > rank:
            yield postponed.popleft()
    yield from postponed


def _in_turn(schedule: Schedule, rank: int, microbatches: int, *, warmup: int) -> Iterator[Op]:
    """Forwards until one more stage's round and ``warmup`` are in flight, then one forward and one backward in turn.

    Every rank goes through its stages in rounds of microbatches, all stages in each. A round has at least one
    microbatch per rank, so that the first is back for the next stage when the last has left, and hardly more.
    """
    stages, rounds = schedule.stages_of(rank), _rounds(microbatches, schedule.ranks)
    forwards = [Op("forward", stage, m) for part in rounds for stage in stages for m in part]
    backwards = [Op("backward", stage, m) for part in rounds for stage in reversed(stages) for m in part]
    ahead = min(len(forwards), (len(stages) - 1) * max(map(len, rounds), default=0) + warmup)
    yield from forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        yield from (forward, backward)
    yield from backwards[len(forwards) - ahead :]


def _rounds(microbatches: int, ranks: int) -> list[range]:
    """All microbatches in rounds of nearly equal size, the larger first; each of ``ranks`` or more if possible."""
    count = max(1, microbatches // ranks)
    small, larger = divmod(microbatches, count)
    starts = [index * small + min(index, larger) for index in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]


def _zbv_zero_bubble(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """ZB-V (arXiv:2401.10241, section 6): at most ``2 * ranks`` microbatches of one stage in flight on every rank."""
    ranks, after = schedule.ranks, schedule.ranks - 1 - rank
    many = max(2 * ranks - 1, microbatches)
    phases = [
        (2 * after + 1, "F0"),
        (rank, "F1 F0"),
        (after + 1, "F1 I1 W"),
        (many - 2 * ranks + rank + 1, "F0 I0 W F1 I1 W"),
        (after, "I0 W F1 I1 W"),
        (rank, "I0 I1"),
        (after + 1, "I0 W"),
    ]
    yield from _in_phases(phases, schedule.stages_of(rank), microbatches)


def _dualpipe_v(schedule: Schedule, rank: int, microbatches: int) -> Iterator[Op]:
    """DualPipeV (github.com/deepseek-ai/DualPipe): the backward is split only where a rank would wait.

    A forward of one stage and a backward of the other come in pairs; they run one after the other here. At most
    ``2 * ranks + 1`` microbatches of one stage are in flight on every rank.
    """
    ranks, after, half = schedule.ranks, schedule.ranks - 1 - rank, (rank + 1) // 2
    many = max(2 * ranks, microbatches)
    phases = [
        (2 * after, "F0"),
        (rank + 1, "F0 F1"),
        (after, "I1 W F1"),
        (many - 2 * ranks + rank + 1, "F0 B1 F1 B0"),
        (after, "B1 F1 B0"),
        (half, "B1 B0"),
        (rank + 1 - 2 * half, "B1 I0"),
        (half, "I1 I0"),
        (after, "W I0"),
    ]
    yield from _in_phases(phases, schedule.stages_of(rank), microbatches)


_LETTERS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input"}


def _in_phases(phases: Iterable[tuple[int, str]], stages: list[int], microbatches: int) -> Iterator[Op]:
    """Spell out ``phases``, each a number of repeats and what is repeated, without microbatches that are too many.

    ``F0`` is the next forward of the rank's first stage, ``I1`` the next backward_input of its second, ``B1`` its next
    whole backward. ``W`` is the oldest backward_weight that is left; what remains of these comes last.
    """
    next_forward, next_backward = [0, 0], [0, 0]
    postponed: deque[Op] = deque()
    ops: list[Op] = []
    for word in (word for repeats, words in phases for _ in range(repeats) for word in words.split()):
        if word == "W":
            ops.append(postponed.popleft())
            continue
        kind, local = _LETTERS[word[0]], int(word[1])
        counter = next_forward if kind == "forward" else next_backward
        ops.append(Op(kind, stages[local], counter[local]))
        if kind == "backward_input":
            postponed.append(Op("backward_weight", stages[local], counter[local]))
        counter[local] += 1
    yield from (op for op in (*ops, *postponed) if op.microbatch < microbatches)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Rule:
    """A named schedule's order of operations, and for how many stages per rank it is defined."""

    order: Callable[[Schedule, int, int], Iterator[Op]]
    fewest: int = 1
    most: int | None = None
    in_v: bool = False
    instead: str = ""


_ONE_STAGE = "With 1 stage per rank use '1f1b'."
_V_STAGES = "With 1 stage per rank use '1f1b', with more than 2 'interleaved_zero_bubble'."
_RULES = {
    "gpipe": _Rule(_forwards_then_backwards),
    "1f1b": _Rule(_one_forward_one_backward, most=1, instead="With more stages per rank use 'interleaved_1f1b'."),
    "interleaved_1f1b": _Rule(_one_forward_one_backward, fewest=2, instead=_ONE_STAGE),
    "looped_bfs": _Rule(_forwards_then_backwards),
    "interleaved_zero_bubble": _Rule(_interleaved_zero_bubble, fewest=2, instead=_ONE_STAGE),
    "zbv_zero_bubble": _Rule(_zbv_zero_bubble, fewest=2, most=2, in_v=True, instead=_V_STAGES),
    "dualpipe_v": _Rule(_dualpipe_v, fewest=2, most=2, in_v=True, instead=_V_STAGES),
}


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")
