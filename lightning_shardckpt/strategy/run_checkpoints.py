"""Save and resume one Trainer's run, in the order of Lightning's hooks.

``restore`` loads the checkpoint of a fit, ``start_training`` restores every rank's position, ``save`` saves it, also
when the run ends early. Must not know how modules are sharded or loaded.

Lightning's handler of SIGTERM (2.6.6) communicates inside the signal handler and handles only rank 0: a signal to
another rank, or during a collective, hangs. Here the handler only sets a flag; before the next batch all ranks agree,
and after it all raise Lightning's SIGTERMException, at the same step. ``OnExceptionCheckpoint`` and
``ModelCheckpoint(save_on_exception=True)`` save there. After an exception on only some ranks they can't, and must
neither wait for the other ranks nor hide the exception.
"""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from enum import Enum, auto
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.checkpoint.partly_loaded import check_loaded, is_partly_loaded, mark_partly_loaded
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.dtensor import copy_state_dict
from lightning_shardckpt.compat.lightning_loops import (
    begin_loaders,
    repeat_last_batch,
    skip_sigterm_broadcast,
)
from lightning_shardckpt.compat.lightning_trainer import (
    assigned_path,
    receive_sigterm,
    reset_loaded_metrics,
    restore_modules_and_callbacks,
    sigterm_handler_before,
    stored_metrics,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.storage.router import file_path, is_url
from lightning_shardckpt.strategy.ckpt_path import ResolvingLauncher, needs_weights
from lightning_shardckpt.strategy.lightning_module import keep_param_groups
from lightning_shardckpt.strategy.resume import (
    DataShare,
    ResumePoint,
    StopPosition,
    batches_done,
    prepare_loader,
    start_loaders,
)
from lightning_shardckpt.strategy.trainer_checkpoint import Loaded, describe_trainer, load_checkpoint
from lightning_shardckpt.system.random_generators import set_rng_state
from lightning_shardckpt.system.text import count_text


class Preemption:
    """The SIGTERM handler of a run. Replaces Lightning's handler; Lightning restores the previous one.

    Attributes:
        is_told: True if this rank has got the signal.
    """

    def __init__(self) -> None:
        self.is_told = False

    def watch(self, trainer: pl.Trainer) -> Callable[[], None]:
        """Install the handler when training starts, after Lightning's handlers; return the undo of Lightning's loop."""
        self.is_told = False
        previous = sigterm_handler_before(trainer)

        def handler(number: int, frame: FrameType | None) -> None:
            self.is_told = True
            if previous is not None:
                previous(number, frame)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        return skip_sigterm_broadcast(trainer)

    def stop(self, trainer: pl.Trainer) -> None:
        """Make Lightning stop after this batch, as if this rank had got the signal; every rank must call it."""
        self.is_told = False
        receive_sigterm(trainer)


class Ending(Enum):
    """The state of a rank after an exception."""

    NONE = auto()  # no exception, or not known whether all ranks have it
    ALONE = auto()  # other ranks don't have it: no save
    TOGETHER = auto()  # all ranks have it, and save
    LEFT = auto()  # all hooks after the exception are done


def save_after_exception(
    ranks: Ranks, save: Callable[[], None], wait: Callable[[], None], *, agreed: bool, agree_within_s: float
) -> Ending:
    """Save if all ranks have an exception; else, or if the save fails, only warn.

    Collective for the ranks with an exception.

    Args:
        ranks: the ranks that save together.
        save: writes the checkpoint.
        wait: waits for asynchronous saves; called before and after the save, since the process may end.
        agreed: True if all ranks are known to have the exception, as for a signal; else they must agree.
        agree_within_s: the timeout of this agreement.
    """
    try:
        if not agreed:
            ranks.step("agreeing on a last checkpoint", lambda: None, lambda _: None, timeout_s=agree_within_s)
        try:
            wait()
        except Exception as error:  # on all ranks; the last checkpoint must be saved anyway
            warnings.warn(f"before the exception, a save had failed: {error}", stacklevel=2)
        save()
        wait()
    except Exception as error:
        warnings.warn(f"no checkpoint was saved after the exception: {error}", stacklevel=2)
        return Ending.ALONE
    return Ending.TOGETHER


class RunCheckpoints:
    """The checkpoints of one fit, validate, test or predict.

    Args:
        trainer: of the run.
        launcher: has the path to resume from.
        ranks: the ranks that save and load together.
        share: this rank's part of the data.
        stop_position: the position at the end of the last fit.
        agree_within_s: as in `save_after_exception`.

    Attributes:
        restored: True if the checkpoint of this fit is loaded already, before Lightning loads it.
        stop_position: the position at the end of the last fit.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        launcher: ResolvingLauncher,
        ranks: Ranks,
        share: DataShare,
        stop_position: StopPosition,
        *,
        agree_within_s: float,
    ) -> None:
        self.restored, self.stop_position = False, stop_position
        self._trainer, self._launcher, self._ranks = trainer, launcher, ranks
        self._share, self._agree_within_s, self._ending = share, agree_within_s, Ending.NONE
        self._is_fit = trainer.state.fn == TrainerFn.FITTING
        self._loaded: Loaded | None = None
        self._resumes: Callable[[], ResumePoint] | None = None
        self._loaders_wait = False  # for the position to resume from
        self._validation_rng: Mapping[str, Any] | None = None
        if self._is_fit:
            stop_position.reset()

    # --- the load ---

    @property
    def path_to_resume(self) -> str | None:
        """The path of the checkpoint to load; None without one."""
        path = self._launcher.resumes_from or assigned_path(self._trainer)
        return None if path is None else file_path(path)

    def _will_resume(self) -> bool:
        """Return True if this rank finds a checkpoint to load."""
        path = self.path_to_resume
        return path is not None and (is_url(path) or os.path.lexists(path))

    def needs_weights(self) -> bool:
        """Return True if the module may need initial weights, as seen by this rank."""
        return needs_weights(self._trainer, self.path_to_resume)

    def restore(self) -> None:
        """Load the checkpoint of a fit before ``on_fit_start``, as on one process.

        Collective: every rank must call it.
        """
        if self._is_fit and self._ranks.step("looking for a checkpoint", self._will_resume, any):
            restore_modules_and_callbacks(self._trainer, self.path_to_resume)
            keep_param_groups(self._trainer)
            self.restored = True

    def load(self, io: ShardCkptIO, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        """Fill model and optimizers, and return the rest as Lightning's dict. Collective: every rank must call it.

        Args:
            io: attached to the ranks that load together.
            path: of the checkpoint.
            weights_only: for a file of ``torch.save``; by default the argument of the Trainer's method.
        """
        weights_only = self._launcher.weights_only if weights_only is None else weights_only
        checkpoint, rank_state, self._loaded = load_checkpoint(
            io, self._trainer, self._share, path, weights_only=weights_only
        )
        if self._is_fit and rank_state is not None:
            loops = checkpoint.get("loops")
            if loops is not None and batches_done(loops) is not None:
                repeat_last_batch(loops["fit_loop"])
            self._resumes = partial(ResumePoint.of, checkpoint, rank_state, self._share)
        return checkpoint

    def finish_load(self, module: pl.LightningModule, state_dict: dict[str, Any]) -> None:
        """Load entries that were not filled in place, that hooks have changed, or that the module's own code loads.

        Collective: every rank must call it. For hooks of callbacks, which run next, ``state_dict`` holds copies then.
        """
        if self._loaded is None or (loaded := self._loaded.module) is None:
            return
        path, live = self._loaded.path, loaded.live
        self._loaded = self._loaded._replace(module=None)

        def load() -> list[str]:
            return loaded.load(state_dict, strict=module.strict_loading, keep_parameters=self._is_fit)

        is_first = self._share.data_rank == 0
        with mark_partly_loaded([module], path), nullcontext() if is_first else reset_loaded_metrics(module):
            phase = f"loading the rest of {path!r} into {type(module).__name__}"
            notes: list[str] = self._ranks.step(phase, load, lambda every: sorted({*chain(*every)}))
        if notes:
            count = count_text(len(notes), "difference")
            rank_zero_warn(f"{count} between {path!r} and this model:\n  " + "\n  ".join(notes))
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set late
        if any(is_overridden("on_load_checkpoint", callback, Callback) for callback in callbacks):
            state_dict.update(copy_state_dict({name: v for name, v in state_dict.items() if v is live.get(name)}))

    @property
    def shows_optimizers(self) -> bool:
        """True if hooks of a fit see the state of optimizers that was loaded."""
        return self._loaded is not None and self._loaded.optimizers is not None

    def finish_optimizers(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Check that hooks have left the state of optimizers that they were shown, and set its settings again."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None and loaded.optimizers is not None:
            loaded.optimizers.take(states)

    # --- training ---

    def begin_loader(self, loader: object) -> None:
        """Make a training loader resumable. Call it for every loader, before Lightning begins it."""
        if self._trainer.training and self._is_fit:
            self._loaders_wait = self._resumes is not None or self._will_resume()
            prepare_loader(self._trainer, loader, waits=self._loaders_wait)

    def start_training(self) -> Callable[[], None]:
        """Restore the position of the checkpoint, and record that of the run's end; return the undo."""
        undo, trainer = ExitStack(), self._trainer
        undo.callback(self.stop_position.watch(trainer))
        if self._resumes is not None:
            point, self._resumes = self._resumes(), None
            undo.callback(point.resume_training(trainer))
            self._validation_rng = point.rng if point.validates else None
        elif self._loaders_wait:
            start_loaders(trainer, [], is_over=False, same_ranks=False)
            begin_loaders(trainer)
        self._loaders_wait = False
        return undo.close

    def start_validation(self) -> None:
        """Restore the random state of an interrupted validation. Call it when a validation starts.

        Its loaders begin again, and hooks of its start run again; both may have drawn random numbers.
        """
        if self._validation_rng is not None:
            set_rng_state(self._validation_rng)
            self._validation_rng = None

    # --- saves, and the end of a run ---

    def save(
        self,
        io: ShardCkptIO,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None,
    ) -> None:
        """Write Lightning's checkpoint dict; after an exception only if all ranks have it.

        Collective: every rank must call it.

        Args:
            io: attached to the ranks that save together.
            checkpoint: Lightning's dict.
            path: of the checkpoint.
            storage_options: for a URL.
        """
        trainer = self._trainer
        if trainer.interrupted and is_partly_loaded(trainer.lightning_module):
            rank_zero_warn(f"{os.fspath(path)!r} was not saved: its load failed, and the module is partly loaded")
            return
        check_loaded([trainer.lightning_module])
        if self.answers_alone and self._share.data_size > 1 and stored_metrics(trainer.lightning_module):
            warnings.warn(
                "no checkpoint was saved after the exception: the states of metrics that are saved with the module "
                "(persistent(True)) need all ranks, and some may not have the exception",
                stacklevel=2,
            )
            return
        described = describe_trainer(checkpoint, self.stop_position.position(trainer), self._share)
        save = partial(io.save_checkpoint, described, path, storage_options)
        if not trainer.interrupted or self._ending is Ending.LEFT:
            save()
        elif self._ending is not Ending.ALONE:
            agreed = trainer.received_sigterm or self._ending is Ending.TOGETHER
            self._ending = save_after_exception(
                self._ranks, save, io.wait, agreed=agreed, agree_within_s=self._agree_within_s
            )

    @property
    def answers_alone(self) -> bool:
        """True if hooks after an exception run on this rank, and maybe not on the other ranks."""
        if not self._trainer.interrupted or self._trainer.received_sigterm:
            return False  # after a signal, all ranks have agreed to stop
        return self._ending in (Ending.NONE, Ending.ALONE)

    def leave(self) -> None:
        """End the hooks after an exception."""
        self._ending = Ending.LEFT
