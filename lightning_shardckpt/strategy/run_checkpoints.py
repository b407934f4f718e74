"""Save and resume one Trainer's run: its place in training and in the data, in the order of Lightning's hooks.

``restore`` loads the checkpoint of a fit, ``start`` puts every rank where it was, ``save`` notes where that is, also
when the run ends early. What is sharded, and how it is loaded, is not known here.

Lightning's own handler of SIGTERM communicates inside the signal handler and looks at rank 0 alone (2.6.6): a signal to
another rank, or in the middle of a collective, hangs. Here the handler only remembers; before the next batch all ranks
agree, and after it all of them leave with Lightning's SIGTERMException, at the same step. ``OnExceptionCheckpoint`` and
``ModelCheckpoint(save_on_exception=True)`` save there. After an exception that only some ranks got they can't, and
must neither wait for the others nor hide what happened.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.dtensor import copied_state_dict
from lightning_shardckpt.compat.lightning_loops import batches_drawn, begin_loaders, is_stateful, skip_sigterm_broadcast
from lightning_shardckpt.compat.lightning_trainer import (
    assigned_path,
    receive_sigterm,
    restore_modules_and_callbacks,
    sigterm_handler_before,
    upload_note,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.data_position import ResumableLoader, make_resumable
from lightning_shardckpt.state.loaded_optimizers import LoadedOptimizers
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import load_rest, not_live
from lightning_shardckpt.state.stateful_loader import StatefulLoader, wait, watch_state
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.strategy.ckpt_path import ResolvingLauncher, begins_anew
from lightning_shardckpt.strategy.lightning_module import check_filled, filling, is_half_filled, keep_groups
from lightning_shardckpt.strategy.resume import Continuation, DataShare, Stopping
from lightning_shardckpt.strategy.trainer_checkpoint import Loaded, load_checkpoint, save_checkpoint
from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state
from lightning_shardckpt.system.text import count_text


class Preemption:
    """The signal that tells this run to end. Replaces Lightning's handler; Lightning restores what was before it."""

    def __init__(self) -> None:
        self._told = False
        self._undo: Callable[[], None] = lambda: None

    def watch(self, trainer: pl.Trainer) -> None:
        """Call when training starts, after Lightning has registered its handlers; undone by ``unwatch``."""
        self._told = False
        self._undo = skip_sigterm_broadcast(trainer)
        before = sigterm_handler_before(trainer)

        def handler(number: int, frame: FrameType | None) -> None:
            self._told = True
            if before is not None:
                before(number, frame)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def unwatch(self) -> None:
        """Leave Lightning's loop as it was."""
        self._undo()

    def agree(self, trainer: pl.Trainer, anybody: Callable[[bool], bool]) -> None:
        """Call before every batch, with a collective "or": makes Lightning stop after this batch, on all ranks alike.

        Collective: every rank of the world must call it.
        """
        if anybody(self._told):
            self._told = False
            receive_sigterm(trainer)


class Ending(Enum):
    """Progress of a rank after an exception: nothing known; no save with all others; all save; its hooks are done."""

    NONE = auto()
    ALONE = auto()
    TOGETHER = auto()
    LEFT = auto()


def save_after_exception(
    ranks: Ranks, save: Callable[[], None], wait: Callable[[], None], *, agreed: bool, meeting_s: float
) -> Ending:
    """Save if all ranks come to do so; else, or if it fails, say so in a warning and go on with the exception.

    Collective for the ranks that got an exception.

    Args:
        ranks: all that save together.
        save: writes the checkpoint.
        wait: for what is saved asynchronously; called before and after, since the process may be about to end.
        agreed: whether it is known that all ranks got it, as for a signal; else that is found out.
        meeting_s: ranks that got the same exception come within this time of each other.
    """
    try:
        if not agreed:
            ranks.step("meeting for a last checkpoint", lambda: None, lambda came: None, timeout_s=meeting_s)
        try:
            wait()
        except Exception as error:  # on all ranks alike; it must not cost the last checkpoint, too
            warnings.warn(f"before the exception, a save had failed: {error}", stacklevel=2)
        save()
        wait()
    except Exception as error:
        warnings.warn(f"no checkpoint was saved after the exception: {error}", stacklevel=2)
        return Ending.ALONE
    return Ending.TOGETHER


