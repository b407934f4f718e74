"""What of a LightningModule must be told that it is sharded: its metrics, and how it clips gradients."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shardckpt.errors import TopologyError


class _GatherOver:
    """torchmetrics' gather over one group; metrics are deep-copied, a process group cannot be."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any | None = None) -> list[Tensor]:
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self


def refuse_clipping_of_stages(module: pl.LightningModule) -> None:
    """Make ``torch.nn.utils.clip_grad_norm_`` in ``configure_gradient_clipping`` an error: it sees one stage only."""
    configure = type(module).configure_gradient_clipping.__get__(module)

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise TopologyError(
            "configure_gradient_clipping calls torch.nn.utils.clip_grad_norm_, which sees the parameters of one "
            "pipeline stage only; call self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)"
        )

    def guarded(*args: Any, **kwargs: Any) -> None:
        original, torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad_norm_, refuse  # type: ignore[assignment]
        try:
            configure(*args, **kwargs)
        finally:
            torch.nn.utils.clip_grad_norm_ = original

    module.__dict__["configure_gradient_clipping"] = guarded


def gather_metrics_over(group: dist.ProcessGroup, module: torch.nn.Module) -> None:
    """Make metrics count each data-parallel rank once."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _GatherOver(group)
