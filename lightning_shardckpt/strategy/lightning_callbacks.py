"""Put back what Lightning's own callbacks had changed and don't change again where a run resumes.

BaseFinetuning would make param groups anew, and thaws layers only when their epoch begins; Lightning leaves out
``on_train_epoch_start`` of an epoch that goes on, in which GradientAccumulationScheduler does its work.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch import nn

from lightning_shardckpt.compat.lightning_trainer import keep_loaded_groups
from lightning_shardckpt.format.clean_fqn import clean_fqn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def regroup(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Give the optimizers the param groups that BaseFinetuning had made of layers that it had thawed.

    Args:
        trainer: whose optimizers are going to be loaded.
        state: Lightning's checkpoint dict.
    """
    for callback in _list_finetuning(trainer):
        saved = state.get("callbacks", {}).get(callback.state_key)
        if saved is not None:
            callback.load_state_dict(saved)
            callback.on_fit_start(trainer, trainer.lightning_module)


def keep_groups(trainer: pl.Trainer) -> None:
    """Keep loaded hyper-parameters after callbacks have their state: BaseFinetuning would undo them."""
    for callback in _list_finetuning(trainer):
        keep_loaded_groups(callback)


def trained_names(trainer: pl.Trainer) -> list[str]:
    """Return the canonical FQNs of parameters that are not frozen, where BaseFinetuning changes that; else nothing."""
    named = trainer.lightning_module.named_parameters(remove_duplicate=False) if _list_finetuning(trainer) else ()
    return sorted(clean_fqn(name) for name, parameter in named if parameter.requires_grad)


def thaw(trainer: pl.Trainer, names: Collection[str]) -> None:
    """Thaw the parameters with these canonical FQNs, as BaseFinetuning does; nothing without that callback."""
    if not _list_finetuning(trainer):
        return
    for prefix, module in trainer.lightning_module.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if not parameter.requires_grad and clean_fqn(name) in names:
                parameter.requires_grad = True
                if isinstance(module, _BATCH_NORMS):
                    module.track_running_stats = True


def schedule_accumulation(trainer: pl.Trainer) -> None:
    """Accumulate as GradientAccumulationScheduler says for the epoch that goes on."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set later
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def _list_finetuning(trainer: pl.Trainer) -> list[BaseFinetuning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]
