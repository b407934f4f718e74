"""State of a LightningModule across Trainers.

The sharded module is attached to the LightningModule, so that a second Trainer finds it.
"""

from __future__ import annotations

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.mesh import Topology
from lightning_shardckpt.state.model import WholeNames

_SHARDED = "_shardckpt_sharded"


def attach_sharded(module: pl.LightningModule, sharded: ShardedModule) -> None:
    """Set an attribute of the module that is no submodule."""
    object.__setattr__(module, _SHARDED, sharded)


def find_sharded(module: pl.LightningModule, topology: Topology) -> ShardedModule | None:
    """Return the sharded module that this or another Trainer has attached; None without one, or if it is outdated.

    Raises:
        TopologyError: if the module was sharded for another topology.
    """
    sharded: ShardedModule | None = getattr(module, _SHARDED, None)
    if sharded is None or not sharded.holds(module):
        return None
    if sharded.meshes.topology != topology:
        raise TopologyError(
            f"this LightningModule is already sharded as {sharded.meshes.topology}, the strategy asks for "
            f"{topology}. Use the same sizes, or a new module."
        )
    return sharded


def whole_names(sharded: ShardedModule) -> WholeNames:
    """Return the names of the whole model, also on a pipeline stage that has only a part."""
    parameters = sharded.parameter_names if sharded.pipeline is not None else ()
    return WholeNames(sharded.state_names, sharded.state_ties, parameters)


def resume_epoch_callbacks(trainer: pl.Trainer) -> None:
    """Prepare callbacks for an epoch that is resumed in its middle, without Lightning's ``on_train_epoch_start``.

    GradientAccumulationScheduler sets ``accumulate_grad_batches``. StochasticWeightAveraging creates its scheduler and
    loads its state; it averages once per epoch, and remembers that.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set later
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        elif isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch <= callback.swa_end:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
