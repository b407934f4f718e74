"""The place of a run in training and in its data: note it for a checkpoint, and go on from there.

Lightning ends the epoch with the run (2.6): who saves after ``max_steps``, ``max_time`` or ``should_stop``, be it in
``on_train_epoch_end`` or after ``fit``, gets loop counters of an epoch that is over, and a random state that the last
validation may have changed. So ``Stopping`` notes the position when a run ends after a batch that is not its epoch's
last, and that is saved instead. What user code does because the run ends, such as in ``on_train_epoch_end``, stays
done. ``Continuation`` puts every rank back when training starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, IterableDataset

from lightning_shardckpt.compat.lightning_loops import (
    EndBatch,
    begin_loaders,
    begin_next_epoch,
    cycles_loaders,
    ends_within_epoch,
    go_on_with_validation,
    is_accumulating,
    is_batch_begun,
    is_last_batch,
    is_validation_interrupted,
    let_plateaus_step,
    logged_in_training,
    move_in_epoch,
    repeat_last_batch,
    set_loaders_begun,
    step_plateaus_now,
    take_back_step,
    train_loaders,
    would_validate,
    wrap_batch_end,
)
from lightning_shardckpt.compat.lightning_trainer import put_callback_metrics, validated_metrics
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.state.data_position import (
    EpochPosition,
    GlobalBatches,
    ResumableLoader,
    Resumption,
    batches_done,
    batches_of_loader,
    set_own_states,
    set_seed,
)
from lightning_shardckpt.state.stateful_loader import (
    StatefulLoader,
    finish,
    position_of,
    random_state_before_failure,
    restore,
    resume,
)
from lightning_shardckpt.strategy.lightning_module import schedule_accumulation, thaw, trained_names
from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state

_INEXACT = (
    "resuming after {batches} batches of an epoch, but the order of its data can't be continued exactly, so samples of "
    "this epoch may come twice or not at all: {reasons}. Resume from the end of an epoch, or with the data and the "
    "data-parallel ranks of the run that saved; the order goes on for any number of ranks where Lightning adds its "
    "DistributedSampler, or where you pass torch's."
)
_NO_STATE = (
    "{kind} has a state of its own, but can't go on with it: {reason}. It begins anew, so samples may come twice or "
    "not at all. Resume on as many data-parallel ranks as the run that saved, with the same kinds of loaders."
)
_NO_EPOCH = {"started": 0, "processed": 0, "completed": 0}


# ── where a run is ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class DataShare:
    """The part of the data on which this rank trains, and its pipeline stage of the model.

    Its data-parallel rank, how many there are, ranks of each; its stage, how many there are. Stages are the outermost.
    """

    data_rank: int
    data_size: int
    ranks_each: int
    stage: int = 0
    stages: int = 1

    @classmethod
    def of(cls, meshes: Meshes) -> DataShare:
        """Return that of this rank."""
        topology = meshes.topology
        return cls(
            meshes.data_parallel_rank, topology.data_parallel, topology.tensor, meshes.pipeline_rank, topology.pipeline
        )

    def source_rank(self, stored: Mapping[str, Any]) -> int:
        """The rank of the saving run whose state this one takes: of the same data and stage.

        Args:
            stored: the state of any of its ranks, as ``save_checkpoint`` wrote it.
        """
        saved = DataShare(**stored["place"])
        stage, data_rank = self.stage % saved.stages, self.data_rank % saved.data_size
        return (stage * saved.data_size + data_rank) * saved.ranks_each


@dataclass(frozen=True, slots=True)
class Position:
    """A place in training.

    Attributes:
        fit_loop: the counters of Lightning's loop; None leaves them to Lightning.
        rng: states of this rank's random number generators.
        loaders: the place in each of its loaders, None for one that can't tell.
        monitored: by name, metrics for which schedulers wait that Lightning steps after the hooks of an epoch's end.
        partial: names of metrics of such schedulers that are means over the batches of the present epoch.
        trained: names of the parameters that are trained, where a callback changes which.
    """

    fit_loop: Mapping[str, Any] | None
    rng: dict[str, Any]
    loaders: list[dict[str, Any] | None]
    monitored: dict[str, Any]
    partial: list[str]
    trained: list[str]

    def to_json(self) -> dict[str, Any]:
        """Return the part that each rank has for itself, as a checkpoint stores it: empty fields are left out."""
        rest = {"monitored": self.monitored, "partial": self.partial, "trained": self.trained}
        return {"rng": self.rng, "positions": self.loaders} | {key: value for key, value in rest.items() if value}


def note_position(trainer: pl.Trainer, fit_loop: dict[str, Any] | None = None) -> Position:
    """Return the place where training is now."""
    state, rng = fit_loop or trainer.fit_loop.state_dict(), get_rng_state()
    used = _count_used(state)
    loaders = [_position(loader, used) for loader in train_loaders(trainer)]
    for loader in train_loaders(trainer):
        rng |= random_state_before_failure(loader) if isinstance(loader, StatefulLoader) else {}
    monitored = {} if fit_loop else _collect_monitored(trainer)
    if fit_loop is None and is_batch_begun(state) and not is_accumulating(trainer):
        take_back_step(state)  # Lightning counts it once more when a run resumes
        fit_loop = state
    return Position(fit_loop, rng, loaders, monitored, _partial(trainer), trained_names(trainer))


def _position(loader: object, used: int | None) -> dict[str, Any] | None:
    if isinstance(loader, StatefulLoader):
        return position_of(loader, used)
    return loader.position() if isinstance(loader, ResumableLoader) else None


def _count_used(fit_loop: Mapping[str, Any]) -> int | None:
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


def _collect_monitored(trainer: pl.Trainer) -> dict[str, Any]:
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
        return self._noted or note_position(trainer)

    def forget(self) -> None:
        """Call when training goes on or begins."""
        self._noted = None

    def watch(self, trainer: pl.Trainer) -> None:
        """Call when training starts; undone by ``unwatch``."""
        self.unwatch()
        self.forget()

        def end_batch(fetcher: Any, original: EndBatch) -> None:
            if ends_within_epoch(trainer) and not would_validate(trainer, fetcher):
                self._noted = note_position(trainer, _as_in_batch_end(trainer.fit_loop.state_dict()))
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
                finish(loader, _count_used(trainer.fit_loop.state_dict()))
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
            self._noted = note_position(trainer, state)


def _as_in_batch_end(state: dict[str, Any]) -> dict[str, Any]:
    """Return loop state as ``on_train_batch_end`` has it: Lightning resumes with the next batch from there."""
    for progress in (state["epoch_loop.batch_progress"][key] for key in ("current", "total")):
        progress["completed"] -= 1
    return state


# ── going on ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Continuation:
    """The work that remains when training starts: random state and position in the data.

    Attributes:
        validates: the run begins with the rest of a validation that an exception has interrupted.
    """

    def __init__(
        self, checkpoint: Mapping[str, Any], rank_state: Mapping[str, Any], share: DataShare, parts: frozenset[str]
    ) -> None:
        self._rng = rank_state["rng"] if "random" in parts else None
        self._positions = rank_state["positions"] if "data" in parts else None
        loops = checkpoint.get("loops")
        self._batches = None if loops is None else batches_done(loops)
        if loops is not None and self._batches is not None:
            repeat_last_batch(loops["fit_loop"])
        self.validates = loops is not None and is_validation_interrupted(loops["fit_loop"])
        epoch = _NO_EPOCH if loops is None else loops["fit_loop"]["epoch_progress"]["current"]
        self._epochs: int = epoch["started"]
        self._ended: bool = epoch["processed"] >= epoch["started"]
        unfinished = self._batches is None and epoch["completed"] < epoch["started"] and not self.validates
        self._awaited = unfinished and "schedulers" in parts  # others begin anew
        self._monitored, self._partial = rank_state.get("monitored", {}), rank_state.get("partial", ())
        self._trained = rank_state.get("trained", ()) if "callbacks" in parts else ()
        saved = DataShare(**rank_state["place"])
        self._saved_size, self._size = saved.data_size, share.data_size
        self._same_data = saved.data_size == share.data_size
        self._places: list[tuple[int, EpochPosition | None]] = []
        self._fresh = share.data_rank if share.data_rank >= saved.data_size else None

    def before_loaders(self) -> None:
        """Call before Lightning begins loaders that can't wait until training starts."""
        if self._rng is not None:
            set_rng_state(self._rng)

    def apply(self, trainer: pl.Trainer) -> None:
        """Restore state when training starts: the train loaders exist, no batch has been drawn for this epoch."""
        fit, loaders = trainer.fit_loop, train_loaders(trainer)
        thaw(trainer, set(self._trained))
        if self._batches:
            schedule_accumulation(trainer)
        if self.validates:
            go_on_with_validation(trainer)
        self._count_anew(loaders, trainer)
        over = self._epochs > 0 and (self._batches is None or self._batches >= fit.max_batches)
        begun = not any(isinstance(loader, ResumableLoader | StatefulLoader) for loader in loaders)  # in before_loaders
        if self._rng is not None:
            if not (over and begun):
                set_rng_state(self._rng)
            if self._fresh is not None:  # more data-parallel ranks than before: no two may draw the same noise
                torch.manual_seed(int(torch.randint(1 << 62, ())) + self._fresh)
        if over:
            self._restore_loaders(loaders)
            if self.validates and not self._ended:
                self._await_plateaus(trainer)
                return
            if self._awaited:
                step_plateaus(trainer, self._epochs, self._monitored)
            begin_next_epoch(trainer, self._epochs, ended=self._ended)
            set_loaders_begun(trainer, begun)
            return
        if self._positions is not None:
            reasons = self._resume(loaders, self._positions, trainer)
            if reasons and self._batches:
                rank_zero_warn(_INEXACT.format(batches=self._batches, reasons="; ".join(reasons)))
        self._await_plateaus(trainer)
        for loader in loaders:
            for owner in (loader, getattr(loader, "batch_sampler", None)):
                sampler: Any = getattr(owner, "sampler", None)
                if hasattr(sampler, "set_epoch"):
                    sampler.set_epoch(fit.epoch_progress.current.processed)  # type: ignore[attr-defined]  # its subclass
        if not begun:
            begin_loaders(trainer)  # which have waited

    def _await_plateaus(self, trainer: pl.Trainer) -> None:
        """Let the epoch that goes on step its plateaus at its end, which Lightning leaves out."""
        partial = sorted(set(self._partial) & set(plateau_monitors(trainer)))
        if (self._batches or self.validates) and partial:
            rank_zero_warn(
                f"ReduceLROnPlateau will miss the update of epoch {self._epochs - 1}: {', '.join(partial)} is a mean "
                "over its training batches, and a run that resumes has only those that are left. Monitor a metric of "
                "the validation, or resume from an epoch's end."
            )
        else:
            let_plateaus_step(trainer)

    def _restore_loaders(self, loaders: list[Any]) -> None:
        """Restore seeds, and the loaders' own states, for an epoch that begins."""
        if self._positions is None or len(self._positions) != len(loaders):
            return
        for loader, position in zip(loaders, self._positions, strict=True):
            if isinstance(loader, StatefulLoader):
                if self._has_state(loader, position):
                    restore(loader, position)
            elif isinstance(loader, ResumableLoader) and position is not None:
                set_seed(loader, position["seed"])
                set_own_states(loader, position["own"] if self._same_data else [])

    def _has_state(self, loader: StatefulLoader, position: Any) -> bool:
        """Return whether a position has a state for this loader; warns if it has none, or that of other data."""
        there = position is not None and "state" in position
        if not (there and self._same_data) and self._epochs > 0:
            sizes = f"the number of data-parallel ranks was {self._saved_size}, and is {self._size}"
            reason = f"the state that was saved is that of a single rank, and {sizes}" if there else "none was saved"
            rank_zero_warn(_NO_STATE.format(kind=type(loader).__name__, reason=reason))
        return there and self._same_data

    def _locate(self, loaders: list[Any], cycles: bool) -> list[tuple[int, EpochPosition | None]]:
        """Return how many batches each loader gave since it began, and the position in the epoch, where it is known."""
        batches, positions = self._batches or 0, self._positions or []
        if len(positions) != len(loaders):
            return [(batches, None)] * len(loaders)
        places = []
        for loader, position in zip(loaders, positions, strict=True):
            given, reached = batches_of_loader(loader, batches, cycles=cycles), None
            if isinstance(loader, ResumableLoader) and position is not None and "state" not in position:
                given = batches_of_loader(loader, batches, cycles=cycles, length=steps_of_epoch(position))
                reached = loader.epoch_position_after(position, given)
            places.append((given, reached))
        return places

    def _count_anew(self, loaders: list[Any], trainer: pl.Trainer) -> None:
        """Count batches as an epoch of the present number of ranks and batch size does."""
        self._places = self._locate(loaders, cycles_loaders(trainer))
        moves = [reached.batches - given for given, reached in self._places if reached is not None]
        if not self._batches or not moves:
            return
        leads = [i for i, (_, reached) in enumerate(self._places) if reached is not None]
        pick = max if cycles_loaders(trainer) else min
        moved = moves[leads.index(pick(leads, key=lambda i: len(loaders[i])))]
        if not moved:
            return
        self._batches += moved
        move_in_epoch(trainer, moved)
        if self._batches % trainer.accumulate_grad_batches and self._batches < trainer.fit_loop.max_batches:
            rank_zero_warn(
                f"resuming with another global batch: the place in the epoch is that after {self._batches} batches, "
                f"which accumulate_grad_batches={trainer.accumulate_grad_batches} does not divide. The first optimizer "
                "step gets the gradients of fewer batches. Let batch_size × data-parallel ranks × "
                "accumulate_grad_batches stay the same."
            )

    def _resume(self, loaders: list[Any], positions: Sequence[Any], trainer: pl.Trainer) -> list[str]:
        """Prepare the loaders; return why some can't continue with the batches that they would have drawn."""
        if len(positions) != len(loaders):
            return [f"there were {len(positions)} dataloaders, and are {len(loaders)}"]
        reasons, leader = list[str](), None
        sizes = f"the number of data-parallel ranks was {self._saved_size}, and is {self._size}"
        if len({reached.batches - given for given, reached in self._places if reached is not None}) > 1:
            reasons.append("the global batches of several dataloaders changed, so that they go with others")
        for loader, position, (given, reached) in zip(loaders, positions, self._places, strict=True):
            if isinstance(loader, StatefulLoader):
                if self._has_state(loader, position):
                    resume(loader, position, {"process": get_rng_state(), "own": position["own"]})
                continue
            if not isinstance(loader, ResumableLoader):
                reasons.append(f"{type(loader).__name__} is no torch DataLoader, and has no state that can be kept")
                continue
            if position is None or "state" in position:
                reasons.append("another kind of loader was in the place of a DataLoader")
                continue
            set_seed(loader, position["seed"])
            then = {"process": get_rng_state(), "own": position["own"] if self._same_data else []}
            start = position["epoch_start"] if self._same_data and self._batches is not None else None
            if self._batches and (not self._same_data or (start is None and reached is not None)):
                start = then  # where the order is not known: that of another epoch, but not the same samples twice
            checksum = position.get("order", {}).get("checksum") if reached is not None else None
            resumption = Resumption(start, given, then, leader, reached, checksum)
            leader = leader or resumption
            loader.resume(resumption)
            if reached is None and not self._same_data:
                reasons.append(f"{sizes}, and {unknown_order(loader, position)}")
            elif reached is None and (change := changed_data(loader, position)):
                reasons.append(change)
            elif start is None and self._batches:
                reasons.append("the epoch had not begun")
        return reasons


