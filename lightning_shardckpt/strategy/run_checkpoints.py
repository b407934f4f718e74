"""Save and resume one Trainer's run: its place in training and in the data, in the order of Lightning's hooks.

``restore`` loads the checkpoint of a fit, ``start`` puts every rank where it was, ``save`` notes where that is, also
when the run ends early. What is sharded, and how it is loaded, is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_loops import batches_drawn, begin_loaders, is_stateful
from lightning_shardckpt.compat.lightning_trainer import assigned_path, restore_modules_and_callbacks
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.data_position import ResumableLoader, make_resumable
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import load_rest, not_live
from lightning_shardckpt.state.stateful_loader import StatefulLoader, wait, watch_state
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.strategy.ckpt_path import ResolvingLauncher, begins_anew
from lightning_shardckpt.strategy.lightning_callbacks import keep_groups
from lightning_shardckpt.strategy.lightning_module import check_filled, filling, is_half_filled
from lightning_shardckpt.strategy.preemption import Ending, save_after_exception
from lightning_shardckpt.strategy.resume import Continuation, DataShare, Stopping
from lightning_shardckpt.strategy.trainer_checkpoint import LoadedModule, load_checkpoint, save_checkpoint
from lightning_shardckpt.system.random_generators import get_rng_state, set_rng_state
from lightning_shardckpt.system.text import count_text


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
        self._loaded: LoadedModule | None = None

    # --- a run begins ---

    def begin(self, run: TrainerRun) -> None:
        """Call for every fit, validate, test and predict."""
        self._run, self._ending, self.restored = run, Ending.NONE, False

    def begin_setup(self) -> None:
        """Call when the strategy is set up, before anything is loaded."""
        self._continuation = self._loaded = self._validation_rng = None
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
            self._continuation = Continuation(checkpoint, rank_state, run.share, io.resume)
        return checkpoint

    def finish_load(self, module: pl.LightningModule, state_dict: Mapping[str, Any], names: WholeNames) -> None:
        """Load what could not be filled in place, what hooks have changed, and what code of the module is to load.

        Collective: every rank must call it.
        """
        if self._loaded is None:
            return
        (path, live, for_code), self._loaded = self._loaded, None

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
