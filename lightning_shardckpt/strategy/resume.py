"""The position of a run in training and in its data: recorded for a checkpoint, and restored when a run resumes.

Lightning 2.6 ends the epoch with the run: a save after ``max_steps``, ``max_time`` or ``should_stop``, in
``on_train_epoch_end`` or after ``fit``, gets the loop counters of a finished epoch, and a random state that the last
validation may have changed. So ``StopPosition`` records the position if a run ends after a batch that is not the last
of its epoch, and that is saved instead. Effects of user code at the end of the run, such as in ``on_train_epoch_end``,
are not undone.

Lightning begins loaders when it prepares them, which may be before a checkpoint is loaded. In a run that resumes they
are empty until training starts: then ``ResumePoint`` restores loops, loaders and random state, in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler

from lightning_shardckpt.compat.data_loading import sampler_of
from lightning_shardckpt.compat.lightning_loops import (
    EndBatch,
    batches_drawn,
    begin_loaders,
    begin_next_epoch,
    cycles_loaders,
    ends_within_epoch,
    is_accumulating,
    is_batch_begun,
    is_stateful,
    is_validation_interrupted,
    resume_validation,
    skip_validation_without_draws,
    take_back_step,
    train_loaders,
    would_validate,
    wrap_batch_end,
)
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.state.data_position import (
    ResumableLoader,
    StatefulLoader,
    make_resumable,
    resume_state,
    state_position,
    watch_state,
)
from lightning_shardckpt.strategy.lightning_module import list_trainable, resume_epoch_callbacks, unfreeze
from lightning_shardckpt.system.random_generators import get_rng_state, preserve_rng, reseed_by_rank, set_rng_state

_INEXACT = (
    "resuming after {batches} batches of an epoch, but the order of its data can't be continued exactly, so samples of "
    "this epoch may come twice or not at all: {reasons}. Resume from the end of an epoch, or with the data and the "
    "number of data-parallel ranks of the run that saved. With Lightning's or torch's DistributedSampler the order "
    "continues on any number of ranks."
)
_RANDOM = (
    "{kind} draws from the random generators of the training process, as steps do between batches, so it may choose or "
    "change other samples. Use workers, or a generator of its own that is seeded in __iter__"
)
_NO_STATE = (
    "{kind} has a state of its own, which can't be restored: {reason}. It begins anew, so samples may come twice or "
    "not at all. Resume on as many data-parallel ranks as the run that saved, with the same kinds of loaders."
)


# ── the position of a run ─────────────────────────────────────────────────────────────────────────────────────────


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
        topology = meshes.topology
        return cls(
            meshes.data_parallel_rank, topology.data_parallel, topology.tensor, meshes.pipeline_rank, topology.pipeline
        )

    def source_rank(self, stored: Mapping[str, Any]) -> int:
        """Return the rank of the saving run whose state this rank loads: of the same data and stage.

        Args:
            stored: the state of any saving rank, as written by ``save_checkpoint``.
        """
        saved = DataShare(**stored["place"])
        stage, data_rank = self.stage % saved.stages, self.data_rank % saved.data_size
        return (stage * saved.data_size + data_rank) * saved.ranks_each


@dataclass(frozen=True, slots=True)
class Position:
    """A position in training.

    Attributes:
        fit_loop: the counters of Lightning's loop; None if Lightning's dict has them.
        rng: states of this rank's random number generators.
        loaders: the position in each of its loaders; None for a loader without one.
        trained: names of the parameters that are not frozen, if a callback freezes and unfreezes.
    """

    fit_loop: Mapping[str, Any] | None
    rng: dict[str, Any]
    loaders: list[Mapping[str, Any] | None]
    trained: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the state of this rank as a checkpoint stores it."""
        state = {"rng": self.rng, "positions": self.loaders}
        return state | ({"trained": self.trained} if self.trained else {})


