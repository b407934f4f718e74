"""Collectives that are watched, objects as bytes, and orders of pipelines mean what this package takes them for."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleGPipe, ScheduleZBVZeroBubble

from lightning_shardckpt.compat.torch_distributed import (
    actions_of,
    has_order,
    torch_schedule,
    watch_collectives,
)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD  # type: ignore[misc]  # it is there between the two
    dist.destroy_process_group()


def test_collectives_are_watched_with_their_group_inside_only(alone: dist.ProcessGroup) -> None:
    seen: list[tuple[str, Any]] = []
    original = dist.all_reduce
    with watch_collectives(lambda name, group: seen.append((name, group))):
        dist.all_reduce(torch.ones(1))
        dist.broadcast(torch.ones(1), 0, alone)
        dist.barrier(group=alone)
        other = threading.Thread(target=dist.all_reduce, args=(torch.ones(1),))
        other.start()
        other.join()
    dist.all_reduce(torch.ones(1))
    assert dist.all_reduce is original
    assert seen == [("all_reduce", None), ("broadcast", alone), ("barrier", alone)]


def test_every_collective_of_this_torch_is_watched() -> None:
    """Oracle: what has a group, but the names of functions that send to one rank, or don't communicate."""
    between_two = {f"{way}{kind}" for way in ("send", "recv", "isend", "irecv") for kind in ("", "_object_list")}
    silent = {"get_", "is_", "new_", "split_", "shrink_", "destroy_", "set_", "supports_", "record_"}
    originals = dict(vars(dist))
    expected = set()
    for name in set(distributed_c10d.__all__) - between_two:
        function = originals.get(name)
        if type(function) is FunctionType and not name.startswith(tuple(silent)):
            expected |= {name} if "group" in inspect.signature(function).parameters else set()
    with watch_collectives(lambda name, group: None):
        watched = {name for name, value in vars(dist).items() if originals.get(name) is not value}
    assert len(expected) > 18 and watched == expected


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
