"""Parameters that are sharded over ranks, and behave like whole tensors in user code.

The input is a module with plain parameters, or with DTensors of a tensor-parallel plan. Nothing here knows checkpoints,
schedules or Lightning.
"""

from lightning_shardckpt.parallel.tensors import operations as operations  # registers its functions
