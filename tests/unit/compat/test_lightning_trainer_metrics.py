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
    gather_metrics_over(mine, module)
    found = []
    for metric in (module["sum"], copy.deepcopy(module["sum"]), module["own"]):
        metric.update(float(dist.get_rank() + 1))
        found.append(metric.compute().item())
    return found


def test_each_group_sums_its_own_values() -> None:
    assert run_ranks(3, sums) == [[3.0, 3.0, 3.0], [3.0, 3.0, 6.0], [3.0, 3.0, 9.0]]
