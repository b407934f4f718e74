"""Private names of Lightning's Trainer and Fabric: launchers, process groups, fit, restoring, signals, metrics.

Checked with Lightning 2.5.6 and 2.6.6, and torchmetrics 1.x.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric import Fabric, wrappers
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.strategies.launchers import subprocess_script as fabric_launchers
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.optimizer import _optimizer_to_device
from lightning.pytorch.core.saving import _load_state
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import RandomSampler
from torchmetrics import Metric, metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_shardckpt.compat.data_loading import keeps_samplers
from lightning_shardckpt.compat.torch_modules import replace_attributes

Loadable = TypeVar("Loadable", bound="pl.LightningModule | pl.LightningDataModule")


ScriptLauncher = _SubprocessScriptLauncher
"""The launcher of a Trainer that starts the same script once for each local process."""
FabricScriptLauncher = fabric_launchers._SubprocessScriptLauncher
"""The same for Fabric."""


def init_process_group(environment: ClusterEnvironment, device: torch.device, *, timeout_s: float) -> None:
    """Create the default process group, unless it exists. Collective over the world.

    Its backend is torch's default for the device of this process, with gloo for CPU tensors beside nccl. A single
    process listens on no port, and sets no environment variable, which the ranks of a program that it starts would use.
    """
    if dist.is_initialized():
        return
    chosen: str = dist.get_default_backend_for_device(device)
    if chosen == "nccl":
        chosen = f"cpu:gloo,{device.type}:nccl"
    bound, timeout = device if device.type != "cpu" else None, timedelta(seconds=timeout_s)
    rank, size, store = environment.global_rank(), environment.world_size(), None
    if size == 1:
        rank, store = 0, HashStore()
    else:
        os.environ |= {"MASTER_ADDR": environment.main_address, "MASTER_PORT": str(environment.main_port)}
    dist.init_process_group(chosen, store=store, rank=rank, world_size=size, timeout=timeout, device_id=bound)
    if chosen.endswith(":nccl"):
        atexit.register(_destroy_dist_connection)  # as Lightning does: torch warns of a group that is left


optimizer_to_device = _optimizer_to_device
"""Moves the state of an optimizer to a device, except ``step``, which torch's optimizers keep on the CPU."""


def keep_order_of_training(trainer: pl.Trainer) -> Callable[[], None]:
    """Make Lightning shuffle training batches only if the loader does; return the undo.

    Lightning puts a DistributedSampler that always shuffles around the sampler of a training loader, so its order would
    not be that of one process. In validation, it believes ``shuffle=False`` rather than a RandomSampler beside it. If
    one rank has all data, a training loader with its own state keeps its sampler, which is part of the state; see also
    `keeps_samplers`. Relies on ``_DataConnector._prepare_dataloader``.
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

    return replace_attributes(connector, _prepare_dataloader=prepare_in_order)


_keeping = weakref.WeakSet[object]()  # the strategies of `keep_samplers_of`
_original_setup: Any = Fabric._setup_dataloader


def keep_samplers_of(strategy: object) -> None:
    """Let the Fabric of ``strategy`` keep the samplers of loaders for which `keeps_samplers` is true.

    Ends with the last such strategy, since Fabric has no teardown. Relies on ``Fabric._setup_dataloader``.
    """

    def setup(self: Fabric, dataloader: Any, use_distributed_sampler: bool = True, move_to_device: bool = True) -> Any:
        keeps = use_distributed_sampler and self.strategy in _keeping and keeps_samplers(dataloader, self.world_size)
        return _original_setup(self, dataloader, use_distributed_sampler and not keeps, move_to_device)

    def end() -> None:
        if not [*_keeping]:
            replace_attributes(Fabric, _setup_dataloader=_original_setup)

    _keeping.add(strategy)
    replace_attributes(Fabric, _setup_dataloader=setup)
    weakref.finalize(strategy, end).atexit = False


def construct_module(
    cls: type[Loadable], checkpoint: dict[str, Any], *, strict: bool | None, **hyper_parameters: Any
) -> Loadable:
    """Construct a module from Lightning's dict, whose tensors are on its device, and load its state with all hooks.

    ``hyper_parameters`` replace the stored ones; without ``strict``, the module's ``strict_loading`` counts. Relies on
    ``_load_state``, the second half of ``load_from_checkpoint``.
    """
    options: Any = {"strict": strict} if issubclass(cls, pl.LightningModule) else {}
    return _load_state(cls, checkpoint, **options, **hyper_parameters)  # type: ignore[arg-type,return-value]


def intercept_ckpt_path(trainer: pl.Trainer, choose: Callable[[Any, Callable[[Any], Any]], Any]) -> Callable[[], None]:
    """Let ``choose(ckpt_path, select)`` resolve a Trainer's ``ckpt_path``; ``select`` is Lightning's; return the undo.

    Relies on ``_CheckpointConnector._select_ckpt_path``.
    """
    connector = trainer._checkpoint_connector
    select = type(connector)._select_ckpt_path

    def choose_path(state_fn: TrainerFn, ckpt_path: Any, **options: Any) -> Any:
        return choose(ckpt_path, lambda path: select(connector, state_fn, path, **options))

    return replace_attributes(connector, _select_ckpt_path=choose_path)


def restore_modules_and_callbacks(trainer: pl.Trainer, path: str | None) -> None:
    """Load a checkpoint and restore the datamodule, the model and the callbacks, as Lightning does before a fit."""
    trainer._checkpoint_connector._restore_modules_and_callbacks(path)


def set_default_root_dir(trainer: pl.Trainer, path: str) -> None:
    """Set ``Trainer.default_root_dir``, the directory of a Trainer's files."""
    trainer._default_root_dir = path  # type: ignore[attr-defined]  # set later


