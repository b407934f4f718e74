"""``load_from_checkpoint``: construct a LightningModule or LightningDataModule from a sharded checkpoint.

Lightning's own method of that name calls no CheckpointIO, so it can't read sharded checkpoints.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.serialization import MAP_LOCATION

from lightning_shardckpt.checkpoint.lightning_dict import device_of, is_torch_file, load_whole
from lightning_shardckpt.checkpoint.load_job import LoadOptions
from lightning_shardckpt.checkpoint.nested_load import NestedLoad
from lightning_shardckpt.checkpoint_io import as_trainer_checkpoint
from lightning_shardckpt.compat.lightning_trainer import Loadable, construct_module
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError, ShardCkptError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_tree import Dropped, Pickled, lost_values
from lightning_shardckpt.storage.router import StorageRouter, file_path
from lightning_shardckpt.system.text import count_text
from lightning_shardckpt.system.threads import drain_all

_LISTED = 20


def load_from_checkpoint(
    cls: type[Loadable],
    checkpoint_path: str | os.PathLike[str],
    *,
    map_location: MAP_LOCATION = None,
    strict: bool | None = None,
    storage_options: Mapping[str, Any] | None = None,
    pre_download: str | os.PathLike[str] | None = None,
    weights_only: bool | None = None,
    **kwargs: Any,
) -> Loadable:
    """Return a module with the hyper-parameters and weights of a checkpoint, on one device. Not collective.

    The counterpart of ``LightningModule.load_from_checkpoint`` for a sharded checkpoint of any topology. Waits
    for asynchronous saves of this process. Frozen parameters that a checkpoint of adapters leaves out keep the values
    that ``__init__`` or ``configure_model`` gave them.

    Args:
        cls: the class to construct.
        checkpoint_path: the checkpoint.
        map_location: the device for the module, or a dict or function as in ``torch.load``; the CPU by default.
        strict: require that all names match; the module's ``strict_loading`` by default.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``ShardCkptIO``.
        weights_only: as in ``torch.load``, for a plain file and for objects that were pickled with
            ``ShardCkptIO(pickle_objects=True)``; True by default. False executes code in them.
        kwargs: hyper-parameters that replace the stored ones.

    Raises:
        StateError: if a hyper-parameter could not be stored and is not given.
        MismatchError: for a checkpoint of adapters, listing missing tensors other than those it leaves out.
    """
    drain_all()
    path, device = file_path(checkpoint_path), device_of(map_location)
    if is_torch_file(path):
        file: Any = path
        if weights_only is not None:
            kwargs["weights_only"] = weights_only
        location: Any = device if map_location is None else map_location
        return cls.load_from_checkpoint(file, map_location=location, strict=strict, **kwargs)  # type: ignore[return-value]
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    if issubclass(cls, pl.LightningModule) and _has_weights_alone(path, storage):
        return _load_weights(cls, path, device, storage, strict, kwargs)
    checkpoint = load_whole(path, device, optimizers=False, weights_only=weights_only is not False, storage=storage)
    checkpoint = as_trainer_checkpoint(checkpoint, path, fitting=False)
    checkpoint["optimizer_states"] = []  # for hooks that go over them
    hyper = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if not isinstance(hyper, dict):  # of OmegaConf
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hyper)
    hyper.update(kwargs)
    _check_complete(cls, checkpoint, path)
    if FROZEN not in checkpoint or not issubclass(cls, pl.LightningModule):
        return construct_module(cls, checkpoint, strict=strict, **kwargs)
    frozen = checkpoint.pop(FROZEN)
    module = _construct_partly(cls, checkpoint, kwargs)
    _check_adapters(module, checkpoint, frozen, path, strict)
    return module


def _construct_partly(cls: type[Loadable], checkpoint: dict[str, Any], hyper: dict[str, Any]) -> Loadable:
    """Return a module constructed from a checkpoint dict, which may lack names of the module."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found keys that are (in the model state dict but not|not in the model)")
        return construct_module(cls, checkpoint, strict=False, **hyper)


