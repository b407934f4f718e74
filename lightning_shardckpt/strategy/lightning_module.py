"""Build a LightningModule in ``configure_model``, alike on all ranks, and remember on it how it was sharded.

A second Trainer must find what the first one did. Changes by Lightning's own callbacks are restored where a run
resumes: BaseFinetuning would make param groups anew, and thaws layers only when their epoch begins; Lightning leaves
out ``on_train_epoch_start`` of an epoch that goes on, in which GradientAccumulationScheduler does its work.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler
from torch import nn

from lightning_shardckpt.compat.lightning_trainer import keep_loaded_groups
from lightning_shardckpt.errors import StateError, TopologyError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.deferred_init.deferred import DeferredInit
from lightning_shardckpt.parallel.deferred_init.materialize import broadcast_weights
from lightning_shardckpt.parallel.shard_model import ShardedModule
from lightning_shardckpt.parallel.sharding.mesh import Topology
from lightning_shardckpt.parallel.sharding.random_streams import share_rng
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.system.tuning import Tuning

_SHARDED, _HALF_FILLED = "_shardckpt_sharded", "_shardckpt_half_filled"


def remember(module: pl.LightningModule, sharded: ShardedModule) -> None:
    """Keep with the module how it was sharded; not as a submodule of it."""
    object.__setattr__(module, _SHARDED, sharded)


def recall(module: pl.LightningModule, topology: Topology) -> ShardedModule | None:
    """Return how the module was sharded, by this strategy or another Trainer's; None if it was not, or is built anew.

    Raises:
        TopologyError: if it was sharded for other sizes.
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
    """Return the names of the whole model, also on a pipeline stage that has a part of it."""
    parameters = dict.fromkeys(sharded.canonical_names.values()) if sharded.pipeline is not None else ()
    return WholeNames(sharded.state_names, sharded.state_ties, tuple(parameters))


@contextmanager
def filling(module: pl.LightningModule, path: str) -> Iterator[None]:
    """Mark a module as half filled, from the checkpoint at ``path``; for longer than the context if it ends early."""
    object.__setattr__(module, _HALF_FILLED, path)
    yield
    object.__delattr__(module, _HALF_FILLED)


def is_half_filled(module: pl.LightningModule) -> bool:
    """Return whether a load has changed some tensors and then failed, and no other load succeeded since."""
    return hasattr(module, _HALF_FILLED)


def check_filled(module: pl.LightningModule) -> None:
    """Check that the module's tensors are of one state.

    Raises:
        StateError: if the module `is_half_filled`.
    """
    if is_half_filled(module):
        path = getattr(module, _HALF_FILLED)
        raise StateError(
            f"loading {path!r} failed when some tensors of {type(module).__name__} were filled already: they are a mix "
            "now, which is neither trained nor saved. Load another checkpoint by ckpt_path, or make a new module."
        )


class ModuleBuild:
    """The modules that one strategy has Lightning configure, one after the other."""

    def __init__(self) -> None:
        self._deferred: DeferredInit | None = None

    @contextmanager
    def configuring(
        self, module: pl.LightningModule, topology: Topology, device: torch.device, *, deferred: Tuning | None
    ) -> Iterator[None]:
        """Return the context of ``configure_model``, which runs for every stage; only the first one may build.

        Collective: every rank of the world must call it.

        Args:
            module: whose method runs inside.
            topology: for which it is going to be sharded, or was.
            device: where the ranks meet.
            deferred: sizes of deferred init; None builds with memory.

        Raises:
            TopologyError: if the module was sharded for other sizes.
        """
        known = recall(module, topology)
        if known is not None:
            with known.gradients.without_adoption():
                yield
            return
        broadcast_weights(module, device)
        with share_rng():
            if deferred is None:
                yield
                return
            self._deferred = DeferredInit(deferred)
            with self._deferred:
                yield

    def first_values(self) -> DeferredInit | None:
        """Return what knows the first values of the module that was configured last, once."""
        values, self._deferred = self._deferred, None
        return values


# ── Lightning's callbacks ─────────────────────────────────────────────────────────────────────────────────────────────


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
