"""Save and resume one Trainer's run, in the order of Lightning's hooks.

``restore`` loads the checkpoint of a fit, ``start_training`` restores every rank's position, ``save`` saves it, also
when the run ends early. Lightning's checkpoint dict has the shared state; each rank adds its random states and its
position in the data. Must not know how modules are sharded.

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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.checkpoint import check_loaded, load, mark_partly_loaded
from lightning_shardckpt.checkpoint.describe import RANK_STATE
from lightning_shardckpt.checkpoint.load_job import LoadTargets
from lightning_shardckpt.checkpoint_io import ShardCkptIO, as_trainer_checkpoint
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.compat.lightning_loops import batches_drawn, begin_loaders, skip_sigterm_broadcast
from lightning_shardckpt.compat.lightning_runs import restore_modules_and_callbacks
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import StateError, UnsupportedCodeError
from lightning_shardckpt.sources.key_mapping import map_names
from lightning_shardckpt.sources.model_names import fit_names
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.data_position import make_resumable
from lightning_shardckpt.state.model import LoadedModules
from lightning_shardckpt.storage.router import file_path
from lightning_shardckpt.strategy.ckpt_path import JoiningLauncher, may_lack_weights
from lightning_shardckpt.strategy.resume import (
    DataShare,
    Position,
    batches_done,
    record_position,
    resume_training,
    start_loaders,
    watch_end,
)
from lightning_shardckpt.system.host import Tuning, drain_all, gc_paused
from lightning_shardckpt.system.random_generators import set_rng_state
from lightning_shardckpt.system.text import count_text


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A load of a checkpoint, which Lightning's later calls finish."""

    path: str
    modules: LoadedModules  # its own code may have to load entries
    optimizers: list[tuple[Optimizer, list[dict[str, Any]]]] | None  # of a fit, with copies of their param groups


def describe_trainer(checkpoint: dict[str, Any], position: Position, share: DataShare) -> dict[str, Any]:
    """Return Lightning's checkpoint dict at a position, with the state of this rank alone, for ``ShardCkptIO``."""
    of_rank = {"place": asdict(share), "rng": position.rng, "positions": position.loaders}
    checkpoint = {**checkpoint, RANK_STATE: of_rank}
    if loops := checkpoint.get("loops"):
        fit_loop = dict(position.fit_loop or loops["fit_loop"])
        if position.fit_loop is not None:
            checkpoint["epoch"] = fit_loop["epoch_progress"]["current"]["completed"]
        # the positions of each rank have the state of the loaders
        fit_loop["state_dict"] = {k: v for k, v in fit_loop["state_dict"].items() if k != "combined_loader"}
        checkpoint["loops"] = {**loops, "fit_loop": fit_loop}
    return checkpoint


