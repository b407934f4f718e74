"""The position of a run in training and in its data: recorded for a checkpoint, and restored when a run resumes.

Lightning 2.6 ends the epoch with the run: a save after ``max_steps``, ``max_time`` or ``should_stop``, in
``on_train_epoch_end`` or after ``fit``, gets the loop counters of a finished epoch, and a random state that the last
validation may have changed. So ``StopPosition`` records the position if a run ends after a batch that is not the last
of its epoch, and that is saved instead. Effects of user code at the end of the run, such as in ``on_train_epoch_end``,
are not undone. ``Continuation`` restores the position on every rank when training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, IterableDataset

from lightning_shardckpt.compat.lightning_loops import (
    EndBatch,
    begin_loaders,
    begin_next_epoch,
    cycles_loaders,
    ends_within_epoch,
    is_accumulating,
    is_batch_begun,
    is_validation_interrupted,
    logged_in_training,
    move_in_epoch,
    repeat_last_batch,
    resume_validation,
    set_loaders_begun,
    take_back_step,
    train_loaders,
    would_validate,
    wrap_batch_end,
)
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.state.data_position import (
    EpochPosition,
    GlobalBatches,
    ResumableLoader,
    Resumption,
    SavedState,
    batches_done,
    batches_of_loader,
    set_own_states,
    set_seed,
)
from lightning_shardckpt.state.stateful_loader import (
    StatefulLoader,
    finish,
    position_of,
    restore,
    resume,
)
from lightning_shardckpt.strategy.lightning_module import list_trainable, resume_epoch_callbacks, unfreeze
from lightning_shardckpt.system.random_generators import get_rng_state, reseed_by_rank, set_rng_state

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
_NO_EPOCH = {"started": 0, "processed": 0, "completed": 0}


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
        epoch_metrics: names of metrics of training that are logged for the whole of the current epoch.
        trained: names of the parameters that are not frozen, if a callback freezes and unfreezes.
    """

    fit_loop: Mapping[str, Any] | None
    rng: dict[str, Any]
    loaders: list[dict[str, Any] | None]
    epoch_metrics: list[str]
    trained: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the state of this rank as a checkpoint stores it, without empty fields."""
        rest = {"epoch_metrics": self.epoch_metrics, "trained": self.trained}
        return {"rng": self.rng, "positions": self.loaders} | {key: value for key, value in rest.items() if value}


def record_position(trainer: pl.Trainer, fit_loop: dict[str, Any] | None = None) -> Position:
    """Return the current position in training."""
    state, rng = fit_loop or trainer.fit_loop.state_dict(), get_rng_state()
    used = _count_used(state)
    loaders = [_position(loader, used) for loader in train_loaders(trainer)]
    if fit_loop is None and is_batch_begun(state) and not is_accumulating(trainer):
        take_back_step(state)  # Lightning counts it again when a run resumes
        fit_loop = state
    epoch_metrics = sorted({meta.name for meta in logged_in_training(trainer) if meta.on_epoch})
    return Position(fit_loop, rng, loaders, epoch_metrics, list_trainable(trainer))


def _position(loader: object, used: int | None) -> dict[str, Any] | None:
    if isinstance(loader, StatefulLoader):
        return position_of(loader, used)
    return loader.position() if isinstance(loader, ResumableLoader) else None


def _count_used(fit_loop: Mapping[str, Any]) -> int | None:
    """Return the number of used batches of the current epoch; None if it is over."""
    return batches_done({"fit_loop": fit_loop}) if fit_loop["epoch_progress"]["current"]["started"] else 0


class StopPosition:
    """The position after the last batch of a run, kept until training starts again."""

    def __init__(self) -> None:
        self._recorded: Position | None = None
        self._undo: Callable[[], None] | None = None

    def position(self, trainer: pl.Trainer) -> Position:
        """Return the position from which a run must resume."""
        return self._recorded or record_position(trainer)

    def reset(self) -> None:
        """Forget the recorded position. Call it when training starts or continues."""
        self._recorded = None

    def watch(self, trainer: pl.Trainer) -> None:
        """Record the position at the end of the run. Call it when training starts; `unwatch` undoes it."""
        self.unwatch()
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

        self._undo = wrap_batch_end(trainer, end_batch)

    def end(self, trainer: pl.Trainer) -> None:
        """Finish the loaders, and restore Lightning's loop. Call it at the end of a run, before their teardown."""
        for loader in train_loaders(trainer):
            if isinstance(loader, StatefulLoader):
                finish(loader, _count_used(trainer.fit_loop.state_dict()))
        self.unwatch()

    def unwatch(self) -> None:
        """Restore Lightning's loop."""
        if self._undo is not None:
            self._undo()
            self._undo = None

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


