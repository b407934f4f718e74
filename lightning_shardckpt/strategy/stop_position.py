"""Note where a run that ends in the middle of an epoch would have gone on, for the checkpoints it saves from then on.

Lightning ends the epoch with the run (2.6): who saves after ``max_steps``, ``max_time`` or ``should_stop``, be it in
``on_train_epoch_end`` or after ``fit``, gets loop counters of an epoch that is over, and a random state that the last
validation may have changed. So the position is noted when a run ends after a batch that is not its epoch's last, and
saved instead. What user code does because the run ends, such as in ``on_train_epoch_end``, stays done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shardckpt.compat.lightning_loops import (
    EndBatch,
    ends_within_epoch,
    is_accumulating,
    is_batch_begun,
    is_last_batch,
    logged_in_training,
    take_back_step,
    train_loaders,
    would_validate,
    wrap_batch_end,
)
from lightning_shardckpt.compat.lightning_trainer import validated_metrics
from lightning_shardckpt.state.data_position import ResumableLoader, batches_done
from lightning_shardckpt.state.stateful_loader import StatefulLoader, finish, position_of, random_state_before_failure
from lightning_shardckpt.strategy.lightning_callbacks import trained_names
from lightning_shardckpt.system.random_generators import get_rng_state


@dataclass(frozen=True, slots=True)
class Position:
    """A place in training: what Lightning counts (None: ask it), this rank's random state and place in its loaders.

    And the metrics for which schedulers wait that Lightning steps after the hooks of an epoch's end; of those
    schedulers, the metrics that are means over the batches of the present epoch. And the parameters that are trained,
    where a callback changes which.
    """

    fit_loop: Mapping[str, Any] | None
    rng: dict[str, Any]
    loaders: list[dict[str, Any] | None]
    monitored: dict[str, Any]
    partial: list[str]
    trained: list[str]


def present(trainer: pl.Trainer, fit_loop: dict[str, Any] | None = None) -> Position:
    """Return the place where training is now."""
    state, rng = fit_loop or trainer.fit_loop.state_dict(), get_rng_state()
    used = _used(state)
    loaders = [_position(loader, used) for loader in train_loaders(trainer)]
    for loader in train_loaders(trainer):
        rng |= random_state_before_failure(loader) if isinstance(loader, StatefulLoader) else {}
    monitored = {} if fit_loop else _monitored(trainer)
    if fit_loop is None and is_batch_begun(state) and not is_accumulating(trainer):
        take_back_step(state)  # Lightning counts it once more when a run resumes
        fit_loop = state
    return Position(fit_loop, rng, loaders, monitored, _partial(trainer), trained_names(trainer))


def _position(loader: object, used: int | None) -> dict[str, Any] | None:
    if isinstance(loader, StatefulLoader):
        return position_of(loader, used)
    return loader.position() if isinstance(loader, ResumableLoader) else None


def _used(fit_loop: Mapping[str, Any]) -> int | None:
    """Return how many batches of the present epoch are used; None where it is over."""
    return batches_done({"fit_loop": fit_loop}) if fit_loop["epoch_progress"]["current"]["started"] else 0


def plateau_monitors(trainer: pl.Trainer) -> list[str]:
    """Return the metrics of the schedulers that step by a metric when an epoch is over."""
    if not trainer.lightning_module.automatic_optimization:
        return []
    plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "epoch"]
    return [config.monitor for config in plateaus if config.monitor is not None]


def _partial(trainer: pl.Trainer) -> list[str]:
    means = [meta for meta in logged_in_training(trainer) if meta.on_epoch]
    names = {name for meta in means for name in (meta.name, f"{meta.name}_epoch")}
    return [name for name in plateau_monitors(trainer) if name in names]


def _monitored(trainer: pl.Trainer) -> dict[str, Any]:
    """Return metrics' values that are about to be used: in the hooks of an epoch's end, or of its last validation."""
    current, monitors = trainer.fit_loop.epoch_progress.current, plateau_monitors(trainer)
    if not monitors or not is_last_batch(trainer):
        return {}
    if trainer.validating:  # what training logged is of the epoch before
        known = validated_metrics(trainer)
    elif current.processed == current.started > current.completed:  # type: ignore[attr-defined]  # its subclass
        known = trainer.callback_metrics
    else:
        return {}
    return {name: known[name] for name in monitors if name in known}


class Stopping:
    """Notes where the run ended, from the batch after which it ends until training begins again."""

    def __init__(self) -> None:
        self._noted: Position | None = None
        self._undo: Callable[[], None] | None = None

    def position(self, trainer: pl.Trainer) -> Position:
        """Return the place where a run that resumes must go on."""
        return self._noted or present(trainer)

    def forget(self) -> None:
        """Call when training goes on or begins."""
        self._noted = None

    def watch(self, trainer: pl.Trainer) -> None:
        """Call when training starts; undone by ``unwatch``."""
        self.unwatch()
        self.forget()

        def end_batch(fetcher: Any, original: EndBatch) -> None:
            if ends_within_epoch(trainer) and not would_validate(trainer, fetcher):
                self._noted = present(trainer, _as_in_batch_end(trainer.fit_loop.state_dict()))
            try:
                original()
            except SIGTERMException:
                if not trainer.validating:  # else it ended in the middle of the validation
                    self._note_after(trainer)
                raise
            self._note_after(trainer)

        self._undo = wrap_batch_end(trainer, end_batch)

    def end(self, trainer: pl.Trainer) -> None:
        """Call when a run ends, before its loaders are taken down; it leaves Lightning's loop as it was."""
        for loader in train_loaders(trainer):
            if isinstance(loader, StatefulLoader):
                finish(loader, _used(trainer.fit_loop.state_dict()))
        self.unwatch()

    def unwatch(self) -> None:
        """Leave Lightning's loop as it was."""
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _note_after(self, trainer: pl.Trainer) -> None:
        """Note the position after the validation that follows a batch, whether the run ends or not."""
        if self._noted is None and ends_within_epoch(trainer):
            state = trainer.fit_loop.state_dict()
            if not is_accumulating(trainer):  # a run that resumes counts it when it skips the validation
                take_back_step(state)
            self._noted = present(trainer, state)


def _as_in_batch_end(state: dict[str, Any]) -> dict[str, Any]:
    """Return loop state as ``on_train_batch_end`` has it: Lightning resumes with the next batch from there."""
    for progress in (state["epoch_loop.batch_progress"][key] for key in ("current", "total")):
        progress["completed"] -= 1
    return state
