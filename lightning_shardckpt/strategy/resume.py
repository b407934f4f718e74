"""The position of a run in training and in its data: recorded for a checkpoint, and restored when a run resumes.

Lightning 2.6 ends the epoch with the run: a save after ``max_steps``, ``max_time`` or ``should_stop``, in
``on_train_epoch_end`` or after ``fit``, gets the loop counters of a finished epoch, and a random state that the last
validation may have changed. So ``watch_end`` records the position if a run ends after a batch that is not the last
of its epoch, and that is saved instead. Effects of user code at the end of the run, such as in ``on_train_epoch_end``,
are not undone.

Lightning begins loaders when it prepares them, which may be before a checkpoint is loaded. In a run that resumes they
are empty until training starts: then ``resume_training`` restores loops, loaders and random state, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler, StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.compat.data_loading import sampler_of
from lightning_shardckpt.compat.lightning_loops import (
    EndBatch,
    begin_loaders,
    begin_next_epoch,
    continue_validation,
    cycles_loaders,
    ends_within_epoch,
    is_accumulating,
    is_validation_interrupted,
    take_back_step,
    train_loaders,
    would_validate,
    wrap_batch_end,
)
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.state.data_position import batch_size_of, position_of, progress_of, resume_loader
from lightning_shardckpt.system.random_generators import get_rng_state, preserve_rng, reseed_by_rank, set_rng_state

_INEXACT = (
    "the order of the data can't be continued exactly by {loaders}, so samples of this epoch may come twice or not at "
    "all. (The number of data-parallel ranks was {before}, and is {now}.) Resume from the end of an epoch, or with the "
    "data, the kinds of loaders and samplers, and the number of data-parallel ranks of the run that saved; with "
    "Lightning's or torch's DistributedSampler, any number will do. Loaders must not draw from the random generators "
    "of the training process between batches: use workers, or a generator of their own that is seeded in __iter__."
)


@dataclass(frozen=True, slots=True)
class DataShare:
    """The part of the data on which this rank trains, and its pipeline rank.

    ``ranks_each`` ranks have the same data and stage. Stages are the outermost axis of the world's ranks.
    """

    data_rank: int
    data_size: int
    ranks_each: int
    stage: int = 0
    stages: int = 1

    @classmethod
    def of(cls, meshes: Meshes) -> DataShare:
        """Return the share of this rank."""
        sizes = meshes.topology
        return cls(meshes.data_parallel_rank, sizes.data_parallel, sizes.tensor, meshes.pipeline_rank, sizes.pipeline)

    def source_rank(self, stored: Mapping[str, Any]) -> int:
        """Return the rank of the saving run whose data and stage this rank has, given the state of any saving rank."""
        saved = DataShare(**stored["place"])
        stage, data_rank = self.stage % saved.stages, self.data_rank % saved.data_size
        return (stage * saved.data_size + data_rank) * saved.ranks_each


@dataclass(frozen=True, slots=True)
class Position:
    """A position of this rank in training."""

    fit_loop: Mapping[str, Any] | None  # the counters of Lightning's loop; None if Lightning's dict has them
    rng: dict[str, Any]  # states of random number generators
    loaders: list[Mapping[str, Any] | None]  # None for a loader without a position


def record_position(trainer: pl.Trainer, fit_loop: dict[str, Any] | None = None) -> Position:
    """Return the current position in training."""
    state, rng = fit_loop or trainer.fit_loop.state_dict(), get_rng_state()
    has_begun, cycles = state["epoch_progress"]["current"]["started"], cycles_loaders(trainer)
    used = batches_done(state) if has_begun else 0
    loaders = [position_of(loader, used, cycles=cycles) for loader in train_loaders(trainer)]
    current = state["epoch_loop.batch_progress"]["current"]
    if fit_loop is None and current["processed"] < current["ready"] and not is_accumulating(trainer):
        take_back_step(state)  # Lightning counts it again when a run resumes
        fit_loop = state
    return Position(fit_loop, rng, loaders)


def batches_done(fit_loop: Mapping[str, Any]) -> int | None:
    """Return the number of finished batches of the epoch from the state of a fit loop; None if the epoch is over.

    A save in ``on_train_batch_end`` happens before Lightning counts the batch as completed. A last batch that an
    exception interrupted is not finished.
    """
    progress, epoch = fit_loop["epoch_loop.batch_progress"], fit_loop["epoch_progress"]["current"]
    current = progress["current"]
    is_last = progress["is_last_batch"] and current["processed"] >= current["ready"]
    if is_last or epoch["processed"] >= epoch["started"]:
        return None
    in_batch_end = current["processed"] == current["started"] == current["ready"] == current["completed"] + 1
    return int(current["completed"] + in_batch_end)


def watch_end(trainer: pl.Trainer, keep: Callable[[Position], None]) -> Callable[[], None]:
    """Call ``keep`` with the position of a run that ends after a batch, at that batch; return the undo."""

    def end_batch(fetcher: Any, original: EndBatch) -> None:
        is_kept = ends_within_epoch(trainer) and not would_validate(trainer, fetcher)
        if is_kept:
            state = trainer.fit_loop.state_dict()
            for progress in (state["epoch_loop.batch_progress"][key] for key in ("current", "total")):
                progress["completed"] -= 1  # as in on_train_batch_end: Lightning resumes with the next batch
            keep(record_position(trainer, state))

        def keep_after() -> None:
            if not is_kept and ends_within_epoch(trainer):
                state = trainer.fit_loop.state_dict()
                if not is_accumulating(trainer):  # a resumed run counts the step when it skips the validation
                    take_back_step(state)
                keep(record_position(trainer, state))

        try:
            original()
        except SIGTERMException:
            if not trainer.validating:  # else the run ends inside the validation
                keep_after()
            raise
        keep_after()

    return wrap_batch_end(trainer, end_batch)


def start_loaders(
    trainer: pl.Trainer, positions: Sequence[Any] = (), *, batches: int | None = 0, same_ranks: bool = False
) -> list[str]:
    """Give the loaders of training their positions, or let them begin anew; name those that don't go on exactly.

    ``positions`` has None for a loader without one; the other arguments are those of ``resume_loader``.
    """
    inexact, loaders = list[str](), train_loaders(trainer)
    for loader, position in zip_longest(loaders, positions[: len(loaders)]):
        if not resume_loader(loader, position, batches=batches, same_ranks=same_ranks):
            dataset = getattr(loader, "dataset", None)
            inexact.append(type(loader).__name__ + ("" if dataset is None else f" of {type(dataset).__name__}"))
    return inexact


def resume_training(
    trainer: pl.Trainer, checkpoint: Mapping[str, Any], rank_state: Mapping[str, Any], share: DataShare
) -> tuple[Callable[[], None], bool]:
    """Restore loops, loaders and random state when training starts.

    Args:
        trainer: with loops that have loaded their state.
        checkpoint: Lightning's dict, after hooks had an opportunity to change it.
        rank_state: the state of the rank that saved, from `Position`.
        share: of this rank.

    Returns:
        The undo, and whether the run starts with the rest of an interrupted validation.
    """
    saved, positions = DataShare(**rank_state["place"]), rank_state["positions"]
    loops = checkpoint.get("loops")  # a hook may have removed them
    fit_loop = trainer.fit_loop.state_dict() if loops is None else loops["fit_loop"]
    batches, epoch = batches_done(fit_loop), fit_loop["epoch_progress"]["current"]  # None after the epoch's end
    validates = is_validation_interrupted(fit_loop)
    has_begun, has_ended = epoch["started"] > 0, epoch["processed"] >= epoch["started"]
    is_over = has_begun and (batches is None or batches >= trainer.fit_loop.max_batches)  # of this run
    if batches:
        _resume_epoch_callbacks(trainer)
    undo, loaders, batches = continue_validation(trainer), train_loaders(trainer), None if is_over else batches
    for loader, position in zip(loaders, positions, strict=False) if batches else ():
        _refuse_other_batches(loader, position, saved, share)
    for sampler in map(sampler_of, loaders):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch["processed"])
    inexact = start_loaders(trainer, positions, batches=batches, same_ranks=saved.data_size == share.data_size)
    if batches and len(loaders) != len(positions):
        inexact.append("another number of loaders")
    if inexact and has_begun:
        told = {"loaders": ", ".join(inexact), "before": saved.data_size, "now": share.data_size}
        rank_zero_warn(_INEXACT.format(**told))
    set_rng_state(rank_state["rng"])
    if not is_over and any(map(progress_of, loaders)):
        with preserve_rng() if positions else nullcontext():  # they had begun before the save
            begin_loaders(trainer)
    elif is_over and (has_ended or not validates):
        begin_next_epoch(trainer, epoch["started"], ended=has_ended)
    if share.data_rank >= saved.data_size:  # more ranks than before must not draw the same numbers
        reseed_by_rank(share.data_rank)
    return undo, validates


def _refuse_other_batches(loader: object, position: Any, saved: DataShare, share: DataShare) -> None:
    """Raise a MismatchError if the global batch differs, if it is known for both runs."""
    before, now = (position or {}).get("batch_size"), batch_size_of(loader)
    if before is not None and now is not None and before * saved.data_size != now * share.data_size:
        raise MismatchError(
            f"cannot resume in the middle of an epoch with another global batch: it had {before * saved.data_size} "
            f"samples (batch_size {before} on {saved.data_size} data-parallel ranks), and has {now * share.data_size} "
            f"({now} on {share.data_size}). Finish the epoch with the same global batch, or resume from a checkpoint "
            "of an epoch's end"
        )


def _resume_epoch_callbacks(trainer: pl.Trainer) -> None:
    """Prepare callbacks for an epoch that is resumed in its middle, without Lightning's ``on_train_epoch_start``.

    StochasticWeightAveraging creates its scheduler and loads its state; it averages once per epoch, and remembers that.
    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set later
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)
        elif isinstance(callback, StochasticWeightAveraging) and trainer.current_epoch <= callback.swa_end:
            callback.on_train_epoch_start(trainer, trainer.lightning_module)
