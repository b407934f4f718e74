"""Private names of Lightning's Trainer: fit, restoring, signals, metrics and directories.

Checked with Lightning 2.5.6 and 2.6.6, and torchmetrics 1.x.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import RandomSampler
from torchmetrics import Metric, metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shardckpt.compat.data_loading import keeps_samplers
from lightning_shardckpt.compat.torch_modules import override_methods
from lightning_shardckpt.errors import UnsupportedCodeError

_HOOKS = ("[LightningModule]", "[Callback]")  # prefixes of the names of hooks and callbacks
Loadable = TypeVar("Loadable", bound="pl.LightningModule | pl.LightningDataModule")


class ScriptLauncher(_SubprocessScriptLauncher):
    """The launcher that starts the same script once for each local process."""


# ── data ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def keep_order_of_training(trainer: pl.Trainer) -> Callable[[], None]:
    """Make Lightning shuffle training batches only if the loader does, as it does in validation; return the undo.

    Lightning puts a DistributedSampler that always shuffles around the sampler of a training loader, so that a loader
    without ``shuffle=True``, or with a user's sampler, would have another order than on one process. In validation, it
    believes a loader's argument ``shuffle=False`` rather than a RandomSampler beside it.

    If one rank has all data, a training loader with its own state keeps its sampler, which is part of the state; see
    also `keeps_samplers`.

    Relies on ``_DataConnector._prepare_dataloader``, which takes (loader, whether to shuffle, stage).
    """
    connector = trainer._data_connector
    prepare = type(connector)._prepare_dataloader

    def prepare_in_order(dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if mode == RunningStage.PREDICTING:
            return prepare(connector, dataloader, shuffle, mode)
        alone = (trainer.distributed_sampler_kwargs or {"num_replicas": 1})["num_replicas"] == 1
        has_state = hasattr(dataloader, "state_dict") and hasattr(dataloader, "load_state_dict")
        stays = alone and mode == RunningStage.TRAINING and has_state
        if stays or (trainer.world_size == 1 and keeps_samplers(dataloader, 1)):
            return dataloader
        shuffle = isinstance(getattr(dataloader, "sampler", None), RandomSampler)
        made = prepare(connector, dataloader, shuffle, mode)
        return dataloader if made is not dataloader and keeps_samplers(dataloader, trainer.world_size) else made

    return override_methods(connector, _prepare_dataloader=prepare_in_order)


# ── restoring ─────────────────────────────────────────────────────────────────────────────────────────────────────


def construct_module(
    cls: type[Loadable], checkpoint: dict[str, Any], *, strict: bool | None, **hyper_parameters: Any
) -> Loadable:
    """Construct a module from the hyper-parameters of a checkpoint dict, and load its state with all hooks.

    Relies on ``_load_state``, the second half of ``load_from_checkpoint``.

    Args:
        cls: the class to construct.
        checkpoint: Lightning's dict, with tensors on the module's device.
        strict: whether all names must match; None for the module's ``strict_loading``.
        hyper_parameters: that replace the stored ones.
    """
    options = {"strict": strict} if issubclass(cls, pl.LightningModule) else {}
    load: Any = _load_state  # typed for one kind of class at a time
    module: Loadable = load(cls, checkpoint, **options, **hyper_parameters)
    return module


def intercept_ckpt_path(
    trainer: pl.Trainer, resolve: Callable[[Any], Any], keep: Callable[[Any], None]
) -> Callable[[], None]:
    """Resolve the ``ckpt_path`` of a Trainer's next call before Lightning does; return the undo.

    Relies on ``_CheckpointConnector._select_ckpt_path``.

    Args:
        trainer: the Trainer.
        resolve: called with the user's ``ckpt_path``; returns that for Lightning.
        keep: called with the path that Lightning has chosen, such as that of an assigned ``Trainer.ckpt_path``.
    """
    connector = trainer._checkpoint_connector
    select = type(connector)._select_ckpt_path

    def select_resolved(state_fn: TrainerFn, ckpt_path: Any, **options: Any) -> Any:
        path = select(connector, state_fn, resolve(ckpt_path), **options)
        keep(path)
        return path

    return override_methods(connector, _select_ckpt_path=select_resolved)


def restore_modules_and_callbacks(trainer: pl.Trainer, path: str | None) -> None:
    """Load a checkpoint and restore the datamodule, the model and the callbacks, as Lightning does before a fit.

    Relies on ``_CheckpointConnector._restore_modules_and_callbacks``, which loads by ``Strategy.load_checkpoint``.
    """
    trainer._checkpoint_connector._restore_modules_and_callbacks(path)


def set_default_root_dir(trainer: pl.Trainer, path: str) -> None:
    """Set the default directory of a Trainer's files.

    Relies on ``_default_root_dir``, which ``Trainer.default_root_dir`` reads.
    """
    trainer._default_root_dir = path  # type: ignore[attr-defined]  # set later


# ── signals ───────────────────────────────────────────────────────────────────────────────────────────────────────


def receive_sigterm(trainer: pl.Trainer) -> None:
    """Make the Trainer raise SIGTERMException after the current batch, as if its own handler had got a SIGTERM.

    Relies on ``_SignalConnector.received_sigterm``, which ``Trainer.received_sigterm`` returns.
    """
    trainer._signal_connector.received_sigterm = True


# ── modules and metrics ───────────────────────────────────────────────────────────────────────────────────────────


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Set the ``device`` of a LightningModule and its Metrics, without moving tensors.

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


def wrap_actions(profiler: Profiler, around: Callable[[bool], AbstractContextManager[object]]) -> Callable[[], None]:
    """Run every action of a Trainer inside a context; return the undo.

    Lightning runs hooks and callbacks under ``profiler.profile``, by names such as
    ``[LightningModule]TinyLM.on_fit_start``, and by other names some of its own methods, such as a strategy's.

    Args:
        profiler: the Trainer's, whose method is replaced.
        around: returns the context, given whether the action is a hook or a callback.
    """
    original = profiler.profile

    @contextmanager
    def profile(action_name: str) -> Generator[Any, None, None]:
        with original(action_name) as found, around(action_name.startswith(_HOOKS)):
            yield found

    return override_methods(profiler, profile=profile)


# ── fit ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


BeforeFit = Callable[[pl.Trainer, dict[str, Any]], None]


def intercept_fit(before: BeforeFit) -> Callable[[], None]:
    """Call a function before each fit of any Trainer; return the undo.

    Replaces the public method ``Trainer.fit``, since Lightning has no hook that can choose ``ckpt_path``.

    Args:
        before: called with the Trainer and the arguments of the call by name, which it may change.
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


