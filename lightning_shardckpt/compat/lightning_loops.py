"""Private names of Lightning's fit loop: loaders, progress, validation, and restarts.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len

from lightning_shardckpt.compat.torch_modules import replace_attributes
from lightning_shardckpt.system.random_generators import preserve_rng

EndBatch = Callable[[], None]


def train_loaders(trainer: pl.Trainer) -> list[Any]:
    """Return the loaders of training, by ``_FitLoop._combined_loader``; none before Lightning has set them up."""
    loader = trainer.fit_loop._combined_loader
    return [] if loader is None else list(loader.flattened)


def cycles_loaders(trainer: pl.Trainer) -> bool:
    """Return whether a shorter loader begins again at its end, by the ``_mode`` "max_size_cycle" of CombinedLoader."""
    loader = trainer.fit_loop._combined_loader
    return loader is not None and "cycle" in loader._mode


def begin_loaders(trainer: pl.Trainer) -> None:
    """Begin iterating over the loaders of training anew, by the ``iter`` of ``_FitLoop._data_fetcher``."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def batches_drawn(trainer: pl.Trainer) -> tuple[int, int]:
    """Return the number of the current epoch, from 1, and of its drawn batches, including those before a resume.

    Relies on ``_DataFetcher.fetched``, to which a resumed epoch adds the earlier batches when it begins, and on
    ``_Progress.current.started``, which counts the epoch after its hooks.
    """
    loop, fetcher = trainer.fit_loop, trainer.fit_loop._data_fetcher
    fetched, before = 0 if fetcher is None else fetcher.fetched, loop.epoch_loop.batch_progress.current.ready
    epoch = max(loop.epoch_progress.current.started, 1)  # type: ignore[attr-defined]  # its subclass
    return epoch, fetched if fetched >= before else fetched + before


def batches_of_evaluation(trainer: pl.Trainer) -> list[float]:
    """Return the number of batches of each loader of the current validation, test or predict; infinity if unknown."""
    return list(_evaluation_loop(trainer).max_batches)


def is_stream_at_end(trainer: pl.Trainer) -> bool | None:
    """Return whether the current batch of an evaluation is its last one, or there is none; None if lengths are known.

    Relies on ``_combined_loader``, and on ``_data_fetcher``, which draws one batch ahead where a loader has no length.
    """
    loop = _evaluation_loop(trainer)
    if all(sized_len(loader) is not None for loader in loop._combined_loader.flattened):
        return None
    return bool(loop._data_fetcher.done)


def _evaluation_loop(trainer: pl.Trainer) -> Any:
    return trainer.predict_loop if trainer.predicting else trainer._evaluation_loop


def is_last_batch(trainer: pl.Trainer) -> bool:
    """Return whether the current batch is the last of its epoch."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    return progress.current.ready == trainer.num_training_batches or progress.is_last_batch


def batches_begun(trainer: pl.Trainer) -> tuple[int, int]:
    """Return the current epoch, from 0, and the number of its batches that have begun."""
    return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready


def ends_within_epoch(trainer: pl.Trainer) -> bool:
    """Return whether the run ends after the current batch, before the end of the epoch."""
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    if is_last_batch(trainer):
        return False
    out_of_steps = loop.max_steps != -1 and loop.global_step >= loop.max_steps
    epochs: int = fit.epoch_progress.current.processed  # type: ignore[attr-defined]  # its subclass
    may_stop = epochs >= (fit.min_epochs or 0) and loop.global_step >= (fit.min_steps or 0)
    return out_of_steps or trainer.received_sigterm or (trainer.should_stop and may_stop)


def would_validate(trainer: pl.Trainer, fetcher: Any) -> bool:
    """Return whether a validation would follow the current batch if the run did not end, in ``on_advance_end``.

    Relies on ``_TrainingEpochLoop._should_check_val_fx``, which is True in every run that stops.
    """
    stops, trainer.should_stop = trainer.should_stop, False
    try:
        return bool(trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher))
    finally:
        trainer.should_stop = stops


def is_accumulating(trainer: pl.Trainer) -> bool:
    """Return whether optimizers do not step for the current batch."""
    ready = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return ready % trainer.accumulate_grad_batches != 0 and not is_last_batch(trainer)


def take_back_step(fit_loop: dict[str, Any]) -> None:
    """Take back the optimizers' step of the last batch in the state of a fit loop: ``_batches_that_stepped``."""
    fit_loop["epoch_loop.state_dict"]["_batches_that_stepped"] -= 1


