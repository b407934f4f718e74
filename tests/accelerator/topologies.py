"""Arguments of strategies that tests on devices share."""

from __future__ import annotations

from tests.support.tiny import TP_PLAN

TENSOR_PARALLEL = {"tensor_parallel_size": 2, "tensor_parallel_plan": TP_PLAN}
REPLICAS = {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 1}
HSDP = {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 2}
ROUNDING = 1e-5  # other kernels for the same layers
