"""Parameters that are sharded over ranks, and act as whole ones to the code that uses them.

In come modules with plain parameters, or DTensors of a tensor-parallel plan. Nothing here knows checkpoints, pipelines
or Lightning.
"""

from lightning_shardckpt.parallel.tensors import operations as operations  # a sharded tensor finds its functions there
