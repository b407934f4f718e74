"""Every pipeline schedule is an order that ranks can run. Oracles: a simulator, and messages without tags."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, get_args

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.pipeline.schedule import (
    Part,
    Receive,
    Schedule,
    needed_by,
    resolve_schedule,
    sent_after,
)
from tests.support.schedules import run

NAMES = ["gpipe", "1f1b", "interleaved_1f1b"]


def every(name: str) -> list[Schedule]:
    """Every schedule of this name with up to 4 ranks and 3 stages on each."""
    per_rank = {"gpipe": [1, 2, 3], "1f1b": [1], "interleaved_1f1b": [2, 3]}[name]
    return [resolve_schedule(name, ranks, v) for ranks in range(1, 5) for v in per_rank]


@pytest.mark.parametrize("name", NAMES)
def test_every_operation_comes_once_in_an_order_that_does_not_deadlock(name: str) -> None:
    for schedule in every(name):
        for microbatches in range(1, 10):
            orders = [schedule.operations(rank, microbatches) for rank in range(schedule.ranks)]
            run(orders, schedule.stages)
            for rank, ops in enumerate(orders):
                mine = sorted((stage, m) for stage in schedule.stages_of(rank) for m in range(microbatches))
                kinds = defaultdict(list)
                for op in ops:
                    kinds[op.kind].append((op.stage, op.microbatch))
                assert sorted(kinds["forward"]) == sorted(kinds["backward"]) == mine


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


@pytest.mark.parametrize(
    ("name", "ranks", "stages_per_rank", "parts"),
    [
        ("2f2b", 2, 1, ["'2f2b'", *NAMES]),
        (ScheduleInterleaved1F1B, 2, 2, ["ScheduleInterleaved1F1B", *NAMES]),
        ("1f1b", 2, 2, ["'1f1b' does not fit 2 stages per rank", "'interleaved_1f1b' at least 2"]),
        ("interleaved_1f1b", 2, 1, ["does not fit 1 stages per rank", "'1f1b' needs 1"]),
        ("zbv_zero_bubble", 2, 2, ["'zbv_zero_bubble'", *NAMES]),
    ],
)
def test_what_does_not_fit_is_refused_with_what_does(
    name: Any, ranks: int, stages_per_rank: int, parts: list[str]
) -> None:
    with pytest.raises(TopologyError) as caught:
        resolve_schedule(name, ranks, stages_per_rank)
    assert all(part in str(caught.value) for part in parts), caught.value