def wrap_batch_end(trainer: pl.Trainer, around: Callable[[Any, EndBatch], None]) -> Callable[[], None]:
    """Wrap the end of a batch after its last callback, where the loop validates, logs and counts; return the undo.

    ``around`` is called with the data fetcher and a function that calls the original. Lightning has no hook there.
    Relies on ``_TrainingEpochLoop.on_advance_end``, which is called with the fetcher.
    """
    loop = trainer.fit_loop.epoch_loop
    original = loop.on_advance_end
    return replace_attributes(loop, on_advance_end=lambda fetcher: around(fetcher, lambda: original(fetcher)))


def watch_epoch_ends(
    trainer: pl.Trainer, check: Callable[[], None], any_rank: Callable[[bool], bool]
) -> Callable[[], None]:
    """Call ``check`` when an epoch of training ends, before its last validation, and after it; return the undo.

    If ``val_check_interval`` is a time, which ranks measure, ``any_rank`` tells if it is over. Relies on
    ``_FitLoop.on_advance_end``, and as `wrap_batch_end` and `would_validate`.
    """
    loop, epoch_loop, undo = trainer.fit_loop, trainer.fit_loop.epoch_loop, ExitStack()
    original, validates = loop.on_advance_end, epoch_loop._should_check_val_fx
    if trainer.val_check_batch is None and trainer.enable_validation:
        undo.callback(replace_attributes(epoch_loop, _should_check_val_fx=lambda fetcher: any_rank(validates(fetcher))))

    def end_batch(_: Any, end: EndBatch) -> None:
        if is_last_batch(trainer) or ends_within_epoch(trainer):
            check()
        end()

    def on_advance_end() -> None:
        check()
        original()

    undo.callback(wrap_batch_end(trainer, end_batch))
    undo.callback(replace_attributes(loop, on_advance_end=on_advance_end))
    return undo.close


def skip_sigterm_broadcast(trainer: pl.Trainer) -> Callable[[], None]:
    """Skip the broadcast before every batch of whether rank 0 got a SIGTERM; return the undo.

    Relies on ``_TrainingEpochLoop._broadcast_sigterm_tensor``.
    """
    return replace_attributes(trainer.fit_loop.epoch_loop, _broadcast_sigterm_tensor=lambda: None)


def is_validation_interrupted(fit_loop: Mapping[str, Any]) -> bool:
    """Return whether an exception ended a validation, from the state of a fit loop.

    As in ``_EvaluationLoop.update_restart_stage``.
    """
    total = fit_loop["epoch_loop.val_loop.batch_progress"]["total"]
    begun = total["started"] == total["ready"] == total["processed"] + 1
    return bool(begun and total["completed"] == total["processed"])


def continue_validation(trainer: pl.Trainer) -> Callable[[], None]:
    """Make a resumed run begin with the rest of an interrupted validation, anywhere in its epoch; return the undo.

    A validation that the checkpoint has done is skipped without drawing random numbers, although Lightning begins its
    loaders. Relies on ``_TrainingEpochLoop._should_check_val_fx`` and, of ``_EvaluationLoop``, on
    ``restarted_mid_evaluation`` and ``increment_progress_to_evaluation_end``.
    """
    loop, validation, undo = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, ExitStack()
    is_due, skip = loop._should_check_val_fx, validation.increment_progress_to_evaluation_end
    due = replace_attributes(loop, _should_check_val_fx=lambda f: validation.restarted_mid_evaluation or is_due(f))
    undo.callback(due)
    silent = preserve_rng(every_device=True)(skip)
    undo.callback(replace_attributes(validation, increment_progress_to_evaluation_end=silent))
    return undo.close


def begin_next_epoch(trainer: pl.Trainer, epochs: int, *, ended: bool) -> None:
    """Make Lightning begin a new epoch with its loaders, as after a finished epoch.

    With ``max_steps``, it would resume the finished epoch for one more batch or none. Relies on
    ``_batches_that_stepped``, ``_FitLoop._resuming_from_checkpoint`` and ``_restarting``, beside public counters.

    Args:
        trainer: with loops that have loaded their state.
        epochs: the number of epochs that have begun.
        ended: whether Lightning's state at the save was after the last epoch's end.
    """
    fit, loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
    total = fit.epoch_progress.total
    for progress, done in ((fit.epoch_progress.current, epochs), (total, total.started)):  # type: ignore[attr-defined]
        progress.ready = progress.started = progress.processed = progress.completed = done  # type: ignore[attr-defined]
    if not ended:
        loop._batches_that_stepped += 1  # the last batch of an epoch always steps, and is counted after its hooks
    fit._resuming_from_checkpoint = False  # otherwise, loaders are not begun for the epoch
    loop.restarting = fit._restarting = False  # the setter of ``restarting`` sets True with a max_steps
    for each in (fit, loop, loop.val_loop):
        each.reset_restart_stage()