@dataclass(frozen=True, slots=True)
class TrainerRun:
    """One fit, validate, test or predict.

    Attributes:
        trainer: whose run it is.
        launcher: knows the path to resume from.
        ranks: who saves and loads together.
        share: the data on which this rank trains.
        meeting_s: ranks that got the same exception come to a last save within this time of each other.
    """

    trainer: pl.Trainer
    launcher: ResolvingLauncher
    ranks: Ranks
    share: DataShare
    meeting_s: float

    @property
    def is_fit(self) -> bool:
        return self.trainer.state.fn == TrainerFn.FITTING

    @property
    def path_to_resume(self) -> str | os.PathLike[str] | None:
        """The path of the checkpoint, if there is one to load."""
        return self.launcher.resumes_from or assigned_path(self.trainer)

    def will_resume(self) -> bool:
        """Return whether a checkpoint is going to be loaded, as far as this rank sees."""
        path = self.path_to_resume
        return path is not None and (is_url(path) or os.path.lexists(path))


class RunCheckpoints:
    """The checkpoints of one strategy's runs, one after the other.

    Attributes:
        restored: whether the checkpoint of this fit is loaded already, before Lightning does it.
        stopping: notes where a run ended.
    """

    def __init__(self) -> None:
        self.restored = False
        self.stopping = Stopping()
        self._run: TrainerRun | None = None
        self._ending = Ending.NONE
        self._continuation: Continuation | None = None
        self._awaited = False
        self._validation_rng: dict[str, Any] | None = None
        self._loaded: Loaded | None = None
        self._place: Callable[[], Continuation] | None = None
        self._optimizers: LoadedOptimizers | None = None

    # --- a run begins ---

    def begin(self, run: TrainerRun) -> None:
        """Call for every fit, validate, test and predict."""
        self._run, self._ending, self.restored = run, Ending.NONE, False

    def begin_setup(self) -> None:
        """Call when the strategy is set up, before anything is loaded."""
        self._continuation = self._place = self._loaded = self._optimizers = self._validation_rng = None
        if self._begun.is_fit:
            self.stopping.forget()

    @property
    def _begun(self) -> TrainerRun:
        assert self._run is not None, "no run has begun"
        return self._run

    def lacks_weights(self, io: ShardCkptIO) -> bool:
        """Return whether the module may need weights to begin with, as far as this rank sees."""
        run = self._begun
        leaves_some = run.is_fit and (io.resume_skip or "model" not in io.resume)
        return bool(leaves_some) or begins_anew(run.trainer, run.launcher)

    def restore(self) -> None:
        """Load the checkpoint of a fit, so that ``on_fit_start`` sees it, as on one process.

        Collective: every rank must call it.
        """
        run = self._begun
        if run.is_fit and run.ranks.step("looking for a checkpoint", run.will_resume, any):
            path = run.path_to_resume
            restore_modules_and_callbacks(run.trainer, None if path is None else os.fspath(path))
            keep_groups(run.trainer)
            self.restored = True
            if self._place is not None:  # read only now, since hooks may have changed the loops
                self._continuation, self._place = self._place(), None

    def load(self, io: ShardCkptIO, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        """Fill model and optimizers, and return the rest as Lightning's dict. Collective: every rank must call it.

        Args:
            io: told who loads together.
            path: of the checkpoint.
            weights_only: for a file of ``torch.save``; by default as the call of the Trainer said.
        """
        run = self._begun
        safe = run.launcher.weights_only if weights_only is None else weights_only
        loaded = load_checkpoint(io, run.trainer, run.share, path, weights_only=safe)
        checkpoint, rank_state, self._loaded = loaded
        if run.is_fit and rank_state is not None:
            self._place = partial(Continuation, checkpoint, rank_state, run.share, io.resume)
        self._optimizers = self._loaded.optimizers
        return checkpoint

    def finish_load(self, module: pl.LightningModule, state_dict: dict[str, Any], names: WholeNames) -> None:
        """Load what could not be filled in place, what hooks have changed, and what code of the module is to load.

        Collective: every rank must call it. For hooks of callbacks, which run next, ``state_dict`` holds copies then.
        """
        if self._loaded is None:
            return
        (path, live, for_code, _), self._loaded = self._loaded, None

        def load() -> list[str]:
            copies = not_live(module, live)
            strict, fit = module.strict_loading, self._begun.is_fit
            modules = {"": module}
            return load_rest(modules, live, state_dict, copies, for_code, names, strict=strict, keep_parameters=fit)

        with filling(module, path):
            phase = f"loading the rest of {path!r} into {type(module).__name__}"
            notes: list[str] = self._begun.ranks.step(phase, load, lambda every: sorted({*chain(*every)}))
        if notes:
            count = count_text(len(notes), "difference")
            rank_zero_warn(f"{count} between {path!r} and this model:\n  " + "\n  ".join(notes))
        callbacks: list[Callback] = self._begun.trainer.callbacks  # type: ignore[attr-defined]  # set late
        if any(is_overridden("on_load_checkpoint", callback, Callback) for callback in callbacks):
            state_dict.update(copied_state_dict(state_dict))

    @property
    def shows_optimizers(self) -> bool:
        """True if hooks of a fit see the state of optimizers that was loaded."""
        return self._optimizers is not None

    def finish_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Bring optimizers to what hooks have left of the state that they were shown."""
        if self._optimizers is not None:
            self._optimizers.take(states)
            self._optimizers = None

    # --- training begins ---

    def begin_loader(self, loader: object) -> None:
        """Call for every loader: one of training can resume after that, and waits until training starts, if it can."""
        run = self._run
        resumable = make_resumable(loader)
        if run is None or not (run.trainer.training and run.is_fit):
            return
        if isinstance(loader, ResumableLoader):
            loader.train()
        elif is_stateful(loader):
            resumable = watch_state(loader, partial(batches_drawn, run.trainer))
        if resumable and (self._continuation is not None or run.will_resume()):
            if isinstance(loader, StatefulLoader):
                wait(loader)
            elif isinstance(loader, ResumableLoader):
                loader.wait()
            self._awaited = True
        elif not resumable and self._continuation is not None:
            self._continuation.before_loaders()

    def start(self) -> None:
        """Call when training starts: go on where the checkpoint was saved."""
        trainer = self._begun.trainer
        self.stopping.watch(trainer)
        if self._continuation is not None:
            self._continuation.apply(trainer)
            self._validation_rng = get_rng_state() if self._continuation.validates else None
        elif self._awaited:
            begin_loaders(trainer)
        self._continuation, self._awaited = None, False

    def start_validation(self) -> None:
        """Call when a validation starts: the rest of an interrupted one goes on with its random state.

        It begins the loaders again, and runs the hooks of its start, which may have drawn random numbers already.
        """
        if self._validation_rng is not None:
            set_rng_state(self._validation_rng)
            self._validation_rng = None

    # --- saves, and the end ---

    def end(self) -> None:
        """Call when a run ends, before its loaders are taken down."""
        if self._run is not None:
            self.stopping.end(self._run.trainer)

    def save(
        self,
        io: ShardCkptIO,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None,
    ) -> None:
        """Write Lightning's checkpoint dict; after an exception only if all ranks come. Collective: all must call it.

        Args:
            io: told who saves together.
            checkpoint: Lightning's dict.
            path: where to.
            storage_options: for a URL.
        """
        run = self._begun
        trainer = run.trainer
        if trainer.interrupted and is_half_filled(trainer.lightning_module):
            rank_zero_warn(f"{os.fspath(path)!r} was not saved: the module was half filled when its load failed")
            return
        check_filled(trainer.lightning_module)
        position = self.stopping.position(trainer)
        save = partial(save_checkpoint, io, position, run.share, checkpoint, path, storage_options)
        if not trainer.interrupted or self._ending is Ending.LEFT:
            save()
        elif self._ending is not Ending.ALONE:
            agreed = trainer.received_sigterm or self._ending is Ending.TOGETHER
            self._ending = save_after_exception(run.ranks, save, io.wait, agreed=agreed, meeting_s=run.meeting_s)

    @property
    def answers_alone(self) -> bool:
        """True if hooks after an exception run here, and perhaps not on the other ranks."""
        if self._run is None or not self._run.trainer.interrupted or self._run.trainer.received_sigterm:
            return False  # if there was a signal, all agreed to end
        return self._ending in (Ending.NONE, Ending.ALONE)

    def leave(self) -> None:
        """Call when all hooks after an exception are done."""
        self._ending = Ending.LEFT


# ── the first look ────────────────────────────────────────────────────────────────────────────────────────────────────
# Before the first save, hours later: the state that a save would take is looked at when training begins, but for
# ``state_dict`` and loops, which are ours and Lightning's, and what ``on_save_checkpoint`` hooks add.


def look_at_saves(trainer: pl.Trainer, ranks: Ranks, *, pickle_objects: bool) -> None:
    """Warn of what will be missing in checkpoints, and refuse what can't be saved, if a callback is going to save.

    Collective: every rank of ``ranks`` must call it, when training starts.

    Args:
        trainer: whose training begins.
        ranks: who saves together.
        pickle_objects: as ``ShardCkptIO`` was told.

    Raises:
        StateError: on every rank, naming what cannot be stored on any, and the rank.
    """
    saving = list(_list_savers(trainer))
    if not saving:
        return
    weights_only = all(getattr(callback, "save_weights_only", False) for callback in saving)

    def look() -> list[str]:
        with isolate_rng():
            checkpoint = dict(_state_of(trainer, weights_only=weights_only))
        return list(snapshot(checkpoint, trainer.lightning_module, pickle_objects=pickle_objects).notes)

    notes = ranks.step("looking at what checkpoints of this run would hold", look, lambda found: found[0])
    for note in [*notes, upload_note(trainer)]:
        if note is not None:
            rank_zero_warn(note)


def _list_savers(trainer: pl.Trainer) -> Iterator[Callback]:
    for callback in () if trainer.fast_dev_run else trainer.checkpoint_callbacks:  # type: ignore[attr-defined]  # set later
        never = isinstance(callback, ModelCheckpoint) and callback.save_top_k == 0 and not callback.save_last
        if isinstance(callback, Checkpoint) and not never:
            yield callback


def _state_of(trainer: pl.Trainer, *, weights_only: bool) -> Iterator[tuple[str, Any]]:
    """Yield what Lightning's ``dump_checkpoint`` takes of what users bring, by its keys."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    for owner in (module, data):
        if owner is not None and owner.hparams:
            hyper = owner.hparams
            yield owner.CHECKPOINT_HYPER_PARAMS_KEY, dict(hyper) if isinstance(hyper, dict) else hyper
    if data is not None and (state := data.state_dict()):
        yield type(data).__qualname__, state
    if weights_only:
        return
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set later
    yield "callbacks", {one.state_key: state for one in callbacks if (state := one.state_dict())}
    yield "lr_schedulers", [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    yield "optimizer_states", [trainer.strategy.optimizer_state(optimizer) for optimizer in trainer.optimizers]
