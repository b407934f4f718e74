"""What of a Trainer must be told that its module is sharded: metrics, and in pipelines whose code runs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.profilers import Profiler
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shardckpt.parallel.stage_optimizer import user_code

_HOOKS = ("[LightningModule]", "[Callback]")


class _GatherOver:
    """torchmetrics' gather over one group; metrics are deep-copied, a process group cannot be."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any | None = None) -> list[Tensor]:
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self


def mark_user_code(profiler: Profiler) -> Callable[[], None]:
    """Let hooks and callbacks see the parameters of all pipeline stages in param groups; returns what undoes it.

    Lightning runs all of them under its profiler, by names that say whose they are.
    """
    original = profiler.profile

    @contextmanager
    def profile(action_name: str) -> Generator[Any, None, None]:
        with original(action_name) as found, user_code(action_name.startswith(_HOOKS)):
            yield found

    profiler.profile = profile  # type: ignore[method-assign]  # undone by what is returned

    def undo() -> None:
        profiler.__dict__.pop("profile", None)

    return undo


def gather_metrics_over(group: dist.ProcessGroup, module: torch.nn.Module) -> None:
    """Make metrics count each data-parallel rank once."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = _GatherOver(group)
