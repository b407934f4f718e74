"""A simulator of pipeline schedules, as an oracle of their orders and idle times."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_shardckpt.parallel.pipeline.schedule import Op, Schedule

COST = {"forward": 1, "backward": 2}


def run(orders: Sequence[Sequence[Op]], stages: int) -> int:
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


def idle(schedule: Schedule, microbatches: int) -> float:
    """The share of the time in which the average rank waits."""
    orders = [schedule.operations(rank, microbatches) for rank in range(schedule.ranks)]
    return 1 - 3 * schedule.stages_per_rank * microbatches / run(orders, schedule.stages)
