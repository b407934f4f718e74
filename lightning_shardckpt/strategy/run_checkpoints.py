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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any, NoReturn

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.describe import RANK_STATE, check_loaded, is_partly_loaded, mark_partly_loaded
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint_io import ShardCkptIO, as_trainer_checkpoint
from lightning_shardckpt.compat.dtensor import copy_state_dict, live_state_dict
from lightning_shardckpt.compat.lightning_loops import begin_loaders, repeat_last_batch, skip_sigterm_broadcast
from lightning_shardckpt.compat.lightning_trainer import (
    assigned_path,
    receive_sigterm,
    restore_modules_and_callbacks,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.sources.key_mapping import map_names
from lightning_shardckpt.sources.model_names import fit_names
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.load_hooks import LoadedModules
from lightning_shardckpt.storage.router import file_path, is_url
from lightning_shardckpt.strategy.ckpt_path import ResolvingLauncher, needs_weights
from lightning_shardckpt.strategy.lightning_module import keep_param_groups, restore_param_groups
from lightning_shardckpt.strategy.resume import (
    DataShare,
    Position,
    StopPosition,
    batches_done,
    prepare_loader,
    resume_training,
    start_loaders,
)
from lightning_shardckpt.system.host import gc_paused
from lightning_shardckpt.system.random_generators import set_rng_state
from lightning_shardckpt.system.text import count_text

_CLI_MARK = "_instantiator"
"""The hyper-parameter by which Lightning marks modules that a LightningCLI has built."""


class Preemption:
    """The SIGTERM handler of a run. Replaces Lightning's handler; Lightning restores the previous one.

    Construct it before the Trainer registers its handlers.

    Attributes:
        is_told: True if this rank has got the signal.
    """

    def __init__(self) -> None:
        self.is_told, self._previous = False, signal.getsignal(signal.SIGTERM)

    def watch(self, trainer: pl.Trainer) -> Callable[[], None]:
        """Install the handler when training starts, after Lightning's handlers; return the undo of Lightning's loop."""
        self.is_told, previous = False, self._previous

        def handler(number: int, frame: FrameType | None) -> None:
            self.is_told = True
            if callable(previous):
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


class _LoadedStates(Sequence[Any]):
    """Stands for ``optimizer_states`` in the dict of ``on_load_checkpoint`` hooks, which run after the load."""

    def __getitem__(self, index: Any) -> NoReturn:
        self.refuse()

    def __len__(self) -> NoReturn:
        self.refuse()

    def refuse(self) -> NoReturn:
        """Raise a StateError."""
        raise StateError(
            "on_load_checkpoint reads or changes optimizer_states, but ShardedStrategy has loaded the optimizers "
            "already. Change the optimizer itself in on_train_start"
        )


@dataclass(frozen=True, slots=True)
class _Loaded:
    """A load of a checkpoint, which Lightning's later calls finish.

    Attributes:
        path: of the checkpoint.
        modules: the module, whose own code may have to load entries.
        optimizers: of a fit; None for another run.
        settings: the loaded hyper-parameters by optimizer, param group and key.
        with_state: the parameters with state by FQN, of each optimizer.
        states: stands for the states of the optimizers.
    """

    path: str
    modules: LoadedModules
    optimizers: Sequence[Optimizer] | None
    settings: Mapping[tuple[int, int, str], Any]
    with_state: list[dict[str, Tensor]]
    states: _LoadedStates

    def finish_optimizers(self, states: object) -> None:
        """Set the hyper-parameters that were loaded again.

        Lightning's own strategies load optimizers after ``on_fit_start``, which overwrites its changes of settings.

        Raises:
            StateError: if hooks replaced ``optimizer_states``, or parameters that have state.
        """
        if states is not self.states:
            self.states.refuse()
        for optimizer, parameters in zip(self.optimizers or (), self.with_state, strict=True):
            present = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if lost := [name for name, parameter in parameters.items() if id(parameter) not in present]:
                raise StateError(
                    f"{', '.join(lost[:5])} of {type(optimizer).__name__} had state in the checkpoint, but was taken "
                    "out of the optimizer or replaced after the load, as on_fit_start may do. Replace parameters "
                    "before: in __init__, setup or configure_model"
                )
        for (number, group, key), value in self.settings.items():
            assert self.optimizers is not None
            self.optimizers[number].param_groups[group][key] = value


def describe_trainer(checkpoint: dict[str, Any], position: Position, share: DataShare) -> dict[str, Any]:
    """Return Lightning's checkpoint dict at a position, with the state of this rank alone, for ``ShardCkptIO``.

    Args:
        checkpoint: Lightning's dict; it is not changed.
        position: the position in training.
        share: this rank's part of the data.
    """
    checkpoint = {**checkpoint, RANK_STATE: {"place": asdict(share), **position.to_json()}}
    if loops := checkpoint.get("loops"):
        fit_loop = dict(position.fit_loop or loops["fit_loop"])
        if position.fit_loop is not None:
            checkpoint["epoch"] = fit_loop["epoch_progress"]["current"]["completed"]
        # the positions of each rank have the state of the loaders
        fit_loop["state_dict"] = {k: v for k, v in fit_loop["state_dict"].items() if k != "combined_loader"}
        checkpoint["loops"] = {**loops, "fit_loop": fit_loop}
    return checkpoint


class RunCheckpoints:
    """The checkpoints of one fit, validate, test or predict.

    Args:
        trainer: of the run.
        launcher: has the path to resume from.
        ranks: the ranks that save and load together.
        share: this rank's part of the data.
        stop_position: the position at the end of the last fit.
        agree_within_s: the timeout of an agreement after an exception that other ranks may not have.

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
        self._loaded: _Loaded | None = None  # until Lightning has finished it
        self._resume: Callable[[], tuple[Callable[[], None], bool]] | None = None
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
        """Fill model and optimizers in place, and return the rest as Lightning's dict.

        In it, ``state_dict`` holds the filled tensors of the module; for a module with load hooks or
        ``on_load_checkpoint`` it holds entries that the module doesn't have yet.

        Collective: every rank must call it.

        Args:
            io: attached to the ranks that load together.
            path: of the checkpoint.
            weights_only: for a file of ``torch.save``; by default the argument of the Trainer's method.
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
            if source.has_weights_only():
                source, _, more, _ = fit_names(source, module, names)
                problems += more
            if optimizers is not None and source.document("optimizer") is not None:
                restore_param_groups(trainer, source.trainer(lambda key: torch.empty(0)))
            return source, problems

        result = io.load_into(
            path,
            replace(targets, fit_source=fit_source),
            strict=module.strict_loading,
            weights_only=self._launcher.weights_only if weights_only is None else weights_only,
            pick_rank=self._share.source_rank,
            filling=partial(mark_partly_loaded, [module], path),
        )
        settings = {}
        if optimizers is not None:
            settings = {(n, i, key): deepcopy(optimizers[n].param_groups[i][key]) for n, i, key in result.settings}
        with_state = [{targets.names[id(p)]: p for p in o.state if id(p) in targets.names} for o in optimizers or ()]
        modules = LoadedModules({"": module}, live, result.hooked, io.names)
        self._loaded = _Loaded(path, modules, optimizers, settings, with_state, _LoadedStates())
        rank_state = result.trainer.pop(RANK_STATE)
        checkpoint = as_trainer_checkpoint(result.trainer, path, fitting=self._is_fit)
        checkpoint["state_dict"] = modules.state_dict(result.extra_state)
        checkpoint["optimizer_states"] = [] if optimizers is None else self._loaded.states
        _compare_hyper_parameters(module, checkpoint, path, fitting=self._is_fit)
        if self._is_fit and rank_state is not None:
            loops = checkpoint.get("loops")
            if loops is not None and batches_done(loops) is not None:
                repeat_last_batch(loops["fit_loop"])
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
            state_dict.update(copy_state_dict({name: v for name, v in state_dict.items() if v is live.get(name)}))
        if self._loaded.optimizers is None:
            self._loaded = None

    @property
    def shows_optimizers(self) -> bool:
        """True if the optimizers of a fit were loaded before its hooks."""
        return self._loaded is not None

    def finish_optimizers(self, states: object) -> None:
        """Check that hooks have left the optimizers as they were loaded, and set their settings again."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.finish_optimizers(states)

    # --- training ---

    def begin_loader(self, loader: object) -> None:
        """Make a training loader resumable. Call it for every loader, before Lightning begins it."""
        if self._trainer.training and self._is_fit:
            self._loaders_wait = self._resume is not None or self._will_resume()
            prepare_loader(self._trainer, loader, waits=self._loaders_wait)

    def start_training(self) -> Callable[[], None]:
        """Restore the position of the checkpoint, and record that of the run's end; return the undo."""
        undo, trainer = ExitStack(), self._trainer
        undo.callback(self.stop_position.watch(trainer))
        if self._resume is not None:
            undo_resume, validates = self._resume()
            undo.callback(undo_resume)
            self._resume, self._validation_rng = None, self._validation_rng if validates else None
        elif self._loaders_wait:
            start_loaders(trainer, [], is_over=False, same_ranks=False)
            begin_loaders(trainer)
        self._loaders_wait = False
        return undo.close

    def end(self) -> None:
        """Keep the position at the end of a fit. Call it before Lightning shuts the loaders down."""
        if not self._is_fit:
            return
        self.stop_position.keep(self._trainer)
        if self._loaders_wait:  # training has not started
            start_loaders(self._trainer, [], is_over=False, same_ranks=False)

    def start_validation(self) -> None:
        """Restore the random state of an interrupted validation. Call it when a validation starts.

        Its loaders begin again, and hooks of its start run again; both may have drawn random numbers.
        """
        if self._validation_rng is not None and self._resume is None:
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
        described = describe_trainer(checkpoint, self.stop_position.position(trainer), self._share)
        save = partial(io.save_checkpoint, described, path, storage_options)
        if not trainer.interrupted or self._ending is Ending.LEFT:
            save()
        elif self._ending is not Ending.ALONE:
            self._save_after_exception(save, io.wait)

    def _save_after_exception(self, save: Callable[[], None], wait: Callable[[], None]) -> None:
        """Save if all ranks have the exception; else, or if the save fails, only warn.

        Collective for the ranks with an exception. Waits for asynchronous saves before and after, since the process may
        end.
        """
        try:
            if not self._trainer.received_sigterm and self._ending is not Ending.TOGETHER:
                phase, within_s = "agreeing on a last checkpoint", self._agree_within_s
                self._ranks.step(phase, lambda: None, lambda _: None, timeout_s=within_s)
            try:
                wait()
            except Exception as error:  # on all ranks; the last checkpoint must be saved anyway
                warnings.warn(f"before the exception, a save had failed: {error}", stacklevel=2)
            save()
            wait()
        except Exception as error:
            warnings.warn(f"no checkpoint was saved after the exception: {error}", stacklevel=2)
            self._ending = Ending.ALONE
        else:
            self._ending = Ending.TOGETHER

    @property
    def answers_alone(self) -> bool:
        """True if hooks after an exception run on this rank, and maybe not on the other ranks."""
        if not self._trainer.interrupted or self._trainer.received_sigterm:
            return False  # after a signal, all ranks have agreed to stop
        return self._ending in (Ending.NONE, Ending.ALONE)

    def leave(self) -> None:
        """End the hooks after an exception."""
        self._ending = Ending.LEFT


def _compare_hyper_parameters(
    module: pl.LightningModule, checkpoint: Mapping[str, Any], path: str, *, fitting: bool
) -> None:
    """Compare the hyper-parameters of a module that a LightningCLI has built: it reads stored ones only from files.

    Raises:
        MismatchError: listing those that differ, for an evaluation; a fit only warns, since it may change them.
    """
    if _CLI_MARK not in module.hparams or os.path.isfile(path):
        return
    stored, plain = checkpoint.get(module.CHECKPOINT_HYPER_PARAMS_KEY) or {}, (bool, int, float, str, type(None))
    pairs = [(name, stored[name], value) for name, value in module.hparams.items() if name in stored]
    differing = [
        f"{name}={saved!r} in the checkpoint, {value!r} in the module"
        for name, saved, value in pairs
        if isinstance(saved, plain) and isinstance(value, plain) and saved != value and name != _CLI_MARK
    ]
    if not differing:
        return
    message = (
        f"{path!r} was saved with other hyper-parameters: {'; '.join(differing)}. LightningCLI reads them only from a "
        "single file: pass them, such as --model.NAME=VALUE"
    )
    if not fitting:
        raise MismatchError(message)
    rank_zero_warn(message)
