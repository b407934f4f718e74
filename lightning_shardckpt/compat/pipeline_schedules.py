"""The orders of operations that the schedules of torch.distributed.pipelining build, and those that users write for it.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn


def torch_schedule(name: str) -> type:
    """Return the class of torch's schedule with this name, such as ``ZBVZeroBubble``; ValueError if there is none."""
    from torch.distributed.pipelining.schedules import get_schedule_class  # half a second, for pipelines alone

    found: type = get_schedule_class(name)
    return found


def has_order(schedule: type) -> bool:
    """Return whether a class is a schedule that tells its order: torch's with one stage per rank do not."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    return issubclass(schedule, PipelineScheduleMulti)


def actions_of(schedule: Any, ranks: int, stages_per_rank: int, microbatches: int) -> list[list[str]]:
    """Return each rank's actions as torch writes them into a CSV file, such as ``0F1``.

    Relies on ``pipeline_order``, and on what the constructor reads of stages: no module and no process group.

    Args:
        schedule: a class with an order.
        ranks: of the pipeline.
        stages_per_rank: how many parts each of them has.
        microbatches: how many a step has.

    Raises:
        ValueError: if the schedule is not defined for so many.
    """
    stage = SimpleNamespace(
        num_stages=ranks * stages_per_rank,
        group_size=ranks,
        group_rank=0,
        stage_index=0,
        is_first=False,
        is_last=False,
        has_backward=False,
        stage_index_to_group_rank=None,
        submod=nn.Identity(),
    )
    built = schedule([stage] * stages_per_rank, microbatches, loss_fn=lambda *_: None)
    order = built.pipeline_order
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