def _has_weights_alone(path: str, storage: StorageRouter) -> bool:
    """Return True if the checkpoint holds weights of another program or a state dict, not a LightningModule's names."""
    source, _ = open_source(path, storage)
    with closing(source):
        return source.has_weights_only() or "model" not in source.components()


def _load_weights(
    cls: type[Loadable],
    path: str,
    device: torch.device,
    storage: StorageRouter,
    strict: bool | None,
    hyper: dict[str, Any],
) -> Loadable:
    """Return a module with weights of another program, converted to its names and tensors."""
    checkpoint = as_trainer_checkpoint({"state_dict": {}}, path, fitting=False)
    checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = dict(hyper)
    module = _construct_partly(cls, checkpoint, hyper)
    assert isinstance(module, pl.LightningModule)
    state = {"module": module.to(device)}
    options = LoadOptions(strict=module.strict_loading if strict is None else strict)
    _, result = NestedLoad(state).run(path, Ranks.alone(), options=options, storage=storage)
    for note in result.notes:
        rank_zero_warn(note)
    return module


def _check_complete(cls: type[Loadable], checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise a StateError if hyper-parameters that ``__init__`` takes were not stored."""
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_all = takes_all or checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in parameters  # as one mapping
    lost = lost_values(checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY])
    lost = {key: value for key, value in lost.items() if takes_all or _hyper_name(key) in parameters}
    if lost:
        listed = "\n  ".join(f"{key}  {value.type_name}, {value.text}" for key, value in lost.items())
        given = ", ".join(f"{name}=…" for name in dict.fromkeys(map(_hyper_name, lost)))
        pickled = any(isinstance(value, Pickled) for value in lost.values())
        other = "; or, if you trust its author, weights_only=False for the pickled ones" if pickled else ""
        raise StateError(
            f"checkpoint {path!r} does not hold these hyper-parameters of {cls.__name__}, which are not plain values:\n"
            f"  {listed}\nPass them: load_from_checkpoint({cls.__name__}, path, {given}){other}"
        )


def _hyper_name(path: str) -> str:
    return path.partition("/")[0]


def stored_hyper_parameters(path: str, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the stored hyper-parameters of a LightningModule, for LightningCLI. Reads no tensors.

    Missing hyper-parameters are left out, with a warning. If the checkpoint can't be read, warns and returns none: the
    run that loads it raises the error.

    Args:
        path: the checkpoint, or a URL.
        weights_only: as in ``load_from_checkpoint``.
    """
    try:
        source, _ = open_source(path, StorageRouter(), weights_only=weights_only)
        with closing(source):
            stored: Any = partial(Dropped, "torch.Tensor")
            trainer = source.trainer(stored)
    except (ShardCkptError, OSError, ImportError, ValueError) as error:
        rank_zero_warn(f"LightningCLI takes no hyper-parameters from {path!r}, which cannot be read as it is: {error}")
        return {}
    hyper = dict(trainer.get(pl.LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {})
    lost = sorted(set(map(_hyper_name, lost_values(hyper))))
    if lost:
        rank_zero_warn(
            f"{path!r} does not hold the hyper-parameters {lost}, which are taken from the command line and the config"
        )
    return {name: value for name, value in hyper.items() if name not in lost}


def _check_adapters(
    module: pl.LightningModule,
    checkpoint: Mapping[str, Any],
    frozen: Mapping[str, object],
    path: str,
    strict: bool | None,
) -> None:
    """Raise a MismatchError if names differ from a checkpoint of adapters, except for the frozen ones it left out."""
    live = {clean_fqn(name) for name in module.state_dict()}
    stored = {clean_fqn(name) for name in checkpoint["state_dict"]}
    problems = [f"{name}  in model only" for name in sorted(live - stored - frozen.keys())]
    problems += [f"{name}  in checkpoint only" for name in sorted((stored | frozen.keys()) - live)]
    if problems and (module.strict_loading if strict is None else strict):
        listed = "\n  ".join(problems[:_LISTED])
        name = type(module).__name__
        raise MismatchError(f"cannot load {path!r} into {name}: {count_text(len(problems), 'difference')}\n  {listed}")
