"""Private names of Lightning's Trainer: how it begins, restores, hears signals, and knows metrics and directories.

Checked with Lightning 2.5.6 and 2.6.6, and torchmetrics 1.x.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import signal
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.callbacks import BaseFinetuning, BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities.data import _is_dataloader_shuffled
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric, metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shardckpt.compat.data_loading import show_samplers
from lightning_shardckpt.compat.lightning_loops import is_stateful

_HOOKS = ("[LightningModule]", "[Callback]")  # what names of hooks and callbacks start with
_LOGGERS = ("lightning.pytorch.loggers.", "pytorch_lightning.loggers.")  # others upload as they see fit
Loadable = TypeVar("Loadable", bound="pl.LightningModule | pl.LightningDataModule")


class ScriptLauncher(_SubprocessScriptLauncher):
    """The launcher that starts the same script once for each local process; its methods are those of ``_Launcher``."""


# ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def keep_order_of_training(trainer: pl.Trainer) -> None:
    """Let Lightning shuffle the batches of training only where the loader does, as it does for those of validation.

    Around the sampler of a training loader Lightning puts a DistributedSampler that always shuffles, so that one
    without ``shuffle=True``, or with a sampler of the user's, would have another order than on one process.

    Where one rank has all data, a training loader with a state of its own keeps its sampler, which is a part of that.
    Samplers and batch samplers that a loader was given give what they do on one process.

    Relies on ``_DataConnector._prepare_dataloader``, which takes (loader, whether to shuffle, stage), and on
    ``_is_dataloader_shuffled``.
    """
    connector = trainer._data_connector
    prepare = type(connector)._prepare_dataloader

    def prepared(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode != RunningStage.PREDICTING:
            show_samplers(dataloader)
        alone = (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"] == 1
        if alone and mode == RunningStage.TRAINING and is_stateful(dataloader):
            return dataloader
        return prepare(connector, dataloader, shuffle and _is_dataloader_shuffled(dataloader), mode)

    connector._prepare_dataloader = prepared  # type: ignore[method-assign]  # of this Trainer alone


# ── restoring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def constructed(
    cls: type[Loadable], checkpoint: dict[str, Any], *, strict: bool | None, **hyper_parameters: Any
) -> Loadable:
    """Return a module with the hyper-parameters, weights and hooks of a checkpoint dict.

    Relies on ``_load_state``, the second half of ``load_from_checkpoint``.

    Args:
        cls: the class to construct.
        checkpoint: Lightning's dict, whose tensors are on the device for the module.
        strict: whether all names must match; None is the module's ``strict_loading``.
        hyper_parameters: that replace the stored ones.
    """
    options = {"strict": strict} if issubclass(cls, pl.LightningModule) else {}
    load: Any = _load_state  # typed for one kind of class at a time
    found: Loadable = load(cls, checkpoint, **options, **hyper_parameters)
    return found


def assigned_path(trainer: pl.Trainer) -> str | os.PathLike[str] | None:
    """Return ``trainer.ckpt_path`` where the user has assigned it; None where Lightning or a call's argument did.

    Relies on ``_CheckpointConnector._user_managed``, which the setter of ``Trainer.ckpt_path`` sets.
    """
    return trainer.ckpt_path if trainer._checkpoint_connector._user_managed else None


def is_word_of_lightning(path: object) -> bool:
    """Return whether Lightning takes a path for ``"hpc"``, or for a model of its registry (``"registry:…"``)."""
    return path == "hpc" or (isinstance(path, str) and re.match("registry(:|$)", path, re.IGNORECASE) is not None)


def path_of_word(trainer: pl.Trainer, word: str) -> str | os.PathLike[str] | None:
    """Return the path that Lightning takes a word for: the newest ``hpc_ckpt_*``, the file of a downloaded model.

    Relies on ``_CheckpointConnector._parse_ckpt_path``, which gives words of the registry back without ``litmodels``.

    Raises:
        ValueError: by Lightning, if there is none.
    """
    function = trainer.state.fn
    assert function is not None
    connector = trainer._checkpoint_connector
    return connector._parse_ckpt_path(function, word, model_provided=True, model_connected=True)


def restore_modules_and_callbacks(trainer: pl.Trainer, path: str | None) -> None:
    """Load a checkpoint and restore the datamodule, the model and callbacks from it, as Lightning does before a fit.

    Relies on ``_CheckpointConnector._restore_modules_and_callbacks``, which loads by ``Strategy.load_checkpoint``.
    """
    trainer._checkpoint_connector._restore_modules_and_callbacks(path)


def keep_loaded_groups(callback: BaseFinetuning) -> None:
    """Keep BaseFinetuning from making param groups anew at ``on_fit_start``, which undoes loaded hyper-parameters.

    Relies on its flag ``_restarting``.
    """
    callback._restarting = False


def set_default_root_dir(trainer: pl.Trainer, path: str) -> None:
    """Change the directory in which a Trainer without other instructions writes.

    Relies on ``_default_root_dir``, of which ``Trainer.default_root_dir`` is made.
    """
    trainer._default_root_dir = path  # type: ignore[attr-defined]  # set later


def save_directory(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Return the directory, or URL, where a ModelCheckpoint is going to save; it may not exist yet.

    Relies on ``ModelCheckpoint.__resolve_ckpt_dir``; ``dirpath`` is None until the callback is set up.
    """
    return os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))  # type: ignore[attr-defined]  # mangled