def record_position(trainer: pl.Trainer, fit_loop: dict[str, Any] | None = None) -> Position:
    """Return the current position in training."""
    state, rng = fit_loop or trainer.fit_loop.state_dict(), get_rng_state()
    has_begun, cycles = state["epoch_progress"]["current"]["started"], cycles_loaders(trainer)
    used = batches_done({"fit_loop": state}) if has_begun else 0
    loaders = [_position(loader, used, cycles=cycles) for loader in train_loaders(trainer)]
    if fit_loop is None and is_batch_begun(state) and not is_accumulating(trainer):
        take_back_step(state)  # Lightning counts it again when a run resumes
        fit_loop = state
    return Position(fit_loop, rng, loaders, list_trainable(trainer))


def _position(loader: object, used: int | None, *, cycles: bool) -> Mapping[str, Any] | None:
    """Return the position in one loader after ``used`` batches of the epoch, None if it is over; None without one.

    Args:
        loader: of training.
        used: batches of the epoch, for all loaders together.
        cycles: whether a shorter loader begins again at its end.
    """
    if isinstance(loader, StatefulLoader):
        return state_position(loader, used)
    if not isinstance(loader, ResumableLoader):
        return None
    used, length = used or 0, sized_len(loader)
    if length is not None and used > length:
        used = (used - 1) % length + 1 if cycles else length
    return loader.position(used)


def batches_done(loops: Mapping[str, Any]) -> int | None:
    """Return the number of finished batches of the epoch from Lightning's loop state; None if the epoch is over.

    A save in ``on_train_batch_end`` happens before Lightning counts the batch as completed. A last batch that an
    exception interrupted is not finished.
    """
    progress, epoch = loops["fit_loop"]["epoch_loop.batch_progress"], loops["fit_loop"]["epoch_progress"]["current"]
    current = progress["current"]
    is_last = progress["is_last_batch"] and current["processed"] >= current["ready"]
    if is_last or epoch["processed"] >= epoch["started"]:
        return None
    in_batch_end = current["processed"] == current["started"] == current["ready"] == current["completed"] + 1
    return int(current["completed"] + in_batch_end)


class StopPosition:
    """The position after the last batch of a run, kept until training starts again."""

    def __init__(self) -> None:
        self._recorded: Position | None = None

    def position(self, trainer: pl.Trainer) -> Position:
        """Return the position from which a run must resume."""
        return self._recorded or record_position(trainer)

    def reset(self) -> None:
        """Forget the recorded position. Call it when training starts or continues."""
        self._recorded = None

    def keep(self, trainer: pl.Trainer) -> None:
        """Keep the position. Call it at the end of a fit, before Lightning shuts the loaders down."""
        self._recorded = self.position(trainer)

    def watch(self, trainer: pl.Trainer) -> Callable[[], None]:
        """Record the position at the end of the run; return the undo. Call it when training starts."""
        self.reset()

        def end_batch(fetcher: Any, original: EndBatch) -> None:
            if ends_within_epoch(trainer) and not would_validate(trainer, fetcher):
                self._recorded = record_position(trainer, _as_in_batch_end(trainer.fit_loop.state_dict()))
            try:
                original()
            except SIGTERMException:
                if not trainer.validating:  # else the run ends inside the validation
                    self._record_after(trainer)
                raise
            self._record_after(trainer)

        return wrap_batch_end(trainer, end_batch)

    def _record_after(self, trainer: pl.Trainer) -> None:
        """Record the position after a batch and its validation, if the run ends there."""
        if self._recorded is None and ends_within_epoch(trainer):
            state = trainer.fit_loop.state_dict()
            if not is_accumulating(trainer):  # a resumed run counts the step when it skips the validation
                take_back_step(state)
            self._recorded = record_position(trainer, state)


def _as_in_batch_end(state: dict[str, Any]) -> dict[str, Any]:
    """Change loop state to that of ``on_train_batch_end``, from which Lightning resumes with the next batch."""
    for progress in (state["epoch_loop.batch_progress"][key] for key in ("current", "total")):
        progress["completed"] -= 1
    return state