def receive_sigterm(trainer: pl.Trainer) -> None:
    """Make the Trainer raise SIGTERMException after the current batch, as if its own handler had got a SIGTERM."""
    trainer._signal_connector.received_sigterm = True


def set_device(module: torch.nn.Module, device: torch.device) -> None:
    """Set the ``device`` of a LightningModule and its Metrics, without moving tensors, like ``LightningModule.to``."""
    _update_properties(module, device=device)


def syncs_batch_norms(strategy: ParallelStrategy) -> bool:
    """Return whether the Trainer was given ``sync_batchnorm=True``, for which it sets ``Strategy._layer_sync``."""
    return strategy._layer_sync is not None


def set_device_mesh(module: pl.LightningModule, mesh: DeviceMesh) -> None:
    """Make ``LightningModule.device_mesh`` return a mesh, as ModelParallelStrategy does."""
    module._device_mesh = mesh


def wrap_actions(profiler: Profiler, around: Callable[[bool], AbstractContextManager[object]]) -> Callable[[], None]:
    """Run every action of a Trainer inside the context ``around(is_hook)``; return the undo.

    Lightning runs hooks, callbacks and some of its own methods under ``profiler.profile``, by their names.
    """
    original = profiler.profile

    @contextmanager
    def profile(action_name: str) -> Generator[Any, None, None]:
        with original(action_name) as found, around(action_name.startswith(("[LightningModule]", "[Callback]"))):
            yield found

    return replace_attributes(profiler, profile=profile)


def intercept_fit(before: Callable[[pl.Trainer, dict[str, Any]], None]) -> Callable[[], None]:
    """Call a function before each fit of any Trainer, with the arguments by name, to be changed; return the undo.

    Lightning has no hook that can choose ``ckpt_path``.
    """
    original = pl.Trainer.fit

    @functools.wraps(original)
    def fit(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(self, *args, **kwargs)
        before(self, call.arguments)
        return original(*call.args, **call.kwargs)

    return replace_attributes(pl.Trainer, fit=fit)


def gather_metrics_over(ranks: dist.ProcessGroup, module: nn.Module) -> Callable[[], None]:
    """Make metrics gather over a group, unless they have a ``dist_sync_fn``; return the undo.

    They sync over the whole world by default, so that the ranks of a tensor group would count several times. If
    ``ranks`` is smaller, metrics in ``module`` keep it. It is the default of others, in callbacks and lists, until the
    undo, also where an outer run has set another one. Relies on ``torchmetrics.metric.gather_all_tensors``.
    """
    before = metric.gather_all_tensors  # type: ignore[attr-defined]  # imported there

    def gather(result: Tensor, group: Any | None = None) -> list[Tensor]:  # as a function, deep copies share it
        return gather_all_tensors(result, group or ranks)

    for submodule in module.modules() if ranks.size() < dist.get_world_size() else ():
        if isinstance(submodule, Metric) and submodule.dist_sync_fn is None:
            submodule.dist_sync_fn = gather
    metric.gather_all_tensors = gather  # type: ignore[attr-defined]

    def undo() -> None:
        if metric.gather_all_tensors is gather:  # type: ignore[attr-defined]
            metric.gather_all_tensors = before  # type: ignore[attr-defined]

    return undo


def is_in_backward() -> bool:
    """Return True inside of ``fabric.backward`` and `disable_backward_guard`, in all threads."""
    return wrappers._in_fabric_backward


@contextmanager
def disable_backward_guard() -> Generator[None, None, None]:
    """Inside, allow backward passes, which Fabric's hooks refuse outside of ``fabric.backward``."""
    before, wrappers._in_fabric_backward = wrappers._in_fabric_backward, True
    try:
        yield
    finally:
        wrappers._in_fabric_backward = before
