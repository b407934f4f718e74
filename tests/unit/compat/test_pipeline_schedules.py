"""torch's classes tell their orders without process groups. Oracle: torch's own display of them."""

from __future__ import annotations

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleGPipe, ScheduleZBVZeroBubble

from lightning_shardckpt.compat.pipeline_schedules import actions_of, has_order, torch_schedule


@pytest.mark.parametrize(
    "name", ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
)
def test_actions_are_those_that_torch_shows(name: str) -> None:
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8)):
        shown = get_schedule_ops(name, ranks, microbatches, num_stages_per_rank=2)
        expected = [[str(action) for action in row if action is not None] for row in shown]
        assert actions_of(torch_schedule(name), ranks, 2, microbatches) == expected


def test_schedules_are_found_by_name_and_those_of_one_stage_have_no_order() -> None:
    assert torch_schedule("zbvzerobubble") is ScheduleZBVZeroBubble
    assert has_order(ScheduleZBVZeroBubble) and has_order(PipelineScheduleMulti)
    assert not has_order(ScheduleGPipe)
    with pytest.raises(ValueError):
        torch_schedule("2f2b")
    with pytest.raises(ValueError):
        actions_of(torch_schedule("DualPipeV"), 2, 2, 1)