# ── resuming ──────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare_loader(trainer: pl.Trainer, loader: Any, *, waits: bool) -> None:
    """Make a loader of training resumable. Call it before Lightning begins it.

    Args:
        trainer: of the run.
        loader: of training.
        waits: whether the run resumes, so that the loader is empty until `start_loaders`.
    """
    if make_resumable(loader):
        loader.waits = waits
    elif is_stateful(loader) and watch_state(loader, lambda: batches_drawn(trainer)):
        loader.shardckpt_watch.waits = waits


def start_loaders(trainer: pl.Trainer, positions: list[Any], *, is_over: bool, same_ranks: bool) -> bool:
    """Give the loaders of training their positions; return False if none can have one.

    Args:
        trainer: with the loaders.
        positions: of each loader, with None for one without.
        is_over: whether the epoch of the positions is over.
        same_ranks: whether this rank has the data of the rank that saved.
    """
    loaders = train_loaders(trainer)
    for loader, position in zip_longest(loaders, positions[: len(loaders)]):
        if isinstance(loader, StatefulLoader):
            resume_state(loader, position if same_ranks and _has_state(position) else None, is_over=is_over)
        elif isinstance(loader, ResumableLoader):
            fitting = None if _has_state(position) else position
            loader.resume(fitting, is_over=is_over, same_ranks=same_ranks)
    return any(isinstance(loader, ResumableLoader | StatefulLoader) for loader in loaders)


