"""Private names of Lightning's fit loop: its loaders, when it stops and validates, and how it restarts.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.loops.loop import _Loop

EndBatch = Callable[[], None]


class LoggedMeta(Protocol):
    """The arguments that ``self.log`` got for a metric."""

    name: str
    on_epoch: bool


# ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders that training draws from; none before Lightning has asked for them.

    Relies on ``_FitLoop._combined_loader``.
    """
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def is_stateful(loader: object) -> bool:
    """Return whether Lightning takes a loader for one with a state of its own."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def cycles_loaders(trainer: pl.Trainer) -> bool:
    """Return whether a shorter loader begins again while a longer one goes on
    (``CombinedLoader(mode="max_size_cycle")``).

    Relies on ``CombinedLoader._mode``.
    """
    loader = trainer.fit_loop._combined_loader
    return loader is not None and "cycle" in loader._mode


def begin_loaders(trainer: pl.Trainer) -> None:
    """Let the loaders of training begin now, if Lightning has set them up.

    Relies on ``_FitLoop._data_fetcher``, whose ``iter`` is what draws first.
    """
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def batches_drawn(trainer: pl.Trainer) -> tuple[int, int]:
    """Return the number of the present epoch, from 1, and how many of its batches were drawn from the loaders.

    Those before the run resumed are counted, too. Relies on ``_DataFetcher.fetched``, to which an epoch that goes on
    adds them when it begins, and on ``_Progress.current.started``, which counts the epoch when its hooks have run.
    """
    loop, fetcher = trainer.fit_loop, trainer.fit_loop._data_fetcher
    fetched, before = 0 if fetcher is None else fetcher.fetched, loop.epoch_loop.batch_progress.current.ready
    epoch = max(loop.epoch_progress.current.started, 1)  # type: ignore[attr-defined]  # its subclass
    return epoch, fetched if fetched >= before else fetched + before


# ── progress ──────────────────────────────────────────────────────────────────────────────────────────────────────


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the present batch is the last one of its epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.ready == trainer.num_training_batches or progress.is_last_batch


def ends_within_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the run ends after the present batch, although the epoch has more of them."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if is_last_batch(trainer):
        return False
    out_of_steps = loop.max_steps != -1 and loop.global_step >= loop.max_steps
    epochs: int = fit.epoch_progress.current.processed  # type: ignore[attr-defined]  # its subclass
    may_stop = epochs >= (fit.min_epochs or 0) and loop.global_step >= (fit.min_steps or 0)
    return out_of_steps or trainer.received_sigterm or (trainer.should_stop and may_stop)


def would_validate(trainer: pl.Trainer, fetcher: Any) -> bool:
    """Return whether a validation would follow the present batch if the run did not end.

    Relies on ``_TrainingEpochLoop._should_check_val_fx``, which says yes for every run that stops.

    Args:
        trainer: in ``on_advance_end`` of a batch.
        fetcher: what the loop draws batches from.
    """
    stops, trainer.should_stop = trainer.should_stop, False
    try:
        return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))
    finally:
        trainer.should_stop = stops


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return whether optimizers do not step for the present batch."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and not is_last_batch(trainer)


def is_batch_begun(fit_loop: Mapping[str, Any]) -> bool:
    """Return whether the state of a fit loop says that its last batch is not done.

    Relies on the key ``epoch_loop.batch_progress``.
    """
    current = fit_loop["epoch_loop.batch_progress"]["current"]
    return bool(current["processed"] < current["ready"])


def take_back_step(fit_loop: dict[str, Any]) -> None:
    """Change the state of a fit loop so that the last batch has made no step of the optimizers yet.

    Relies on the key ``_batches_that_stepped`` of the epoch loop's state.
    """
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def logged_in_training(trainer: pl.Trainer) -> list[LoggedMeta]:
    """Return what training steps of this epoch have logged.

    Relies on ``_TrainingEpochLoop._results``.
    """
    return [metric.meta for metric in trainer.fit_loop.epoch_loop._results.values()]


@dataclass(frozen=True, slots=True)
class LoggedValue:
    """What ``self.log`` has of a metric: the value of this batch, and the parts of its mean or sum over the epoch.

    ``synced``: that the value of the batch is the same on all ranks.
    """

    name: str
    of_batch: Any
    of_epoch: Mapping[str, Any]
    synced: bool


def logged_values(trainer: pl.Trainer) -> list[LoggedValue]:
    """Return what training steps of this epoch have logged, without computing or synchronizing anything.

    Relies on ``_TrainingEpochLoop._results``, whose metrics have ``_forward_cache``, ``value`` and
    ``cumulated_batch_size``.
    """
    found = []
    for metric in trainer.fit_loop.epoch_loop._results.values():
        parts = {"value": metric.value} if metric.is_tensor else {}
        if metric.meta.is_mean_reduction and metric.is_tensor:
            parts["weight"] = metric.cumulated_batch_size
        of_epoch = parts if metric.meta.on_epoch else {}
        found.append(LoggedValue(metric.meta.name, metric._forward_cache, of_epoch, metric.meta.sync.should))
    return found


def wrap_batch_end(trainer: pl.Trainer, around: Callable[[Any, EndBatch], None]) -> Callable[[], None]:
    """Replace what the training loop does after a batch's last callback: validate, log and count. Returns the undo.

    Lightning has no hook there. Relies on ``_TrainingEpochLoop.on_advance_end``, called with the data fetcher.

    Args:
        trainer: whose loop it is.
        around: gets the fetcher and what calls the original.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop.on_advance_end

    def on_advance_end(fetcher: Any) -> None:
        around(fetcher, lambda: original(fetcher))

    loop.on_advance_end = on_advance_end  # type: ignore[method-assign,assignment]  # of one loop

    def undo() -> None:
        loop.__dict__.pop("on_advance_end", None)

    return undo


