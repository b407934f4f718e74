"""State of a LightningModule across Trainers: its shards, and what Lightning's callbacks changed.

The sharded module is attached to the LightningModule, so that a second Trainer finds it. Changes by Lightning's own
callbacks are restored when a run resumes: BaseFinetuning would create new param groups, and unfreezes layers only at
the start of their epoch; Lightning skips ``on_train_epoch_start`` of a resumed epoch, in which
GradientAccumulationScheduler works.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, StochasticWeightAveraging
from torch import nn

from lightning_shardckpt.compat.lightning_trainer import keep_loaded_groups
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import clean_fqn
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
    parameters = dict.fromkeys(sharded.canonical_names.values()) if sharded.pipeline is not None else ()
    return WholeNames(sharded.state_names, sharded.state_ties, tuple(parameters))


# ── Lightning's callbacks ─────────────────────────────────────────────────────────────────────────────────────────────


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def restore_param_groups(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Add the param groups of layers that BaseFinetuning had unfrozen, before the optimizers are loaded.

    Args:
        trainer: with the optimizers.
        state: Lightning's checkpoint dict.
    """
    for callback in _list_finetuning(trainer):
        saved = state.get("callbacks", {}).get(callback.state_key)
        if saved is not None:
            callback.load_state_dict(saved)
            callback.on_fit_start(trainer, trainer.lightning_module)


def keep_param_groups(trainer: pl.Trainer) -> None:
    """Keep the loaded hyper-parameters of param groups, which BaseFinetuning would reset."""
    for callback in _list_finetuning(trainer):
        keep_loaded_groups(callback)


def list_trainable(trainer: pl.Trainer) -> list[str]:
    """Return the clean FQNs of parameters that are not frozen, if there is a BaseFinetuning callback; else nothing."""
    named = trainer.lightning_module.named_parameters(remove_duplicate=False) if _list_finetuning(trainer) else ()
    return sorted(clean_fqn(name) for name, parameter in named if parameter.requires_grad)


def unfreeze(trainer: pl.Trainer, names: Collection[str]) -> None:
    """Unfreeze parameters by their clean FQNs, as BaseFinetuning does; does nothing without that callback."""
    if not _list_finetuning(trainer):
        return
    for prefix, module in trainer.lightning_module.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad and clean_fqn(name) in names:
                parameter.requires_grad = True
                if isinstance(module, _BATCH_NORMS):
                    module.track_running_stats = True


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


def _list_finetuning(trainer: pl.Trainer) -> list[BaseFinetuning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]
