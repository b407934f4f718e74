"""Arguments of strategies that tests on devices share."""

from __future__ import annotations

from typing import Any

from lightning_shardckpt import Pipeline
from tests.support.tiny import TP_PLAN

TENSOR_PARALLEL = {"tensor_parallel_size": 2, "tensor_parallel_plan": TP_PLAN}
REPLICAS = {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 1}
HSDP = {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2}
ROUNDING = 1e-5  # other kernels for the same layers


def by(schedule: str, ranks: int = 2, stages_per_rank: int = 1, **options: Any) -> dict[str, Any]:
    """Arguments of a strategy."""
    return {
        "pipeline_parallel_size": ranks,
        "pipeline": Pipeline(
            schedule=schedule,
            stages_per_rank=stages_per_rank,
            microbatches=4,
            loss="batch" if schedule == "gpipe" else "microbatch",
        ),
        **options,
    }
