"""Save all of a Trainer under ``ShardedStrategy``, and continue exactly where it was.

Lightning's checkpoint dict has the shared state. Added to it, per rank: random states, the position in the data, and
the states of loaders that have their own, since those differ between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils.data import BatchSampler, IterableDataset

from lightning_shardckpt.checkpoint.parts import PARTS
from lightning_shardckpt.checkpoint_io import RANK_STATE, ShardCkptIO, as_of_a_trainer
from lightning_shardckpt.compat.lightning_fabric import set_sampler_epoch
from lightning_shardckpt.compat.lightning_loops import (
    begin_loaders,
    begin_next_epoch,
    cycles_loaders,
    let_plateaus_step,
    move_in_epoch,
    set_loaders_begun,
    step_plateaus_now,
    train_loaders,
)
from lightning_shardckpt.compat.lightning_trainer import keep_loaded_groups, put_callback_metrics
from lightning_shardckpt.compat.strategy_assignment import is_wrapper
from lightning_shardckpt.state.data_position import ResumableLoader, Resumption, batches_done, batches_of_loader
from lightning_shardckpt.state.global_batches import GlobalBatches, Place
from lightning_shardckpt.state.module_io import put_values
from lightning_shardckpt.state.rng_state import get_rng_state, set_rng_state
from lightning_shardckpt.strategy.module_record import filling
from lightning_shardckpt.strategy.module_targets import module_targets
from lightning_shardckpt.strategy.stop_position import Position, plateau_monitors
from lightning_shardckpt.system.gc_pause import gc_paused


def checked_io(io: object) -> ShardCkptIO:
    """The CheckpointIO of a ShardedStrategy, which must be ours: others are called on one rank with whole tensors.

    Raises:
        TypeError: for any other, saying what to do.
    """
    if isinstance(io, ShardCkptIO):
        return io
    if is_wrapper(io):
        raise TypeError(
            f"{type(io).__name__} saves in a thread of rank 0 alone, but every rank writes its own slices here. "
            "Pass ShardCkptIO() alone in plugins."
        )
    raise TypeError(
        f"ShardedStrategy saves with ShardCkptIO, got {type(io).__name__}; pass plugins=[ShardCkptIO()] or none"
    )


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

    def source_rank(self, rank_state: dict[str, Any]) -> int:
        """The rank of the saving run whose state this one takes, from any rank's state: of the same data and stage."""
        saved = DataShare(**rank_state["place"])
        stage, data_rank = self.stage % saved.stages, self.data_rank % saved.data_size
        return (stage * saved.data_size + data_rank) * saved.ranks_each


def save_checkpoint(
    io: ShardCkptIO, position: Position, place: DataShare, checkpoint: dict[str, Any], path: Any, storage_options: Any
) -> None:
    """Write Lightning's checkpoint dict and what only this rank knows. Collective: every rank must call it.

    Args:
        io: told who saves together.
        position: where a run that resumes must go on.
        place: which data this rank trains on.
        checkpoint: Lightning's dict; it is not changed.
        path: where to, the same on all ranks.
        storage_options: as Lightning gives them.
    """
    checkpoint = dict(checkpoint)
    rank_state: dict[str, Any] = {"rng": position.rng, "place": asdict(place), "positions": position.loaders}
    rank_state |= {key: found for key in ("monitored", "partial") if (found := getattr(position, key))}
    loops = checkpoint.get("loops")
    if loops and position.fit_loop is not None:
        checkpoint["loops"] = loops = {**loops, "fit_loop": position.fit_loop}
        checkpoint["epoch"] = position.fit_loop["epoch_progress"]["current"]["completed"]
    if loops and "combined_loader" in loops["fit_loop"]["state_dict"]:
        state = dict(loops["fit_loop"]["state_dict"])
        rank_state["loaders"] = state.pop("combined_loader")
        checkpoint["loops"] = {**loops, "fit_loop": {**loops["fit_loop"], "state_dict": state}}
    io.save_checkpoint({**checkpoint, RANK_STATE: rank_state}, path, storage_options)


