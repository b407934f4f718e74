"""Say when training begins what the checkpoints of a run cannot hold, not when the first one is saved, hours later.

The state that a save would take is looked at as a save does, but for ``state_dict`` and loops, which are ours and
Lightning's, and what ``on_save_checkpoint`` hooks add, which run at a save alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.compat.lightning_trainer import upload_note
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.trainer import snapshot


def look_at_saves(trainer: pl.Trainer, ranks: Ranks, *, pickle_objects: bool) -> None:
    """Warn of what will be missing in checkpoints, and refuse what can't be saved, if a callback is going to save.

    Collective: every rank of ``ranks`` must call it, when training starts.

    Args:
        trainer: whose training begins.
        ranks: who saves together.
        pickle_objects: as ``ShardCkptIO`` was told.

    Raises:
        StateError: on every rank, naming what cannot be stored on any, and the rank.
    """
    saving = list(_list_savers(trainer))
    if not saving:
        return
    weights_only = all(getattr(callback, "save_weights_only", False) for callback in saving)

    def look() -> list[str]:
        with isolate_rng():
            checkpoint = dict(_state_of(trainer, weights_only=weights_only))
        return list(snapshot(checkpoint, trainer.lightning_module, pickle_objects=pickle_objects).notes)

    notes = ranks.step("looking at what checkpoints of this run would hold", look, lambda found: found[0])
    for note in [*notes, upload_note(trainer)]:
        if note is not None:
            rank_zero_warn(note)


def _list_savers(trainer: pl.Trainer) -> Iterator[Callback]:
    for callback in () if trainer.fast_dev_run else trainer.checkpoint_callbacks:  # type: ignore[attr-defined]  # set later
        never = isinstance(callback, ModelCheckpoint) and callback.save_top_k == 0 and not callback.save_last
        if isinstance(callback, Checkpoint) and not never:
            yield callback


def _state_of(trainer: pl.Trainer, *, weights_only: bool) -> Iterator[tuple[str, Any]]:
    """Yield what Lightning's ``dump_checkpoint`` takes of what users bring, by its keys."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    for owner in (module, data):
        if owner is not None and owner.hparams:
            hyper = owner.hparams
            yield owner.CHECKPOINT_HYPER_PARAMS_KEY, dict(hyper) if isinstance(hyper, dict) else hyper
    if data is not None and (state := data.state_dict()):
        yield type(data).__qualname__, state
    if weights_only:
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set later
    yield "callbacks", {one.state_key: state for one in callbacks if (state := one.state_dict())}
    yield "lr_schedulers", [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    yield "optimizer_states", [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