def skip_sigterm_broadcast(trainer: pl.Trainer) -> Callable[[], None]:
    """Leave out the collective before every batch in which Lightning asks rank 0 whether it heard a SIGTERM.

    For a strategy whose ranks agree on that by themselves. Returns the undo. Relies on
    ``_TrainingEpochLoop._broadcast_sigterm_tensor``.
    """
    loop = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]  # of one loop

    def undo() -> None:
        loop.__dict__.pop("_broadcast_sigterm_tensor", None)

    return undo


# ── restarts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def step_plateaus_now(trainer: pl.Trainer, epoch: int) -> None:
    """Step the schedulers that wait for a metric at the end of an epoch.

    Relies on ``update_lr_schedulers``, which goes by ``epoch_progress.current.completed`` for their frequency.

    Args:
        trainer: whose metrics for callbacks they read.
        epoch: the number of the epoch that is over.
    """
    trainer.fit_loop.epoch_progress.current.completed = epoch
    trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)


def let_plateaus_step(trainer: pl.Trainer) -> None:
    """Let the epoch that a restarted run finishes step the schedulers that wait for a metric, which Lightning omits.

    Relies on ``_LoggerConnector.on_epoch_end``, called after the hooks of the epoch's end, and on
    ``_FitLoop._restarting``, of this loop alone, which it asks after that.
    """
    connector = trainer._logger_connector
    original = connector.on_epoch_end

    def on_epoch_end() -> None:
        if trainer.training:  # not at the end of a validation
            trainer.fit_loop._restarting = False
            connector.__dict__.pop("on_epoch_end", None)
        original()

    connector.on_epoch_end = on_epoch_end  # type: ignore[method-assign]  # of one run, once


def is_validation_interrupted(fit_loop: Mapping[str, Any]) -> bool:
    """Return whether the state of a fit loop says that an exception has ended a validation.

    Relies on the key ``epoch_loop.val_loop.batch_progress``, as ``_EvaluationLoop.update_restart_stage`` does.
    """
    total = fit_loop["epoch_loop.val_loop.batch_progress"]["total"]
    begun = total["started"] == total["ready"] == total["processed"] + 1
    return bool(begun and total["completed"] == total["processed"])


def go_on_with_validation(trainer: pl.Trainer) -> None:
    """Let a restarted run begin with the rest of a validation, wherever in its epoch it is by the present data.

    Relies on ``_TrainingEpochLoop._should_check_val_fx`` and ``_EvaluationLoop.restarted_mid_evaluation``.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop._should_check_val_fx

    def should_check(fetcher: Any) -> bool:
        return loop.val_loop.restarted_mid_evaluation or original(fetcher)

    loop._should_check_val_fx = should_check  # type: ignore[method-assign,assignment]  # of one run


def repeat_last_batch(fit_loop: dict[str, Any]) -> None:
    """Change the state of a fit loop in which the last batch of an epoch is not done: it is not drawn yet.

    Relies on the key ``epoch_loop.batch_progress``.
    """
    fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False


def set_loaders_begun(trainer: pl.Trainer, begun: bool) -> None:
    """Say whether the loaders have begun for the next epoch; else Lightning begins them when it begins the epoch.

    Relies on ``_FitLoop._resuming_from_checkpoint``.
    """
    trainer.fit_loop._resuming_from_checkpoint = begun


def move_in_epoch(trainer: pl.Trainer, batches: int) -> None:
    """Count so many batches more of the present epoch as done, or fewer; totals stay, as does what the epoch has.

    Relies on ``BatchProgress.current``, which says where an epoch goes on, once training starts.
    """
    current = trainer.fit_loop.epoch_loop.batch_progress.current
    current.ready += batches
    current.started += batches  # type: ignore[attr-defined]  # its subclass
    current.processed += batches  # type: ignore[attr-defined]
    current.completed += batches


def begin_next_epoch(trainer: pl.Trainer, epochs: int, *, ended: bool) -> None:
    """Make Lightning begin an epoch as a run does that has just finished one.

    By itself, where there is a ``max_steps``, it takes up the epoch that is over, for one more batch or none. Relies on
    ``_batches_that_stepped`` and the setter of ``_Loop.restarting``, beside public progress counters.

    Args:
        trainer: whose loops have loaded their state.
        epochs: so many were begun.
        ended: whether the last one was over for Lightning, too, when it was saved.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    for progress, before in ((fit.epoch_progress.current, epochs), (fit.epoch_progress.total, None)):
        done = progress.started if before is None else before  # type: ignore[attr-defined]  # its subclass
        progress.ready = progress.started = progress.processed = progress.completed = done  # type: ignore[attr-defined]
    if not ended:
        loop._batches_that_stepped += 1  # the last batch of an epoch always steps, and is counted after its hooks
    _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]  # its own setter says True if there is a max_steps
    for each in (fit, loop, loop.val_loop):
        each.reset_restart_stage()