def refuse_averaging_of_modules(trainer: pl.Trainer) -> None:
    """Refuse callbacks that copy the whole module to average its weights, of which a pipeline stage has a part.

    Raises:
        UnsupportedCodeError: naming the callback.
    """
    kinds = (StochasticWeightAveraging, getattr(pl.callbacks, "WeightAveraging", StochasticWeightAveraging))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set later
        if isinstance(callback, kinds):
            raise UnsupportedCodeError(
                f"{type(callback).__name__} averages the weights in a copy of the whole module, but a pipeline "
                "stage has only a part of it. Use pipeline_parallel_size=1, or average in a callback of your own: it "
                "begins with [p.detach().clone() for p in module.parameters()], and changes each by mul_ and add_."
            )


# ── torchmetrics ──────────────────────────────────────────────────────────────────────────────────────────────────────


class _GatherOver:
    """torchmetrics' gather over one group, which is shared by deep copies of metrics, since it can't be copied."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, result: Tensor, group: Any | None = None) -> list[Tensor]:
        return gather_all_tensors(result, group or self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self


def gather_metrics_over(group: dist.ProcessGroup, module: nn.Module) -> Callable[[], None]:
    """Make metrics gather over a group, unless they have a ``dist_sync_fn``; return the undo.

    They sync over the whole world by default, so that the ranks of a tensor group would count several times. If
    ``group`` is smaller, metrics in ``module`` keep it. It is the default of others, in callbacks and lists, until the
    undo, also where an outer run has set another one. Relies on ``torchmetrics.metric.gather_all_tensors``, which
    ``Metric.sync`` takes for metrics without ``dist_sync_fn``.
    """
    gather, before = _GatherOver(group), metric.gather_all_tensors  # type: ignore[attr-defined]  # imported there
    for submodule in module.modules() if group.size() < dist.get_world_size() else ():
        if isinstance(submodule, Metric) and submodule.dist_sync_fn is None:
            submodule.dist_sync_fn = gather
    metric.gather_all_tensors = gather  # type: ignore[attr-defined]

    def undo() -> None:
        if metric.gather_all_tensors is gather:  # type: ignore[attr-defined]
            metric.gather_all_tensors = before  # type: ignore[attr-defined]

    return undo


def refuse_stored_metrics(module: nn.Module) -> None:
    """Refuse metrics whose states are saved with their module, since each data-parallel rank has states of its own.

    Raises:
        UnsupportedCodeError: naming the metric.
    """
    for name, one in module.named_modules():
        if isinstance(one, Metric) and one.state_dict():
            raise UnsupportedCodeError(
                f"the state of {name or type(one).__name__} is saved with the model (persistent(True)), but each "
                "data-parallel rank has the state of its own batches: use metric.persistent(False), and save its result"
            )