def upload_note(trainer: pl.Trainer) -> str | None:
    """Return what to say of loggers that are to upload checkpoints, which they do with single files alone; or None.

    Relies on ``_log_model``, where they keep ``log_model``, and on ``_scan_checkpoints``, with which those of Lightning
    find the files.
    """
    kinds = [
        type(logger).__name__
        for logger in trainer.loggers
        if vars(logger).get("_log_model", False)  # a DummyLogger has an attribute of every name
        and getattr(type(logger).after_save_checkpoint, "__module__", "").startswith(_LOGGERS)
    ]
    if not kinds:
        return None
    return (
        f"{', '.join(kinds)}(log_model=…) uploads checkpoints that are a single file, and those of ShardCkptIO are "
        "directories: it uploads none of them. Upload the directories after fit (wandb.Artifact.add_dir, "
        "MlflowClient.log_artifacts), or what `python -m lightning_shardckpt.consolidate` makes of them; or leave out "
        "log_model."
    )


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sigterm_handler_before(trainer: pl.Trainer) -> Callable[[int, Any], object] | None:
    """Return what handled SIGTERM before the Trainer's handler, which it calls, too; None if that is no function.

    Relies on ``_SignalConnector._original_handlers``.
    """
    found: Any = trainer._signal_connector._original_handlers.get(signal.SIGTERM)
    return found if callable(found) else None


def receive_sigterm(trainer: pl.Trainer) -> None:
    """Make the Trainer raise SIGTERMException after the present batch, as if its own handler had heard a SIGTERM.

    Relies on ``_SignalConnector.received_sigterm``, which ``Trainer.received_sigterm`` returns.
    """
    trainer._signal_connector.received_sigterm = True


# ── modules and metrics ───────────────────────────────────────────────────────────────────────────────────────────


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Make a LightningModule and the Metrics in it say that they are on a device, without moving anything.

    Relies on ``_update_properties``, which ``LightningModule.to`` calls.
    """
    _update_properties(module, device=device)


def syncs_batch_norms(strategy: ParallelStrategy) -> bool:
    """Return whether the Trainer was given ``sync_batchnorm=True``.

    Relies on ``Strategy._layer_sync``, which the Trainer sets.
    """
    return strategy._layer_sync is not None


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Make ``LightningModule.device_mesh`` return a mesh.

    Relies on the attribute ``_device_mesh``, which ModelParallelStrategy sets.
    """
    module._device_mesh = mesh


def validated_metrics(trainer: pl.Trainer) -> Mapping[str, Any]:
    """Return the metrics for callbacks that the validation that is ending has logged, without those of training.

    Relies on ``_LoggerConnector.metrics``; ``Trainer.callback_metrics`` adds those of the epoch before.
    """
    return trainer._logger_connector.metrics["callback"]


def put_callback_metrics(trainer: pl.Trainer, metrics: Mapping[str, Any]) -> None:
    """Make schedulers that step by a metric find it, as if it had been logged.

    Relies on ``Trainer.callback_metrics`` being the very dict in which Lightning looks for them.
    """
    trainer.callback_metrics.update(metrics)


def wrap_actions(profiler: Profiler, around: Callable[[bool], AbstractContextManager[object]]) -> Callable[[], None]:
    """Run every action of a Trainer inside a context; returns what undoes it.

    Lightning runs hooks and callbacks under ``profiler.profile``, by names such as
    ``[LightningModule]TinyLM.on_fit_start``, and by other names some of its own methods, such as those of a strategy.

    Args:
        profiler: the Trainer's, whose method is replaced.
        around: makes the context, told whether the action is a hook or a callback.
    """
    original = profiler.profile

    @contextmanager
    def profile(action_name: str) -> Generator[Any, None, None]:
        with original(action_name) as found, around(action_name.startswith(_HOOKS)):
            yield found

    profiler.profile = profile  # type: ignore[method-assign]  # undone by what is returned

    def undo() -> None:
        profiler.__dict__.pop("profile", None)

    return undo


# ── fit ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


BeforeFit = Callable[[pl.Trainer, dict[str, Any]], None]


def intercept_fit(before: BeforeFit) -> Callable[[], None]:
    """Call a function before each fit of any Trainer. Returns the undo.

    Replaces the public method ``Trainer.fit``: Lightning has no hook that may still choose ``ckpt_path``.

    Args:
        before: gets the Trainer and the arguments of the call by name, which it may change.
    """
    original = pl.Trainer.fit

    @functools.wraps(original)
    def fit(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(self, *args, **kwargs)
        before(self, call.arguments)
        return original(*call.args, **call.kwargs)

    pl.Trainer.fit = fit  # type: ignore[method-assign]  # undone by what is returned

    def undo() -> None:
        pl.Trainer.fit = original  # type: ignore[method-assign]

    return undo


def is_tuning(trainer: pl.Trainer) -> bool:
    """Return whether a fit that begins is one of ``Tuner``, which looks for a learning rate or batch size and ends.

    Relies on the flag ``_early_exit`` of the callback that it adds.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
    return any(c._early_exit for c in callbacks if isinstance(c, LearningRateFinder | BatchSizeFinder))


# ── torchmetrics ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _GatherOver:
    """torchmetrics' gather over one group; metrics are deep-copied, a process group cannot be."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any | None = None) -> list[Tensor]:
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self


def gather_metrics_over(group: dist.ProcessGroup, module: nn.Module) -> Callable[[], None]:
    """Make metrics gather over a group, unless the user said how they do. Returns the undo.

    They sync over the whole world by default, so the ranks of a tensor group would count several times. Those in
    ``module`` keep the group; it is the default of others, in callbacks and lists, until the undo. Relies on
    ``torchmetrics.metric.gather_all_tensors``, which ``Metric.sync`` takes for metrics without ``dist_sync_fn``.
    """
    for found in module.modules():
        if isinstance(found, Metric) and found.dist_sync_fn is None:
            found.dist_sync_fn = _GatherOver(group)
    metric.gather_all_tensors = _GatherOver(group)

    def undo() -> None:
        metric.gather_all_tensors = gather_all_tensors

    return undo
