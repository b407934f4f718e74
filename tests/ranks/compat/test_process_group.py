"""A process group is found by its name as long as it lives."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.compat.process_group import abort_accelerators, backend_name, group_of_name
from tests.support.pool import run_ranks


def found_by_name() -> tuple[bool, list[float], bool]:
    group = dist.new_group([0, 1], backend="gloo")
    found = group_of_name(group.group_name)
    total = torch.ones(1) + dist.get_rank()
    dist.all_reduce(total, group=found)
    name = group.group_name
    dist.destroy_process_group(group)
    try:
        group_of_name(name)
    except (RuntimeError, ValueError):
        return found is group, total.tolist(), True
    return found is group, total.tolist(), False


def test_a_group_is_found_by_its_name_until_it_is_destroyed() -> None:
    assert run_ranks(2, found_by_name) == [(True, [3.0], True)] * 2


def backends() -> list[str | None]:
    devices = [torch.device("cpu"), torch.device("cuda"), torch.device("meta")]
    found = [backend_name(dist.group.WORLD, device) for device in devices]  # type: ignore[arg-type]  # there is one
    other = dist.new_group(backend="cuda:gloo")
    return [*found, *(backend_name(other, device) for device in devices)]


def test_a_group_has_a_backend_for_the_devices_that_it_serves() -> None:
    assert run_ranks(2, backends) == [["gloo", "gloo", None, None, "gloo", None]] * 2


def reduced_after_abort() -> list[float]:
    other = dist.new_group(backend="cpu:gloo,cuda:gloo")
    abort_accelerators()
    total = torch.ones(1) + dist.get_rank()
    for group in (dist.group.WORLD, other):
        dist.all_reduce(total, group=group)
    return total.tolist()


def test_groups_for_tensors_of_the_cpu_go_on_after_an_abort() -> None:
    """What it does to a GPU's is in tests/accelerator/test_lost_ranks.py."""
    assert run_ranks(2, reduced_after_abort) == [[6.0], [6.0]]
