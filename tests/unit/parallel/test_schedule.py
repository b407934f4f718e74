"""Every pipeline schedule is an order that ranks can run, with the idle time that is said.

Oracles: a simulator of its own, one of messages without tags, the published formulas, and the tables that torch shows.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, get_args

import pytest
from torch.distributed.pipelining import ScheduleGPipe, ScheduleInterleaved1F1B

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.pipeline.schedule import (
    Op,
    Part,
    Receive,
    Schedule,
    needed_by,
    resolve_schedule,
    sent_after,
)

NAMES = [
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv_zero_bubble",
    "dualpipe_v",
]
IN_V = {"zbv_zero_bubble", "dualpipe_v"}
SPLIT = {"interleaved_zero_bubble", *IN_V}
FLAT = {"gpipe", "looped_bfs"}
COST = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}
Orders = Sequence[Sequence[Op]]


def every(name: str) -> list[Schedule]:
    """Every schedule of this name with up to 4 ranks and 3 stages on each."""
    fits = {"1f1b": [1], "interleaved_1f1b": [2, 3], "interleaved_zero_bubble": [2, 3]}
    per_rank = [2] if name in IN_V else fits.get(name, [1, 2, 3])
    return [resolve_schedule(name, ranks, v) for ranks in range(1, 5) for v in per_rank]


def orders_of(schedule: Schedule, microbatches: int) -> Orders:
    return [schedule.operations(rank, microbatches) for rank in range(schedule.ranks)]


def run(orders: Orders, stages: int) -> int:
    """Time until all ranks are done, each in its own order; fails where they wait for each other for ever."""
    done: dict[tuple[str, int, int], int] = {}
    position, clock = [0] * len(orders), [0] * len(orders)
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(orders):
            if position[rank] == len(ops):
                continue
            op = ops[position[rank]]
            s, m = op.stage, op.microbatch
            if op.kind == "forward":
                needs, made = [("f", s - 1, m)] * (s > 0), "f"
            elif op.kind == "backward_weight":
                needs, made = [("b", s, m)], "w"
            else:
                needs, made = [("f", s, m), *[("b", s + 1, m)] * (s + 1 < stages)], "b"
            if all(need in done for need in needs):
                clock[rank] = max([clock[rank], *(done[need] for need in needs)]) + COST[op.kind]
                done[made, s, m] = clock[rank]
                position[rank] += 1
                moved = True
    stuck = {rank: ops[at] for rank, (ops, at) in enumerate(zip(orders, position, strict=True)) if at < len(ops)}
    assert not stuck, f"these wait for ever: {stuck}"
    return max(clock)


def most_in_flight(ops: Sequence[Op]) -> int:
    """The largest number of (stage, microbatch) whose activations one rank holds at a time."""
    split = {(op.stage, op.microbatch) for op in ops if op.kind == "backward_weight"}
    held, most = set(), 0
    for op in ops:
        key = op.stage, op.microbatch
        if op.kind == "forward":
            held.add(key)
        elif op.kind == "backward_weight" or key not in split:
            held.remove(key)
        most = max(most, len(held))
    assert not held
    return most


# ── every order ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_comes_exactly_once_on_the_rank_of_its_stage(name: str) -> None:
    for schedule in every(name):
        for microbatches in range(1, 10):
            for rank, ops in enumerate(orders_of(schedule, microbatches)):
                mine = {(stage, m) for stage in schedule.stages_of(rank) for m in range(microbatches)}
                kinds = defaultdict(list)
                for op in ops:
                    kinds[op.kind].append((op.stage, op.microbatch))
                assert sorted(kinds["forward"]) == sorted(mine)
                assert sorted(kinds["backward"] + kinds["backward_input"]) == sorted(mine)
                assert sorted(kinds["backward_weight"]) == sorted(kinds["backward_input"])
                assert not kinds["backward_input"] or name in SPLIT
                for kind, found in kinds.items():  # each stage's microbatches ascend, but where torch goes back
                    back = name == "looped_bfs" and kind == "backward"
                    assert sorted(found, key=lambda k: (k[0], -k[1] if back else k[1])) == sorted(
                        found, key=lambda k: k[0]
                    )


@pytest.mark.parametrize("name", NAMES)
def test_no_order_deadlocks_with_any_number_of_microbatches(name: str) -> None:
    for schedule in every(name):
        for microbatches in range(1, 10):
            run(orders_of(schedule, microbatches), schedule.stages)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("part", get_args(Part))
def test_messages_without_tags_that_wait_for_each_other_arrive_before_they_are_needed(name: str, part: Part) -> None:
    """As NCCL's do: each rank has one queue of what it sends and receives, and its head waits for the other side's."""
    for schedule in every(name):
        for microbatches in range(1, 10):
            queues = [deque[tuple[int, int, Receive]]() for _ in range(schedule.ranks)]
            for rank in range(schedule.ranks):
                here = set[Receive]()
                for item in schedule.plan(rank, microbatches, part):
                    if isinstance(item, Receive):
                        stage = item.boundary + (item.direction == "backward")
                        queues[rank].append((schedule.rank_of(stage), rank, item))
                        here.add(item)
                        continue
                    needed, sent = needed_by(item, schedule.stages), sent_after(item, schedule.stages)
                    if needed is not None:
                        source = schedule.rank_of(needed.boundary + (needed.direction == "backward"))
                        assert source == rank or needed in here
                    if sent is not None:
                        to = schedule.rank_of(sent.boundary + (sent.direction == "forward"))
                        if to != rank:
                            queues[rank].append((rank, to, sent))
            while any(queues):
                heads = [queue[0] for queue in queues if queue]
                both = [head for head in heads if heads.count(head) == 2]
                assert both, f"these wait for each other: {heads}"
                for source, to, _ in set(both):
                    queues[source].popleft(), queues[to].popleft()


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_starts_backward_before_its_last_forward_only_if_the_schedule_says_so(name: str) -> None:
    early = False
    for schedule in every(name):
        for ops in orders_of(schedule, 8):
            kinds = [op.kind for op in ops]
            early |= "forward" in kinds[next(i for i, kind in enumerate(kinds) if kind != "forward") :]
        assert schedule.interleaves_backward == (name not in FLAT)
    assert early == (name not in FLAT)


@pytest.mark.parametrize("name", NAMES)
def test_stages_lie_round_and_round_or_in_a_v(name: str) -> None:
    for schedule in every(name):
        p = schedule.ranks
        assert schedule.stages == p * schedule.stages_per_rank
        for rank in range(p):
            wanted = [rank, 2 * p - 1 - rank] if name in IN_V else list(range(rank, schedule.stages, p))
            assert schedule.stages_of(rank) == wanted
            assert {schedule.rank_of(stage) for stage in wanted} == {rank}


# ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_1f1b_holds_one_microbatch_less_on_every_further_rank() -> None:
    for schedule in every("1f1b"):
        for microbatches in range(1, 10):
            found = [most_in_flight(ops) for ops in orders_of(schedule, microbatches)]
            assert found == [min(schedule.ranks - rank, microbatches) for rank in range(schedule.ranks)]


# ── idle time ───────────────────────────────────────────────────────────────────────────────────────────────────────


def idle(schedule: Schedule, microbatches: int) -> float:
    """The share of the time in which the average rank waits."""
    return 1 - 3 * schedule.stages_per_rank * microbatches / run(orders_of(schedule, microbatches), schedule.stages)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_idle_for_one_microbatch_per_further_rank(name: str) -> None:
    for p in range(1, 5):
        for m in range(1, 10):
            assert idle(resolve_schedule(name, p, 1), m) == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("spelling", "name", "stages_per_rank"),
    [
        ("GPipe", "gpipe", 1),
        ("GPIPE", "gpipe", 3),
        ("1F1B", "1f1b", 1),
        ("Interleaved1F1B", "interleaved_1f1b", 2),
        ("interleaved1f1b", "interleaved_1f1b", 2),
        ("LoopedBFS", "looped_bfs", 2),
        ("InterleavedZeroBubble", "interleaved_zero_bubble", 2),
        ("ZBVZeroBubble", "zbv_zero_bubble", 2),
        ("DualPipeV", "dualpipe_v", 2),
    ],
)
def test_torchs_spelling_names_the_same_schedule(spelling: str, name: str, stages_per_rank: int) -> None:
    found = resolve_schedule(spelling, 2, stages_per_rank)
    assert found.name == name
    assert found == resolve_schedule(name, 2, stages_per_rank)


@pytest.mark.parametrize(
    ("name", "ranks", "stages_per_rank", "parts"),
    [
        ("2f2b", 2, 1, ["'2f2b'", *NAMES]),
        ("1f1b", 2, 2, ["exactly 1 stage per rank", "found 2", "'interleaved_1f1b'"]),
        ("Interleaved1F1B", 2, 1, ["'interleaved_1f1b'", "at least 2 stages", "found 1", "'1f1b'"]),
        ("interleaved_zero_bubble", 2, 1, ["at least 2 stages", "found 1"]),
        ("zbv_zero_bubble", 2, 3, ["exactly 2 stages", "found 3", "'interleaved_zero_bubble'"]),
        ("DualPipeV", 2, 1, ["'dualpipe_v'", "exactly 2 stages", "found 1"]),
        ("gpipe", 0, 1, ["at least 1 rank", "0 and 1"]),
        ("gpipe", 2, 0, ["1 stage per rank", "2 and 0"]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    name: str, ranks: int, stages_per_rank: int, parts: list[str]
) -> None:
    with pytest.raises(TopologyError) as caught:
        resolve_schedule(name, ranks, stages_per_rank)
    assert all(part in str(caught.value) for part in parts), caught.value


# ── schedules of users ──────────────────────────────────────────────────────────────────────────────────────────────


class Impatient(ScheduleInterleaved1F1B):
    """The same order with all backward passes at once; as a user writes it for torch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for rank, actions in self.pipeline_order.items():
            real = [action for action in actions if action is not None]
            self.pipeline_order[rank] = sorted(real, key=lambda action: action.computation_type.value != "F")


