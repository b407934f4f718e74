"""Continue a training where it was: random state, the position in the data, and what was left of an epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, IterableDataset

from lightning_shardckpt.compat.lightning_loops import (
    begin_loaders,
    begin_next_epoch,
    cycles_loaders,
    go_on_with_validation,
    is_validation_interrupted,
    let_plateaus_step,
    move_in_epoch,
    repeat_last_batch,
    set_loaders_begun,
    step_plateaus_now,
    train_loaders,
)
from lightning_shardckpt.compat.lightning_trainer import put_callback_metrics
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
from lightning_shardckpt.state.stateful_loader import StatefulLoader, restore, resume
from lightning_shardckpt.strategy.lightning_callbacks import schedule_accumulation, thaw
from lightning_shardckpt.strategy.stop_position import plateau_monitors
from lightning_shardckpt.strategy.trainer_checkpoint import DataShare, RankState
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


class Continuation:
    """The work that remains when training starts: random state and position in the data.

    Attributes:
        validates: the run begins with the rest of a validation that an exception has interrupted.
    """

    def __init__(
        self, checkpoint: Mapping[str, Any], rank_state: RankState, share: DataShare, parts: frozenset[str]
    ) -> None:
        self._rng = rank_state.rng if "random" in parts else None
        self._positions = rank_state.positions if "data" in parts else None
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
        self._monitored, self._partial = rank_state.monitored, rank_state.partial
        self._trained = rank_state.trained if "callbacks" in parts else ()
        saved = rank_state.share
        self._saved_size, self._size = saved.data_size, share.data_size
        self._same_data = saved.data_size == share.data_size
        self._found: list[tuple[int, EpochPosition | None]] = []
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
        found = position is not None and "state" in position
        if not (found and self._same_data) and self._epochs > 0:
            sizes = f"the number of data-parallel ranks was {self._saved_size}, and is {self._size}"
            reason = f"the state that was saved is that of a single rank, and {sizes}" if found else "none was saved"
            rank_zero_warn(_NO_STATE.format(kind=type(loader).__name__, reason=reason))
        return found and self._same_data

    def _reached(self, loaders: list[Any], cycles: bool) -> list[tuple[int, EpochPosition | None]]:
        """Return how many batches each loader gave since it began, and the position in the epoch, where it is known."""
        batches, positions = self._batches or 0, self._positions or []
        if len(positions) != len(loaders):
            return [(batches, None)] * len(loaders)
        found = []
        for loader, position in zip(loaders, positions, strict=True):
            given, reached = batches_of_loader(loader, batches, cycles=cycles), None
            if isinstance(loader, ResumableLoader) and position is not None and "state" not in position:
                given = batches_of_loader(loader, batches, cycles=cycles, length=steps_of_epoch(position))
                reached = loader.epoch_position_after(position, given)
            found.append((given, reached))
        return found

    def _count_anew(self, loaders: list[Any], trainer: pl.Trainer) -> None:
        """Count batches as an epoch of the present number of ranks and batch size does."""
        self._found = self._reached(loaders, cycles_loaders(trainer))
        moves = [reached.batches - given for given, reached in self._found if reached is not None]
        if not self._batches or not moves:
            return
        leads = [i for i, (_, reached) in enumerate(self._found) if reached is not None]
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
        if len({reached.batches - given for given, reached in self._found if reached is not None}) > 1:
            reasons.append("the global batches of several dataloaders changed, so that they go with others")
        for loader, position, (given, reached) in zip(loaders, positions, self._found, strict=True):
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
