"""Where a run that ends in the middle of an epoch would have gone on: what its checkpoints must say from then on.

Lightning ends the epoch with the run (2.6): who saves behind ``max_steps``, ``max_time`` or ``should_stop``, be it in
``on_train_epoch_end`` or after ``fit``, gets loop counters of an epoch that is over, and a random state that the last
validation may have changed. So the position is noted when a run ends behind a batch that is not its epoch's last, and
saved instead. What user code does because the run ends, such as in ``on_train_epoch_end``, stays done.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_shardckpt.state.position import ResumableLoader
from lightning_shardckpt.state.rng import get_rng_state


@dataclass(frozen=True, slots=True)
class Position:
    """Where training is: what Lightning counts (None: ask it), this rank's random state and place in its loaders.

    And the metrics for which schedulers wait that Lightning steps behind the hooks of an epoch's end; of those
    schedulers, the metrics that are means over the batches of the present epoch.
    """

    fit_loop: Mapping[str, Any] | None
    rng: dict[str, Any]
    loaders: list[dict[str, Any] | None]
    monitored: dict[str, Any]
    partial: list[str]


def present(trainer: pl.Trainer, fit_loop: Mapping[str, Any] | None = None) -> Position:
    """Where training is now."""
    loaders = [loader.position() if isinstance(loader, ResumableLoader) else None for loader in train_loaders(trainer)]
    monitored = {} if fit_loop else _monitored(trainer)
    return Position(fit_loop, get_rng_state(), loaders, monitored, _partial(trainer))


def plateau_monitors(trainer: pl.Trainer) -> list[str]:
    """Of the schedulers that step by a metric when an epoch is over, the metrics."""
    if not trainer.lightning_module.automatic_optimization:
        return []
    plateaus = [c for c in trainer.lr_scheduler_configs if c.reduce_on_plateau and c.interval == "epoch"]
    return [config.monitor for config in plateaus if config.monitor is not None]


def _partial(trainer: pl.Trainer) -> list[str]:
    means = [metric.meta for metric in trainer.fit_loop.epoch_loop._results.values() if metric.meta.on_epoch]
    names = {name for meta in means for name in (meta.name, f"{meta.name}_epoch")}
    return [name for name in plateau_monitors(trainer) if name in names]


def _monitored(trainer: pl.Trainer) -> dict[str, Any]:
    """Their values, if they are about to be used: in the hooks of an epoch's end, or of its last validation."""
    fit, monitors = trainer.fit_loop, plateau_monitors(trainer)
    current = fit.epoch_progress.current
    if not monitors or not fit.epoch_loop._num_ready_batches_reached():
        return {}
    if trainer.validating:  # what training logged is of the epoch before
        known = trainer._logger_connector.metrics["callback"]
    elif current.processed == current.started > current.completed:  # type: ignore[attr-defined]  # its subclass
        known = trainer.callback_metrics
    else:
        return {}
    return {name: known[name] for name in monitors if name in known}


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """Those that training draws from; none before Lightning has asked for them."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


class Stopping:
    """Notes where the run ended, from the batch behind which it ends until training begins again."""

    def __init__(self) -> None:
        self._noted: Position | None = None
        self._watched: Any = None

    def position(self, trainer: pl.Trainer) -> Position:
        """Where a run that resumes must go on."""
        return self._noted or present(trainer)

    def forget(self) -> None:
        """Call when training goes on or begins."""
        self._noted = None

    def watch(self, trainer: pl.Trainer) -> None:
        """Call when training starts; undone by ``unwatch``. Lightning has no hook behind a batch's last callback."""
        self.unwatch()
        self.forget()
        self._watched = loop = trainer.fit_loop.epoch_loop
        original = loop.on_advance_end

        def on_advance_end(fetcher: Any) -> None:
            if _ends(trainer) and not _validates(trainer, fetcher):
                self._noted = present(trainer, _as_in_batch_end(trainer.fit_loop.state_dict()))
            try:
                original(fetcher)
            except SIGTERMException:
                if not trainer.validating:  # else it ended in the middle of the validation
                    self._note_behind(trainer)
                raise
            self._note_behind(trainer)

        loop.on_advance_end = on_advance_end  # type: ignore[method-assign,assignment]  # of one loop

    def unwatch(self) -> None:
        """Leave Lightning's loop as it was."""
        if self._watched is not None:
            vars(self._watched).pop("on_advance_end", None)
            self._watched = None

    def _note_behind(self, trainer: pl.Trainer) -> None:
        """For a batch that a validation follows, whether the run ends or not: the validation is done, too."""
        if self._noted is None and _ends(trainer):
            state, loop = trainer.fit_loop.state_dict(), trainer.fit_loop.epoch_loop
            if not loop._should_accumulate():  # a run that resumes counts it when it skips the validation
                state["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1
            self._noted = present(trainer, state)


def _ends(trainer: pl.Trainer) -> bool:
    """Whether the run ends behind the present batch, although the epoch has more of them."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if loop._num_ready_batches_reached():
        return False
    out_of_steps = loop.max_steps != -1 and loop.global_step >= loop.max_steps
    return out_of_steps or trainer.received_sigterm or (trainer.should_stop and fit._can_stop_early)


def _validates(trainer: pl.Trainer, fetcher: Any) -> bool:
    """Whether a validation would follow the present batch if the run did not end."""
    stops, trainer.should_stop = trainer.should_stop, False
    try:
        return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))
    finally:
        trainer.should_stop = stops


def _as_in_batch_end(state: dict[str, Any]) -> dict[str, Any]:
    """Loop state as ``on_train_batch_end`` has it: Lightning resumes with the next batch from there."""
    for progress in (state["epoch_loop.batch_progress"][key] for key in ("current", "total")):
        progress["completed"] -= 1
    return state