def load_checkpoint(
    io: ShardCkptIO, trainer: pl.Trainer, place: DataShare, path: Any, *, weights_only: bool | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Load model and (when fitting) optimizers in place; return the rest as Lightning's dict, and the rank's state.

    Collective: every rank must call it.

    Args:
        io: told who loads together.
        trainer: whose module and optimizers are filled.
        place: which data this rank trains on; it picks the saving rank whose state this one takes.
        path: of the checkpoint, the same on all ranks.
        weights_only: for a file of ``torch.save``, as in ``torch.load``; None is True.

    Returns:
        Lightning's dict, in which ``state_dict`` holds the live tensors, loaded, for hooks to see; and the state of the
        saving rank that stood in this one's place, None if there is none.
    """
    module = trainer.lightning_module
    with gc_paused():
        state_dict = module.state_dict()
    fitting = trainer.state.fn == TrainerFn.FITTING
    parts = io.resume if fitting else frozenset(PARTS)
    optimizers = trainer.strategy.optimizers if fitting and parts & {"optimizer", "param_groups"} else None
    targets = module_targets(module, state_dict, optimizers, io.names)
    if "callbacks" in parts:
        targets = replace(targets, regroup=partial(_regroup, trainer))
    loaded = io.load_into(
        path,
        targets,
        strict=module.strict_loading,
        weights_only=weights_only,
        pick_rank=place.source_rank,
        partly=fitting,
        filling=partial(filling, module, str(path)),
    )
    for note in loaded.skipped:
        rank_zero_info(note)
    put_values(module, state_dict, loaded.extra_state)
    checkpoint = loaded.trainer
    checkpoint["state_dict"] = state_dict
    rank_state: dict[str, Any] | None = checkpoint.pop(RANK_STATE)
    checkpoint = as_of_a_trainer(checkpoint, str(path), fitting=fitting and "loops" in parts)
    _leave_out(checkpoint, trainer, parts)
    if left := [part for part in PARTS if part not in parts]:
        rank_zero_info(f"{str(path)!r}: resume does not name {', '.join(left)}, which begin anew")
    same_data = rank_state is not None and DataShare(**rank_state["place"]).data_size == place.data_size
    if rank_state is not None and same_data and "data" in parts and "loops" in checkpoint:
        states = rank_state.get("loaders", [])
        if any(states):  # a loader of the user's has a state of its own
            checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = states
    return checkpoint, rank_state


def _leave_out(checkpoint: dict[str, Any], trainer: pl.Trainer, parts: frozenset[str]) -> None:
    """Take out of Lightning's checkpoint dict what is not to be resumed; its connector restores what is there."""
    kept_by = {
        "optimizer": [type(trainer.precision_plugin).__qualname__, "native_amp_scaling_state"],  # the loss scale
        "loops": ["loops", "epoch", "global_step"],
        "data": [type(getattr(trainer, "datamodule", None)).__qualname__],
        "callbacks": ["callbacks"],
    }
    for key in (key for part, keys in kept_by.items() if part not in parts for key in keys):
        checkpoint.pop(key, None)
    if "schedulers" not in parts:
        checkpoint["lr_schedulers"] = []
    if "data" not in parts and "loops" in checkpoint:
        checkpoint["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)


def _regroup(trainer: pl.Trainer, state: Mapping[str, Any]) -> None:
    """Give the optimizers the param groups that BaseFinetuning had made of layers that it had unfrozen."""
    for callback in _finetuning(trainer):
        saved = state.get("callbacks", {}).get(callback.state_key)
        if saved is not None:
            callback.load_state_dict(saved)
            callback.on_fit_start(trainer, trainer.lightning_module)


def keep_groups(trainer: pl.Trainer) -> None:
    """Keep loaded hyper-parameters after callbacks have their state: BaseFinetuning would undo them."""
    for callback in _finetuning(trainer):
        keep_loaded_groups(callback)


def _finetuning(trainer: pl.Trainer) -> list[BaseFinetuning]:
    return [callback for callback in trainer.callbacks if isinstance(callback, BaseFinetuning)]  # type: ignore[attr-defined]


_INEXACT = (
    "resuming after {batches} batches of an epoch, but the order of its data can't be continued exactly, so samples of "
    "this epoch may come twice or not at all: {reasons}. Resume from the end of an epoch, or with the data and the "
    "data-parallel ranks of the run that saved; the order goes on for any number of ranks where Lightning adds its "
    "DistributedSampler, or where you pass torch's."
)
_NO_EPOCH = {"started": 0, "processed": 0, "completed": 0}


class Continuation:
    """The work that remains when training starts: random state and position in the data."""

    def __init__(
        self, checkpoint: Mapping[str, Any], rank_state: dict[str, Any], place: DataShare, parts: frozenset[str]
    ) -> None:
        self._rng: dict[str, Any] | None = rank_state["rng"] if "random" in parts else None
        self._positions: list[Any] | None = rank_state["positions"] if "data" in parts else None
        loops = checkpoint.get("loops")
        self._batches = None if loops is None else batches_done(loops)
        epoch = _NO_EPOCH if loops is None else loops["fit_loop"]["epoch_progress"]["current"]
        self._epochs: int = epoch["started"]
        self._ended: bool = epoch["processed"] >= epoch["started"]
        unfinished = self._batches is None and epoch["completed"] < epoch["started"]
        self._awaited = unfinished and "schedulers" in parts  # others begin anew
        self._monitored: dict[str, Any] = rank_state.get("monitored", {})
        self._partial: list[str] = rank_state.get("partial", [])
        saved = DataShare(**rank_state["place"])
        self._saved_size, self._size = saved.data_size, place.data_size
        self._same_data = saved.data_size == place.data_size
        self._found: list[tuple[int, Place | None]] = []
        self._fresh = place.data_rank if place.data_rank >= saved.data_size else None

    def before_loaders(self) -> None:
        """Call before Lightning begins loaders that can't wait until training starts."""
        if self._rng is not None:
            set_rng_state(self._rng)

    def apply(self, trainer: pl.Trainer) -> None:
        """Restore state when training starts: the train loaders exist, no batch has been drawn for this epoch."""
        fit, loaders = trainer.fit_loop, train_loaders(trainer)
        self._count_anew(loaders, trainer)
        over = self._epochs > 0 and (self._batches is None or self._batches >= fit.max_batches)
        begun = not any(isinstance(loader, ResumableLoader) for loader in loaders)  # by Lightning, in before_loaders
        if self._rng is not None:
            if not (over and begun):
                set_rng_state(self._rng)
            if self._fresh is not None:  # more data-parallel ranks than before: no two may draw the same noise
                torch.manual_seed(int(torch.randint(1 << 62, ())) + self._fresh)
        if over:
            self._restore_loaders(loaders)
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
            set_sampler_epoch(loader, fit.epoch_progress.current.processed)  # type: ignore[attr-defined]  # its subclass
        if not begun:
            begin_loaders(trainer)  # which have waited

    def _await_plateaus(self, trainer: pl.Trainer) -> None:
        """Let the epoch that goes on step its plateaus at its end, which Lightning leaves out."""
        partial = sorted(set(self._partial) & set(plateau_monitors(trainer)))
        if self._batches and partial:
            rank_zero_warn(
                f"ReduceLROnPlateau will miss the update of epoch {self._epochs - 1}: {', '.join(partial)} is a mean "
                "over its training batches, and a run that resumes has only those that are left. Monitor a metric of "
                "the validation, or resume from an epoch's end."
            )
        else:
            let_plateaus_step(trainer)

    def _restore_loaders(self, loaders: list[Any]) -> None:
        """Restore seeds, and the loaders' own generators, for an epoch that begins."""
        if self._positions is not None and len(self._positions) == len(loaders):
            for loader, position in zip(loaders, self._positions, strict=True):
                if isinstance(loader, ResumableLoader) and position is not None:
                    loader.set_sampler_seed(position["seed"])
                    loader.set_own(position["own"] if self._same_data else [])

    def _places(self, loaders: list[Any], cycles: bool) -> list[tuple[int, Place | None]]:
        """Return how many batches each loader gave since it began, and their place in its order, where it is known."""
        batches, positions = self._batches or 0, self._positions or []
        if len(positions) != len(loaders):
            return [(batches, None)] * len(loaders)
        found = []
        for loader, position in zip(loaders, positions, strict=True):
            given, place = batches_of_loader(loader, batches, cycles=cycles), None
            if isinstance(loader, ResumableLoader) and position is not None:
                given = batches_of_loader(loader, batches, cycles=cycles, length=steps_of_epoch(position))
                place = loader.place_after(position, given)
            found.append((given, place))
        return found

    def _count_anew(self, loaders: list[Any], trainer: pl.Trainer) -> None:
        """Count batches as an epoch of the present number of ranks and batch size does."""
        self._found = self._places(loaders, cycles_loaders(trainer))
        moves = [place.batches - given for given, place in self._found if place is not None]
        if not self._batches or not moves:
            return
        leads = [i for i, (_, place) in enumerate(self._found) if place is not None]
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

    def _resume(self, loaders: list[Any], positions: list[Any], trainer: pl.Trainer) -> list[str]:
        """Prepare the loaders; return why some can't continue with the batches that they would have drawn."""
        if len(positions) != len(loaders):
            return [f"there were {len(positions)} dataloaders, and are {len(loaders)}"]
        reasons, leader = list[str](), None
        sizes = f"the number of data-parallel ranks was {self._saved_size}, and is {self._size}"
        if len({place.batches - given for given, place in self._found if place is not None}) > 1:
            reasons.append("the global batches of several dataloaders changed, so that they go with others")
        for loader, position, (given, place) in zip(loaders, positions, self._found, strict=True):
            if not isinstance(loader, ResumableLoader):
                if not hasattr(loader, "load_state_dict"):
                    reasons.append(f"{type(loader).__name__} is no torch DataLoader and has no state_dict")
                elif not self._same_data:
                    reasons.append(f"the state of {type(loader).__name__} is that of a single rank, and {sizes}")
                continue
            if position is None:  # another kind of loader was in its place
                reasons.append("another kind of loader was in the place of a DataLoader")
                continue
            loader.set_sampler_seed(position["seed"])
            then = {"process": get_rng_state(), "own": position["own"] if self._same_data else []}
            start = position["epoch_start"] if self._same_data and self._batches is not None else None
            if self._batches and (not self._same_data or (start is None and place is not None)):
                start = then  # where the order is not known: that of another epoch, but not the same samples twice
            checksum = position.get("order", {}).get("checksum") if place is not None else None
            resumption = Resumption(start, given, then, leader, place, checksum)
            leader = leader or resumption
            loader.resume(resumption)
            if place is None and not self._same_data:
                reasons.append(f"{sizes}, and {unknown_order(loader, position)}")
            elif place is None and (change := changed_data(loader, position)):
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