def test_a_class_that_was_written_for_torch_gives_its_order() -> None:
    schedule = resolve_schedule(Impatient, 2, 2)
    torchs = resolve_schedule("interleaved_1f1b", 2, 2)
    assert (schedule.name, schedule.interleaves_backward) == ("Impatient", False)
    for microbatches in range(1, 7):
        for rank in range(2):
            found, theirs = schedule.operations(rank, microbatches), torchs.operations(rank, microbatches)
            for kind in ("forward", "backward"):
                assert [op for op in found if op.kind == kind] == [op for op in theirs if op.kind == kind]


def test_classes_that_are_no_schedules_are_refused() -> None:
    with pytest.raises(TopologyError, match=r"Pipeline\(schedule=ScheduleGPipe\) is not a subclass of"):
        resolve_schedule(ScheduleGPipe, 2, 1)
    with pytest.raises(TopologyError, match="Wrong has ranks with"):
        resolve_schedule(Wrong, 3, 2)
    with pytest.raises(TopologyError, match="Halved: expected one forward"):
        resolve_schedule(Halved, 2, 2)
    with pytest.raises(TopologyError, match="wait for each other forever"):
        resolve_schedule(Late, 2, 2)


class Wrong(Impatient):
    """Leaves out a rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.pipeline_order[0]


class Late(Impatient):
    """Runs a backward before its forward."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipeline_order[0].reverse()


class Halved(Impatient):
    """Leaves out operations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.pipeline_order[0][-1]
