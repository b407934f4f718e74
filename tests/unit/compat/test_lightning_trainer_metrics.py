"""Metrics gather over the group that they are given, and a user's own way stays."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torchmetrics import SumMetric

from lightning_shardckpt.compat.lightning_trainer import gather_metrics_over
from tests.support.pool import run_ranks


def sums() -> list[float]:
    halves = [dist.new_group([0, 1]), dist.new_group([2])]
    mine = halves[dist.get_rank() // 2]
    own = SumMetric(dist_sync_fn=lambda result, group=None: [result, result, result])
    module = torch.nn.ModuleDict({"sum": SumMetric(), "own": own})
    undo = gather_metrics_over(mine, module)
    found = [_sum_of(metric) for metric in (module["sum"], copy.deepcopy(module["sum"]), module["own"], SumMetric())]
    undo_inner = gather_metrics_over(dist.group.WORLD, torch.nn.ModuleDict())  # of another run, inside of this one
    found += [_sum_of(SumMetric())]
    undo_inner()
    found += [_sum_of(SumMetric())]
    undo()
    return [*found, _sum_of(module["sum"]), _sum_of(SumMetric())]


def _sum_of(metric: SumMetric) -> float:
    metric.reset()
    metric.update(float(dist.get_rank() + 1))
    return metric.compute().item()


def test_each_group_sums_its_own_values_until_the_undo() -> None:
    assert run_ranks(3, sums) == [
        [3, 3, 3, 3, 6, 3, 3, 6],
        [3, 3, 6, 3, 6, 3, 3, 6],
        [3, 3, 9, 3, 6, 3, 3, 6],
    ]