class Continuation:
    """The loaded state that is restored when training starts: random state and position in the data.

    Attributes:
        validates: True if the run starts with the rest of an interrupted validation.
    """

    def __init__(self, checkpoint: Mapping[str, Any], rank_state: Mapping[str, Any], share: DataShare) -> None:
        self._rng, self._positions = rank_state["rng"], rank_state["positions"]
        loops = checkpoint.get("loops")
        self._batches = None if loops is None else batches_done(loops)
        if loops is not None and self._batches is not None:
            repeat_last_batch(loops["fit_loop"])
        self.validates = loops is not None and is_validation_interrupted(loops["fit_loop"])
        epoch = _NO_EPOCH if loops is None else loops["fit_loop"]["epoch_progress"]["current"]
        self._epochs: int = epoch["started"]
        self._ended: bool = epoch["processed"] >= epoch["started"]
        self._completed: bool = epoch["completed"] >= epoch["started"]
        self._epoch_metrics: list[str] = rank_state.get("epoch_metrics", [])
        self._trained = rank_state.get("trained", ())
        saved = DataShare(**rank_state["place"])
        self._saved_size, self._size = saved.data_size, share.data_size
        self._same_data = saved.data_size == share.data_size
        self._located: list[tuple[int, EpochPosition | None]] = []
        self._extra_rank = share.data_rank if share.data_rank >= saved.data_size else None

    def before_loaders(self) -> None:
        """Restore random state. Call it before Lightning begins loaders that can't wait until training starts."""
        set_rng_state(self._rng)

    def apply(self, trainer: pl.Trainer) -> None:
        """Restore state when training starts: the train loaders exist, no batch has been drawn for this epoch."""
        fit, loaders = trainer.fit_loop, train_loaders(trainer)
        unfreeze(trainer, set(self._trained))
        if self._batches:
            resume_epoch_callbacks(trainer)
        if self.validates:
            resume_validation(trainer)
        self._recount(loaders, trainer)
        if not self._completed:
            self._tell_missing(trainer)
        over = self._epochs > 0 and (self._batches is None or self._batches >= fit.max_batches)
        begun = not any(isinstance(loader, ResumableLoader | StatefulLoader) for loader in loaders)  # in before_loaders
        if not (over and begun):
            set_rng_state(self._rng)
        if self._extra_rank is not None:  # more data-parallel ranks than before must not draw the same numbers
            reseed_by_rank(self._extra_rank)
        if over:
            self._restore_loaders(loaders)
            if self.validates and not self._ended:
                return
            begin_next_epoch(trainer, self._epochs, ended=self._ended)
            set_loaders_begun(trainer, begun)
            return
        reasons = self._resume(loaders, self._positions, trainer)
        if reasons and self._batches:
            rank_zero_warn(_INEXACT.format(batches=self._batches, reasons="; ".join(reasons)))
        for loader in loaders:
            for owner in (loader, getattr(loader, "batch_sampler", None)):
                sampler: Any = getattr(owner, "sampler", None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(fit.epoch_progress.current.processed)  # type: ignore[attr-defined]  # its subclass
        if not begun:
            begin_loaders(trainer)  # they have waited

    def _tell_missing(self, trainer: pl.Trainer) -> None:
        """Tell what of the interrupted epoch the resumed run does not have, on rank 0."""
        configs = trainer.lr_scheduler_configs if trainer.lightning_module.automatic_optimization else []
        if any(config.reduce_on_plateau and config.interval == "epoch" for config in configs):
            rank_zero_warn(
                f"ReduceLROnPlateau will miss the update of epoch {self._epochs - 1}, from which the checkpoint is: "
                "Lightning does not step it at the end of an epoch that began in an earlier run"
            )
        if self._batches and self._epoch_metrics:
            rank_zero_info(
                f"metrics of epoch {self._epochs - 1} will be partial, over its batches from {self._batches} on: "
                f"{', '.join(self._epoch_metrics)}"
            )

    def _restore_loaders(self, loaders: list[Any]) -> None:
        """Restore seeds and the loaders' own states for a new epoch."""
        if len(self._positions) != len(loaders):
            return
        for loader, position in zip(loaders, self._positions, strict=True):
            if isinstance(loader, StatefulLoader):
                if self._has_state(loader, position):
                    restore(loader, position)
            elif isinstance(loader, ResumableLoader) and position is not None:
                set_seed(loader, position["seed"])
                set_own_states(loader, position["own"] if self._same_data else [])

    def _has_state(self, loader: StatefulLoader, position: Any) -> bool:
        """Return True if a position has a usable state for this loader; else warn."""
        is_saved = position is not None and "state" in position
        if not (is_saved and self._same_data) and self._epochs > 0:
            reason = f"it was saved by a single rank, and {self._sizes}" if is_saved else "none was saved"
            rank_zero_warn(_NO_STATE.format(kind=type(loader).__name__, reason=reason))
        return is_saved and self._same_data

    @property
    def _sizes(self) -> str:
        return f"the number of data-parallel ranks was {self._saved_size}, and is {self._size}"

    def _locate(self, loaders: list[Any], cycles: bool) -> list[tuple[int, EpochPosition | None]]:
        """Return the number of batches that each loader has yielded, and the position in the epoch, if known."""
        batches, positions = self._batches or 0, self._positions
        if len(positions) != len(loaders):
            return [(batches, None)] * len(loaders)
        located = []
        for loader, position in zip(loaders, positions, strict=True):
            yielded, reached = batches_of_loader(loader, batches, cycles=cycles), None
            if isinstance(loader, ResumableLoader) and position is not None and "state" not in position:
                yielded = batches_of_loader(loader, batches, cycles=cycles, length=count_epoch_steps(position))
                reached = loader.epoch_position_after(position, yielded)
            located.append((yielded, reached))
        return located

    def _recount(self, loaders: list[Any], trainer: pl.Trainer) -> None:
        """Convert the number of batches to the current number of ranks and batch size."""
        self._located = self._locate(loaders, cycles_loaders(trainer))
        shifts = {i: reached.batches - n for i, (n, reached) in enumerate(self._located) if reached is not None}
        if not self._batches or not shifts:
            return
        pick = max if cycles_loaders(trainer) else min
        shift = shifts[pick(shifts, key=lambda i: len(loaders[i]))]
        if not shift:
            return
        self._batches += shift
        move_in_epoch(trainer, shift)
        if self._batches % trainer.accumulate_grad_batches and self._batches < trainer.fit_loop.max_batches:
            rank_zero_warn(
                f"resuming with another global batch: the run resumes after {self._batches} batches of the epoch, "
                f"which accumulate_grad_batches={trainer.accumulate_grad_batches} does not divide. The first optimizer "
                "step gets the gradients of fewer batches. Keep batch_size × data-parallel ranks × "
                "accumulate_grad_batches the same."
            )

    def _resume(self, loaders: list[Any], positions: Sequence[Any], trainer: pl.Trainer) -> list[str]:
        """Prepare the loaders, and return the reasons why some can't continue exactly."""
        if len(positions) != len(loaders):
            return [f"there were {len(positions)} dataloaders, and are {len(loaders)}"]
        reasons, leader, saved = list[str](), None, SavedState(get_rng_state())
        if len({reached.batches - yielded for yielded, reached in self._located if reached is not None}) > 1:
            reasons.append("the global batches of several dataloaders changed, so they are combined differently")
        for loader, position, (yielded, reached) in zip(loaders, positions, self._located, strict=True):
            if isinstance(loader, StatefulLoader):
                if self._has_state(loader, position):
                    resume(loader, position, saved)
                    if position.get("draws_random_numbers"):
                        reasons.append(_RANDOM.format(kind=type(loader).__name__))
                continue
            if not isinstance(loader, ResumableLoader):
                reasons.append(f"{type(loader).__name__} is no torch DataLoader, and has no state that can be saved")
                continue
            if position is None or "state" in position:
                reasons.append("another kind of loader was used instead of a DataLoader")
                continue
            set_seed(loader, position["seed"])
            state = {"process": get_rng_state(), "own": position["own"] if self._same_data else []}
            start = position["epoch_start"] if self._same_data and self._batches is not None else None
            if self._batches and (not self._same_data or (start is None and reached is not None)):
                start = state  # for an unknown order: another order, but no sample twice
            checksum = position.get("order", {}).get("checksum") if reached is not None else None
            resumption = Resumption(start, yielded, state, saved, leader, reached, checksum)
            leader = leader or resumption
            loader.resume(resumption)
            if reached is None and not self._same_data:
                reasons.append(f"{self._sizes}, and {_explain_order(loader, position)}")
            elif reached is None and (change := _describe_change(loader, position)):
                reasons.append(change)
            elif start is None and self._batches:
                reasons.append("the epoch had not begun")
            elif self._batches and position.get("draws_random_numbers"):
                reasons.append(_RANDOM.format(kind=type(loader.dataset).__name__))
        return reasons


def count_epoch_steps(position: Mapping[str, Any]) -> int | None:
    """Return the number of batches per epoch of a loader; None if the order of its samples is unknown."""
    order = position.get("order")
    return None if order is None else GlobalBatches(*order["division"]).steps(order["samples"])


def _explain_order(loader: ResumableLoader, position: Mapping[str, Any]) -> str:
    """Return the reason why another number of ranks can't continue the order of this loader."""
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"{type(loader.dataset).__name__} is an IterableDataset, of which each rank skips as many batches as a "
            "rank used: exact if ranks take turns and batch_size × data-parallel ranks is the same, else not"
        )
    if "order" not in position:
        if loader.global_batches() is not None:
            return "the checkpoint was saved by an earlier version, or with a sampler of unknown order"
        sampler = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler
        return f"the order of {type(sampler or loader.sampler).__name__} over all ranks is not known"
    return _describe_change(loader, position) or "the order of this run's sampler is not known"


def _describe_change(loader: ResumableLoader, position: Mapping[str, Any]) -> str | None:
    """Return the change of a loader whose position is a number of batches; None without one."""
    for name, value in (("samples", loader.samples), ("batch_size", loader.batch_size)):
        if name in position and position[name] != value:
            return f"{name} of a DataLoader was {position[name]}, and is {value}"
    return None
