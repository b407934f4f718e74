"""Save and resume one Trainer's run: its place in training and in the data, in the order of Lightning's hooks.

``setup`` loads the checkpoint of a fit, ``start`` puts every rank where it was, ``save`` notes where that is, also when
the run ends early. What is sharded, and how it is loaded, is not known here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_loops import begin_loaders
from lightning_shardckpt.compat.lightning_trainer import assigned_path, requeued_path, restore_modules_and_callbacks
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.data_position import ResumableLoader
from lightning_shardckpt.state.model import WholeNames
from lightning_shardckpt.state.module_io import load_edited, not_live
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.strategy.ckpt_path import ResolvingLauncher
from lightning_shardckpt.strategy.lightning_callbacks import keep_groups
from lightning_shardckpt.strategy.module_record import check_filled, is_half_filled
from lightning_shardckpt.strategy.preemption import Ending, save_after_exception
from lightning_shardckpt.strategy.resume import Continuation
from lightning_shardckpt.strategy.stop_position import Stopping
from lightning_shardckpt.strategy.trainer_checkpoint import DataShare, load_checkpoint, save_checkpoint


class RunCheckpoints:
    """The checkpoints of one strategy's runs.

    Attributes:
        restored: whether the checkpoint of this fit is loaded already, before Lightning does it.
        stopping: notes where a run ended.
    """

    def __init__(self) -> None:
        self.restored = False
        self.stopping = Stopping()
        self._ending = Ending.NONE
        self._continuation: Continuation | None = None
        self._awaited = False
        self._loaded: tuple[dict[str, Any], frozenset[str]] | None = None

    # --- a run begins ---

    def begin(self) -> None:
        """Call for every fit, validate, test and predict."""
        self._ending, self.restored = Ending.NONE, False

    def begin_setup(self, *, fitting: bool) -> None:
        """Call when the strategy is set up, before anything is loaded."""
        self._continuation = self._loaded = None
        if fitting:
            self.stopping.forget()

    def restore(self, trainer: pl.Trainer, launcher: object, ranks: Ranks) -> None:
        """Load the checkpoint of a fit, so that ``on_fit_start`` sees it, as on one process.

        What Lightning itself has still to find, such as "hpc", it loads after that hook.
        Collective: every rank must call it.
        """
        will_resume = partial(self.will_resume, trainer, launcher)
        if trainer.state.fn == TrainerFn.FITTING and ranks.step("looking for a checkpoint", will_resume, any):
            path = _path_to_resume(trainer, launcher)
            restore_modules_and_callbacks(trainer, None if path is None else os.fspath(path))
            keep_groups(trainer)
            self.restored = True

    def will_resume(self, trainer: pl.Trainer, launcher: object) -> bool:
        """Return whether a checkpoint is going to be loaded, as far as this rank sees."""
        path = _path_to_resume(trainer, launcher)
        given = path is not None and (is_url(path) or os.path.lexists(path))
        return given or requeued_path(trainer) is not None

    def load(
        self,
        io: ShardCkptIO,
        trainer: pl.Trainer,
        share: DataShare,
        path: str | os.PathLike[str],
        weights_only: bool | None,
    ) -> dict[str, Any]:
        """Fill model and optimizers, and return the rest as Lightning's dict. Collective: every rank must call it."""
        checkpoint, rank_state = load_checkpoint(io, trainer, share, path, weights_only=weights_only)
        state_dict = dict(checkpoint["state_dict"])
        self._loaded = state_dict, not_live(trainer.lightning_module, state_dict)
        if trainer.state.fn == TrainerFn.FITTING and rank_state is not None:
            self._continuation = Continuation(checkpoint, rank_state, share, io.resume)
        return checkpoint

    def put_edited(self, module: pl.LightningModule, state_dict: Mapping[str, Any], names: WholeNames) -> None:
        """Put into the module what could not be filled in place, and what ``on_load_checkpoint`` hooks have changed."""
        if self._loaded is not None:
            loaded, copies = self._loaded
            self._loaded = None
            load_edited(module, loaded, state_dict, copies, names)

    # --- training begins ---

    def await_start(self, loader: ResumableLoader | None, trainer: pl.Trainer, launcher: object) -> None:
        """Call for every loader of training, with None for one that can't wait until training starts."""
        if loader is not None and (self._continuation is not None or self.will_resume(trainer, launcher)):
            loader.wait()
            self._awaited = True
        elif loader is None and self._continuation is not None:
            self._continuation.before_loaders()

    def start(self, trainer: pl.Trainer) -> None:
        """Call when training starts: go on where the checkpoint was saved."""
        self.stopping.watch(trainer)
        if self._continuation is not None:
            self._continuation.apply(trainer)
        elif self._awaited:
            begin_loaders(trainer)
        self._continuation, self._awaited = None, False

    # --- saves, and the end ---

    def save(
        self,
        io: ShardCkptIO,
        trainer: pl.Trainer,
        ranks: Ranks,
        share: DataShare,
        checkpoint: dict[str, Any],
        path: str | os.PathLike[str],
        storage_options: Any | None,
        *,
        meeting_s: float,
    ) -> None:
        """Write Lightning's checkpoint dict; after an exception only if all ranks come. Collective: all must call it.

        Args:
            io: told who saves together.
            trainer: whose run it is.
            ranks: who saves together.
            share: which data this rank trains on.
            checkpoint: Lightning's dict.
            path: where to.
            storage_options: for a URL.
            meeting_s: see ``save_after_exception``.
        """
        if trainer.interrupted and is_half_filled(trainer.lightning_module):
            rank_zero_warn(f"{os.fspath(path)!r} was not saved: the module was half filled when its load failed")
            return
        check_filled(trainer.lightning_module)
        position = self.stopping.position(trainer)
        save = partial(save_checkpoint, io, position, share, checkpoint, path, storage_options)
        if not trainer.interrupted or self._ending is Ending.LEFT:
            save()
        elif self._ending is not Ending.ALONE:
            agreed = trainer.received_sigterm or self._ending is Ending.TOGETHER
            self._ending = save_after_exception(ranks, save, io.wait, agreed=agreed, meeting_s=meeting_s)

    def answers_alone(self, trainer: pl.Trainer) -> bool:
        """Return whether hooks after an exception run here, and perhaps not on the other ranks."""
        if not trainer.interrupted or trainer.received_sigterm:  # all agreed to end
            return False
        return self._ending in (Ending.NONE, Ending.ALONE)

    def leave(self) -> None:
        """Call when all hooks after an exception are done."""
        self._ending = Ending.LEFT


def _path_to_resume(trainer: pl.Trainer, launcher: object) -> str | os.PathLike[str] | None:
    """Return the path that the user gave; None where Lightning has still to find one."""
    assert isinstance(launcher, ResolvingLauncher)
    return launcher.resumes_from or assigned_path(trainer)
