"""The counterparts of the options of Lightning's own sharded strategies, for whoever moves here from them."""

from __future__ import annotations

import inspect
from typing import Any, Self

from lightning_shardckpt.checkpoint_io import PickleByArguments

_PLACED = "the Trainer or Fabric takes it: "
_ALWAYS = "leave it out: "

COUNTERPARTS = {
    # FSDPStrategy
    "auto_wrap_policy": 'use fsdp=FSDP(units=["Block"]), names or patterns of the modules that are gathered one by one',
    "sharding_strategy": (
        "use fsdp=FSDP(reshard_after_forward=True) for FULL_SHARD, False for SHARD_GRAD_OP, "
        "data_parallel_replicate_size=2 for HYBRID_SHARD, data_parallel_shard_size=1 for NO_SHARD"
    ),
    "activation_checkpointing_policy": 'use fsdp=FSDP(activation_checkpointing=["Block"]), names or patterns',
    "mixed_precision": _PLACED + 'precision="bf16-mixed"; FSDP(reduce_dtype="float32") sums gradients in float32',
    "activation_checkpointing": 'use fsdp=FSDP(activation_checkpointing=["Block"]), names or patterns of modules',
    "cpu_offload": "use fsdp=FSDP(cpu_offload=True)",
    "ignored_modules": 'use fsdp=FSDP(ignored=["head"]), names or patterns of modules that stay whole',
    "precision_plugin": _PLACED + 'precision="bf16-mixed", or plugins=[…]',
    "checkpoint_io": _PLACED + "plugins=[ShardCkptIO(…)]",
    "cluster_environment": _PLACED + "plugins=[…]",
    "accelerator": _PLACED + 'accelerator="…"',
    "parallel_devices": _PLACED + "devices=8",
    "state_dict_type": _ALWAYS + "every save is sharded",
    "save_distributed_checkpoint": _ALWAYS + "every save is sharded",
    "use_orig_params": _ALWAYS + "parameters keep their names, shapes and classes",
    "sync_module_states": _ALWAYS + "initial weights are the same on all ranks",
    "device_mesh": "use data_parallel_shard_size=4 and data_parallel_replicate_size=2, the sizes of its axes",
    "timeout": "use timeout_s=1800, in seconds",
    "process_group_backend": _ALWAYS + "it is gloo on the CPU and nccl on GPUs, unless the script has made a group",
    # ModelParallelStrategy
    "data_parallel_size": "use data_parallel_shard_size=4, or data_parallel_replicate_size=4 for whole replicas",
    # DeepSpeedStrategy
    "stage": (
        "use fsdp=FSDP(reshard_after_forward=True) for stage 3, False for stage 2, data_parallel_shard_size=1 for "
        "stage 0"
    ),
    "offload_optimizer": "use fsdp=FSDP(cpu_offload=True), for parameters, gradients and optimizer state together",
    "offload_parameters": "use fsdp=FSDP(cpu_offload=True), for parameters, gradients and optimizer state together",
    # DDPStrategy
    "find_unused_parameters": _ALWAYS + "parameters that a step does not use are found in every step",
    "static_graph": _ALWAYS + "steps may use different parameters",
}
"""A sentence for each option of another strategy."""


class NamesCounterparts(PickleByArguments):
    """Base of strategies whose error for an option of Lightning's strategies names its counterpart."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Record the arguments.

        Raises:
            TypeError: for an option of another strategy, naming the counterpart of each.
        """
        own = inspect.signature(cls.__init__).parameters  # a subclass may have an option of such a name
        if known := [name for name in kwargs if name in COUNTERPARTS and name not in own]:
            listed = "".join(f"\n  {name}: {COUNTERPARTS[name]}" for name in known)
            raise TypeError(f"ShardedStrategy does not have these options of other strategies:{listed}")
        return super().__new__(cls, *args, **kwargs)