def steps_of_epoch(position: Mapping[str, Any]) -> int | None:
    """Return how many batches an epoch of a loader had, of whose order all is known."""
    order = position.get("order")
    return None if order is None else GlobalBatches(*order["division"]).steps(order["samples"])


def unknown_order(loader: ResumableLoader, position: Mapping[str, Any]) -> str:
    """Return why another number of ranks can't continue the order of this loader."""
    if isinstance(loader.dataset, IterableDataset):
        return f"{type(loader.dataset).__name__} is an IterableDataset, of which each rank has read a part of its own"
    if "order" not in position:
        if loader.global_batches() is not None:
            return "the checkpoint was saved by an earlier version, or with a sampler whose order is not known"
        sampler = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler
        return f"the order that {type(sampler or loader.sampler).__name__} gives all ranks together is not known"
    return changed_data(loader, position) or "the order of this run's sampler is not known"


def changed_data(loader: ResumableLoader, position: Mapping[str, Any]) -> str | None:
    """Return what changed of a loader whose position is a number of batches; None if nothing did."""
    for name, now in (("samples", loader.samples), ("batch_size", loader.batch_size)):
        if name in position and position[name] != now:
            return f"{name} of a DataLoader was {position[name]}, and is {now}"
    return None


def step_plateaus(trainer: pl.Trainer, epochs: int, monitored: Mapping[str, Any]) -> None:
    """Step the schedulers that Lightning steps by a metric when an epoch is over, after the hooks that save.

    Args:
        trainer: with the schedulers as they were saved.
        epochs: so many were begun.
        monitored: the metrics that were known.
    """
    if unknown := sorted(set(plateau_monitors(trainer)) - monitored.keys()):
        rank_zero_warn(
            f"ReduceLROnPlateau misses the update of epoch {epochs - 1}: {', '.join(unknown)} of that epoch was not "
            "known yet when the checkpoint was saved. Save in on_train_epoch_end."
        )
    elif monitored:
        put_callback_metrics(trainer, monitored)
        step_plateaus_now(trainer, epochs - 1)
