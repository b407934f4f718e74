"""Say when training begins what the checkpoints of a run cannot hold, not when the first one is saved, hours later.

The state that a save would take is looked at as a save does, but for ``state_dict`` and loops, which are ours and
Lightning's. Where training begins anew, that takes a call of the user's ``on_save_checkpoint`` hooks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.lightning_trainer import upload_note
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError, UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.side_effects import Memory
from lightning_shardckpt.parallel.sharding.fqn import own_parameters
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.system.tensor_digest import bit_digest, numbers


def look_at_saves(trainer: pl.Trainer, ranks: Ranks, *, anew: bool, pickle_objects: bool) -> None:
    """Warn of what will be missing in checkpoints, and refuse what can't be saved, if a callback is going to save.

    Collective: every rank of ``ranks`` must call it, when training starts.

    Args:
        trainer: whose training begins.
        ranks: who saves together.
        anew: whether the run goes on from no checkpoint.
        pickle_objects: as ``ShardCkptIO`` was told.

    Raises:
        StateError: on every rank, naming what cannot be stored on any, and the rank.
    """
    saving = list(_saving(trainer))
    if not saving:
        return
    weights_only = all(getattr(callback, "save_weights_only", False) for callback in saving)

    def look() -> list[str]:
        with isolate_rng():
            checkpoint = dict(_state_of(trainer, weights_only=weights_only))
            if anew:
                _call_hooks(trainer, checkpoint, weights_only=weights_only)
        checkpoint.pop("state_dict", None)
        return list(snapshot(checkpoint, trainer.lightning_module, pickle_objects=pickle_objects).notes)

    notes = ranks.step("looking at what checkpoints of this run would hold", look, lambda found: found[0])
    for note in [*notes, upload_note(trainer)]:
        if note is not None:
            rank_zero_warn(note)


def _saving(trainer: pl.Trainer) -> Iterator[Callback]:
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


def _call_hooks(trainer: pl.Trainer, checkpoint: dict[str, Any], *, weights_only: bool) -> None:
    """Let the user's hooks put into a dict what they would put into a checkpoint; what they change elsewhere is undone.

    A hook may need what only training makes: that it fails here means nothing.

    Raises:
        StateError: if a hook changes what can't be undone.
    """
    given: Any = trainer  # some of its attributes are set later
    module, profile = trainer.lightning_module, given.profiler.profile
    callbacks = [] if weights_only else [callback for callback in given.callbacks if _is_users(callback)]
    if not callbacks and not is_overridden("on_save_checkpoint", module):
        return
    checkpoint |= {"state_dict": trainer.strategy.lightning_module_state_dict(), "loops": {}}
    checkpoint |= {"epoch": trainer.current_epoch, "global_step": trainer.global_step}
    memory, before = Memory([module, *callbacks]), _digests(module)
    for callback in callbacks:
        with profile(f"[Callback]{callback.state_key}.on_save_checkpoint"), suppress(Exception):
            callback.on_save_checkpoint(trainer, module, checkpoint)
    with profile("[LightningModule].on_save_checkpoint"), suppress(Exception):
        module.on_save_checkpoint(checkpoint)
    now = _digests(module)
    changed = [name for name, digest in before.items() if now.get(name) != digest]
    try:
        memory.restore()
    except UnsupportedCodeError as error:  # a large tensor, or one in a container
        changed.append(str(error).partition(",")[0])
    if changed:
        raise StateError(
            f"on_save_checkpoint changes {', '.join(changed[:5])} in place. The hook is called once more when training "
            "begins, to see what checkpoints will hold, and that could not be undone: assign a new tensor there, or "
            "make the change in another hook, such as on_train_batch_end"
        )


def _digests(module: pl.LightningModule) -> dict[str, int]:
    found = {name: bit_digest(local_tensor(parameter)) for name, parameter in own_parameters(module)}
    return dict(zip(found, numbers(found.values()), strict=True))


def _is_users(callback: Callback) -> bool:
    return not type(callback).on_save_checkpoint.__module__.startswith(("lightning.", "lightning_shardckpt."))
