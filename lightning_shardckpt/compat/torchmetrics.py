"""Make torchmetrics count each data-parallel rank once, where others hold the same values.

Checked with torchmetrics 1.x, of which ``Metric.dist_sync_fn`` and ``gather_all_tensors`` are public.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


class _GatherOver:
    """torchmetrics' gather over one group; metrics are deep-copied, a process group cannot be."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any | None = None) -> list[Tensor]:
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self


def gather_metrics_over(group: dist.ProcessGroup, module: nn.Module) -> None:
    """Make the metrics in a module gather over a group, unless the user said how they do.

    Lightning syncs metrics over the whole world, so the ranks of a tensor group would count several times.
    """
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _GatherOver(group)