def _has_state(position: Any) -> bool:
    """Return whether a position is that of a loader with its own state."""
    return position is not None and "state" in position


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The position from which a run resumes.

    Attributes:
        rng: the states of the random number generators at the save.
        positions: of the loaders; None for a loader without one.
        trained: as in `Position`.
        batches: the number of used batches of the interrupted epoch; None if it is over.
        epoch: Lightning's counters of epochs.
        validates: whether the run starts with the rest of an interrupted validation.
        saved: the share of the rank that saved.
        share: the share of this rank.
    """

    rng: Mapping[str, Any]
    positions: list[Any]
    trained: frozenset[str]
    batches: int | None
    epoch: Mapping[str, int]
    validates: bool
    saved: DataShare
    share: DataShare

    @classmethod
    def of(cls, checkpoint: Mapping[str, Any], rank_state: Mapping[str, Any], share: DataShare) -> ResumePoint:
        """Return the position in a checkpoint, after hooks had an opportunity to change it.

        Args:
            checkpoint: Lightning's dict.
            rank_state: the state of the rank that saved, from `Position`.
            share: of this rank.
        """
        loops = checkpoint.get("loops")
        return cls(
            rank_state["rng"],
            rank_state["positions"],
            frozenset(rank_state.get("trained", ())),
            None if loops is None else batches_done(loops),
            dict.fromkeys(_EPOCH, 0) if loops is None else loops["fit_loop"]["epoch_progress"]["current"],
            loops is not None and is_validation_interrupted(loops["fit_loop"]),
            DataShare(**rank_state["place"]),
            share,
        )

    @property
    def same_data(self) -> bool:
        """True if this rank has the data of the rank that saved."""
        return self.saved.data_size == self.share.data_size

    @property
    def sizes(self) -> str:
        """A sentence with the numbers of data-parallel ranks."""
        return f"the number of data-parallel ranks was {self.saved.data_size}, and is {self.share.data_size}"

    def resume_training(self, trainer: pl.Trainer) -> Callable[[], None]:
        """Restore loops, loaders and random state when training starts; return the undo.

        Args:
            trainer: with the loops that have loaded their state.

        Raises:
            MismatchError: for another global batch in the middle of an epoch.
        """
        undo, has_ended = ExitStack(), self.epoch["processed"] >= self.epoch["started"]
        limit = trainer.fit_loop.max_batches  # of this run
        is_over = self.epoch["started"] > 0 and (self.batches is None or self.batches >= limit)
        unfreeze(trainer, self.trained)
        if self.batches:
            resume_epoch_callbacks(trainer)
        undo.callback(resume_validation(trainer) if self.validates else skip_validation_without_draws(trainer))
        self._tell_missing(trainer, is_over=is_over)
        for sampler in map(sampler_of, train_loaders(trainer)):
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch["processed"])
        can_begin = start_loaders(
            trainer, self.positions, is_over=is_over or self.batches is None, same_ranks=self.same_data
        )
        set_rng_state(self.rng)
        if not is_over and can_begin:
            with preserve_rng() if self.positions else nullcontext():  # they had begun before the save
                begin_loaders(trainer)
        elif is_over and (has_ended or not self.validates):
            begin_next_epoch(trainer, self.epoch["started"], ended=has_ended)
        if self.share.data_rank >= self.saved.data_size:  # more ranks than before must not draw the same numbers
            reseed_by_rank(self.share.data_rank)
        return undo.close

    def _tell_missing(self, trainer: pl.Trainer, *, is_over: bool) -> None:
        """Warn of what the resumed run does not continue exactly.

        Raises:
            MismatchError: for another global batch in the middle of an epoch.
        """
        loaders = train_loaders(trainer)
        for loader, position in zip(loaders, self.positions, strict=False):
            has_fitting = self.same_data and _has_state(position)
            if isinstance(loader, StatefulLoader) and self.epoch["started"] > 0 and not has_fitting:
                reason = self.sizes if _has_state(position) else "none was saved"
                rank_zero_warn(_NO_STATE.format(kind=type(loader).__name__, reason=reason))
        if is_over or not self.batches:
            return
        reasons: list[str | None] = [f"there were {len(self.positions)} dataloaders, and are {len(loaders)}"]
        if len(self.positions) == len(loaders):
            reasons = [self._reason(*pair) for pair in zip(loaders, self.positions, strict=True)]
        if told := [reason for reason in reasons if reason is not None]:
            rank_zero_warn(_INEXACT.format(batches=self.batches, reasons="; ".join(told)))

    def _reason(self, loader: Any, position: Any) -> str | None:
        """Return why a loader can't continue an epoch exactly; None if it can.

        Raises:
            MismatchError: for another global batch.
        """
        kind, random = type(loader).__name__, position is not None and position.get("draws_random_numbers")
        if isinstance(loader, StatefulLoader):
            return _RANDOM.format(kind=kind) if self.same_data and _has_state(position) and random else None
        if not isinstance(loader, ResumableLoader) or position is None or _has_state(position):
            return f"{kind} is another kind of loader than in the run that saved, or has no state that can be saved"
        self._refuse_other_batches(position["batch_size"], loader.samples_of_batch)
        if position["samples"] != loader.samples:
            change = f"samples of a DataLoader was {position['samples']}, and is {loader.samples}"
            return change if self.same_data else f"{self.sizes}, and {change}"
        if loader.global_batches() is not None:
            return None if "order" in position else "another kind of sampler drew its order"
        if not self.same_data:
            return f"{self.sizes}, and {_explain_order(loader)}"
        if position.get("epoch_start") is None:
            return "another kind of sampler drew its order, or none yet"
        return _RANDOM.format(kind=type(loader.dataset).__name__) if random else None

    def _refuse_other_batches(self, saved: int | None, current: int | None) -> None:
        """Raise a MismatchError if the global batch differs, if it is known for both runs."""
        if saved is None or current is None:
            return
        before, now = saved * self.saved.data_size, current * self.share.data_size
        if before != now:
            raise MismatchError(
                f"cannot resume after {self.batches} batches of an epoch with another global batch: it had {before} "
                f"samples (batch_size {saved} on {self.saved.data_size} data-parallel ranks), and has {now} "
                f"({current} on {self.share.data_size}). Finish the epoch with the same global batch, or resume from a "
                "checkpoint of an epoch's end"
            )


_EPOCH = ("ready", "started", "processed", "completed")


def _explain_order(loader: ResumableLoader) -> str:
    """Return the reason why another number of ranks can't continue the order of this loader."""
    if loader.is_stream:
        return (
            f"{type(loader.dataset).__name__} is an IterableDataset, of which each rank skips as many batches as a "
            "rank used: exact if ranks take turns, else not"
        )
    sampler = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler
    return f"the order of {type(sampler or loader.sampler).__name__} over all ranks is not known"
