"""Remember on a LightningModule how it was sharded: a second Trainer must find what the first one did."""

from __future__ import annotations

import lightning.pytorch as pl

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.mesh import Topology

_RECORD = "_shardckpt_record"


def remember(module: pl.LightningModule, record: ShardedModule) -> None:
    """Keep the record with the module; not as a submodule of it."""
    object.__setattr__(module, _RECORD, record)


def recall(module: pl.LightningModule, topology: Topology) -> ShardedModule | None:
    """Return how the module was sharded, by this strategy or another Trainer's; None if it was not, or is built anew.

    Raises:
        TopologyError: if it was sharded for other sizes.
    """
    record: ShardedModule | None = getattr(module, _RECORD, None)
    if record is None or not record.holds(module):
        return None
    if record.meshes.topology != topology:
        raise TopologyError(
            f"this LightningModule is already sharded as {record.meshes.topology}, the strategy asks for "
            f"{topology}. Use the same sizes, or a new module."
        )
    return record