class RunCheckpoints:
    """The checkpoints of one fit, validate, test or predict. Construct it before the Trainer registers its handlers.

    ``before`` are those of the Trainer's last run.

    Attributes:
        has_left: True if the hooks after an exception are done.
        is_told: True if this rank has got SIGTERM.
        ended_at: the position after the last batch of a fit, until training starts or continues.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        launcher: JoiningLauncher,
        ranks: Ranks,
        share: DataShare,
        before: RunCheckpoints | None,
        *,
        tuning: Tuning,
    ) -> None:
        self.has_left, self.is_told, self._previous_handler = False, False, signal.getsignal(signal.SIGTERM)
        self._trainer, self._launcher, self._ranks, self._share, self._tuning = trainer, launcher, ranks, share, tuning
        self._is_fit = trainer.state.fn == TrainerFn.FITTING
        self.ended_at: Position | None = None if self._is_fit or before is None else before.ended_at
        self._all_have_it: bool | None = None  # of an exception; None if that is not known
        self._loaded: _Loaded | None = None  # until Lightning has finished it
        self._resume: Callable[[], tuple[Callable[[], None], bool]] | None = None
        self._loaders_wait = False  # for the position to resume from
        self._validation_rng: Mapping[str, Any] | None = None

    # --- the load ---

    @property
    def path_to_resume(self) -> str | None:
        """The path of the checkpoint to load; None without one."""
        path = self._launcher.ckpt_path
        return None if path is None else file_path(path)

    def restores(self) -> bool:
        """Return True if a checkpoint will fill the whole module. Collective: every rank must call it."""
        path, phase = self.path_to_resume, "deciding whether initial weights are needed"
        return not self._ranks.step(phase, lambda: path is None or may_lack_weights(self._trainer, path), any)

    def restore(self) -> None:
        """Load the checkpoint of a fit before ``on_fit_start``, as on one process.

        Collective: every rank must call it. Raises UnsupportedCodeError with a BaseFinetuning callback.
        """
        if not self._is_fit or self.path_to_resume is None:
            return
        for callback in self._trainer.callbacks:  # type: ignore[attr-defined]  # set late
            if isinstance(callback, BaseFinetuning):
                raise UnsupportedCodeError(
                    f"a fit with {type(callback).__name__} cannot resume: Lightning does not restore which parameters "
                    "it has unfrozen. Give all parameters to the optimizer, and set requires_grad by the "
                    "number of the epoch, in on_train_start and on_train_epoch_start"
                )
        restore_modules_and_callbacks(self._trainer, self.path_to_resume)

    def load(self, io: ShardCkptIO, path: str | os.PathLike[str], weights_only: bool | None) -> dict[str, Any]:
        """Fill model and optimizers in place, and return the rest as Lightning's dict.

        In it, ``state_dict`` holds the filled tensors of the module; for a module with load hooks or
        ``on_load_checkpoint`` it holds entries that the module doesn't have yet. ``optimizer_states`` is None in a fit,
        so hooks that read it get Python's error.

        Collective: every rank must call it. ``weights_only`` is by default the argument of the Trainer's method.
        """
        trainer, module, path = self._trainer, self._trainer.lightning_module, str(path)
        with gc_paused():
            live = live_state_dict(module)
        optimizers = trainer.strategy.optimizers if self._is_fit else None
        is_changed = is_overridden("on_load_checkpoint", module, pl.LightningModule)  # it may read the old values
        targets = LoadTargets.of_module(module, live, io.names, optimizers, is_changed=is_changed)
        names = io.names.state or {*targets.model.tensors, *targets.model.aliases}

        def fit_source(source: Source) -> tuple[Source, list[str]]:
            source, problems = map_names(source, io.key_mapping)
            source, more = fit_names(source, module, names) if source.has_weights_only else (source, [])
            return source, problems + more

        drain_all()
        weights_only = self._launcher.weights_only if weights_only is None else weights_only
        result = load(
            file_path(path),
            replace(targets, fit_source=fit_source, objects=[module]),
            ranks=self._ranks,
            options=replace(io.load_options, strict=module.strict_loading, weights_only=weights_only is not False),
            pick_rank=self._share.source_rank,
            storage=io.storage,
        )
        for note in result.notes:
            rank_zero_warn(note)
        modules, copies = LoadedModules({"": module}, live, result.hooked, io.names), None
        if optimizers is not None:
            copies = [(one, [_copy_group(group) for group in one.param_groups]) for one in optimizers]
        self._loaded = _Loaded(path, modules, copies)
        rank_state = result.trainer.pop(RANK_STATE)
        checkpoint = as_trainer_checkpoint(result.trainer, path, fitting=self._is_fit)
        checkpoint["state_dict"] = modules.state_dict(result.extra_state)
        checkpoint["optimizer_states"] = None if self._is_fit else []
        if self._is_fit and rank_state is not None:
            fit_loop = checkpoint.get("loops", {}).get("fit_loop")
            if fit_loop is not None and batches_done(fit_loop) is not None:
                fit_loop["epoch_loop.batch_progress"]["is_last_batch"] = False  # an unfinished one is drawn again
            self._resume = partial(resume_training, trainer, checkpoint, rank_state, self._share)
            self._validation_rng = rank_state["rng"]
        return checkpoint

    def finish_load(self, module: pl.LightningModule, state_dict: dict[str, Any]) -> None:
        """Load entries that were not filled in place, that hooks have changed, or that the module's own code loads.

        Collective: every rank must call it. For hooks of callbacks, which run next, ``state_dict`` holds copies then.
        """
        if self._loaded is None:
            return
        modules, path = self._loaded.modules, self._loaded.path

        def load() -> list[str]:
            return modules.load(state_dict, strict=module.strict_loading, keep_parameters=self._is_fit)

        with mark_partly_loaded([module], path):
            phase = f"loading the rest of {path!r} into {type(module).__name__}"
            notes: list[str] = self._ranks.step(phase, load, lambda every: sorted({*chain(*every)}))
        if notes:
            count = count_text(len(notes), "difference")
            rank_zero_warn(f"{count} between {path!r} and this model:\n  " + "\n  ".join(notes))
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]  # set late
        if any(is_overridden("on_load_checkpoint", callback, Callback) for callback in callbacks):
            live = modules.live
            state_dict.update(deepcopy({name: v for name, v in state_dict.items() if v is live.get(name)}))
        if self._loaded.optimizers is None:
            self._loaded = None

    @property
    def is_loaded(self) -> bool:
        """True if the model and the optimizers of a fit were loaded, before its hooks."""
        return self._loaded is not None

    def finish_optimizers(self, states: object) -> None:
        """Set the hyper-parameters that were loaded again.

        Lightning's own strategies load optimizers after ``on_fit_start``, which overwrites its changes of settings.
        Raises StateError if hooks replaced parameters of an optimizer, or ``optimizer_states``, which are ``states``.
        """
        loaded, self._loaded = self._loaded, None
        for optimizer, copies in (loaded.optimizers or ()) if loaded is not None else ():
            groups = optimizer.param_groups
            if states is not None or [_ids(group) for group in groups] != [_ids(group) for group in copies]:
                raise StateError(
                    f"hooks changed optimizer_states or the parameters of {type(optimizer).__name__} after its state "
                    "was loaded, which is before on_fit_start. Replace parameters in __init__, setup or "
                    "configure_model, and change the optimizer itself in on_train_start"
                )
            for group, copy in zip(groups, copies, strict=True):
                group.update({key: value for key, value in copy.items() if key != "params"})

    # --- training ---

    def begin_loader(self, loader: object) -> None:
        """Make a training loader resumable. Call it for every loader, before Lightning begins it."""
        if self._trainer.training and self._is_fit:
            self._loaders_wait = self._resume is not None or self.path_to_resume is not None
            make_resumable(loader, partial(batches_drawn, self._trainer), waits=self._loaders_wait)

    def start_training(self) -> Callable[[], None]:
        """Watch for SIGTERM, restore the position of the checkpoint, and record that of the run's end; return the undo.

        The handler replaces Lightning's; Lightning restores the previous one.
        """
        trainer, previous = self._trainer, self._previous_handler
        self.is_told, self.ended_at = False, None

        def handler(number: int, frame: FrameType | None) -> None:
            self.is_told = True
            if callable(previous):
                previous(number, frame)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        with ExitStack() as undo:
            undo.callback(skip_sigterm_broadcast(trainer))
            undo.callback(watch_end(trainer, partial(setattr, self, "ended_at")))
            if self._resume is not None:
                undo_resume, validates = self._resume()
                undo.callback(undo_resume)
                self._resume, self._validation_rng = None, self._validation_rng if validates else None
            elif self._loaders_wait:
                start_loaders(trainer)
                begin_loaders(trainer)
            self._loaders_wait = False
            return undo.pop_all().close

    def end(self) -> None:
        """Keep the position at the end of a fit. Call it before Lightning shuts the loaders down."""
        if self._is_fit:
            self.ended_at = self.ended_at or record_position(self._trainer)
        if self._loaders_wait:  # training has not started
            start_loaders(self._trainer)

    def start_validation(self) -> None:
        """Restore the random state of an interrupted validation. Call it when a validation starts.

        Its loaders begin again, and hooks of its start run again; both may have drawn random numbers.
        """
        if self._validation_rng is not None and self._resume is None:
            set_rng_state(self._validation_rng)
            self._validation_rng = None

    # --- saves, and the end of a run ---

    def save(
        self, io: ShardCkptIO, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None
    ) -> None:
        """Write Lightning's checkpoint dict; after an exception only if all ranks have it. Collective."""

        def save() -> None:
            check_loaded([self._trainer.lightning_module])
            position = self.ended_at or record_position(self._trainer)
            described = describe_trainer(checkpoint, position, self._share)
            io.save_checkpoint(described, path, storage_options)

        if not self._trainer.interrupted or self.has_left:
            save()
        elif self._all_have_it is not False:
            self._save_after_exception(save, io.wait)

    def _save_after_exception(self, save: Callable[[], None], wait: Callable[[], None]) -> None:
        """Save if all ranks have the exception; else, or if the save fails, only warn.

        Waits for asynchronous saves before and after, since the process may end.
        """
        try:
            if not self._trainer.received_sigterm and self._all_have_it is None:
                timeout_s = self._tuning.exception_agreement_s
                self._ranks.step("agreeing on a last checkpoint", lambda: None, lambda _: None, timeout_s=timeout_s)
            try:
                wait()
            except Exception as error:  # on all ranks; the last checkpoint must be saved anyway
                warnings.warn(f"before the exception, a save had failed: {error}", stacklevel=2)
            save()
            wait()
        except Exception as error:
            warnings.warn(f"no checkpoint was saved after the exception: {error}", stacklevel=2)
            self._all_have_it = False
        else:
            self._all_have_it = True

    @property
    def answers_alone(self) -> bool:
        """True if hooks after an exception run on this rank, and maybe not on the other ranks."""
        trainer = self._trainer  # after a signal, all ranks have agreed to stop
        return trainer.interrupted and not (trainer.received_sigterm or self.has_left or self._all_have_it)


def _copy_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a param group with the same parameters."""
    return {key: list(value) if key == "params" else deepcopy(value) for key, value in group.items()}


def _ids(group: Mapping[str, Any]) -> list[int]:
    return [id(parameter) for parameter in group["params"]]
