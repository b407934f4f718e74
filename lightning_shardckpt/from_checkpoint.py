"""``load_from_checkpoint``: construct a LightningModule or LightningDataModule from a sharded checkpoint.

Lightning's own method of that name asks no CheckpointIO, so it cannot read these.
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

from lightning_shardckpt.checkpoint.checkpoint_options import LoadOptions
from lightning_shardckpt.checkpoint.nested_load import NestedLoad
from lightning_shardckpt.checkpoint.whole_load import device_of, is_torch_file, load_whole
from lightning_shardckpt.checkpoint_io import as_of_a_trainer
from lightning_shardckpt.compat.lightning_trainer import Loadable, constructed
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError, ShardCkptError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.match import is_weights_alone
from lightning_shardckpt.sources.open_source import open_source
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_values import Dropped, Pickled, lost_values
from lightning_shardckpt.state.nested_dict import objects_in
from lightning_shardckpt.storage.router import StorageRouter
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
    """Return a module with the hyper-parameters and weights of a checkpoint, on one device, in this process alone.

    What ``LightningModule.load_from_checkpoint`` does for a file, for a sharded checkpoint of any topology. Waits for
    asynchronous saves of this process. Frozen parameters that a checkpoint of adapters leaves out stay as the module
    was constructed, in ``__init__`` or ``configure_model``.

    Args:
        cls: the class to construct.
        checkpoint_path: the checkpoint.
        map_location: the device for the module, or a dict or function as in ``torch.load``; the CPU by default.
        strict: whether all names must match; by default as the module's ``strict_loading`` says.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``ShardCkptIO``.
        weights_only: as in ``torch.load``, for a plain file and for objects that were pickled with
            ``ShardCkptIO(pickle_objects=True)``; True by default. False executes what is in them.
        kwargs: hyper-parameters that replace the stored ones.

    Raises:
        StateError: if a hyper-parameter could not be stored and is not given.
        MismatchError: listing what is missing although the checkpoint does not leave it out, for one of adapters.
    """
    drain_all()
    path, device = os.fspath(checkpoint_path), device_of(map_location)
    if is_torch_file(path):
        where: Any = path
        if weights_only is not None:
            kwargs["weights_only"] = weights_only
        place: Any = device if map_location is None else map_location
        return cls.load_from_checkpoint(where, map_location=place, strict=strict, **kwargs)  # type: ignore[return-value]
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    if issubclass(cls, pl.LightningModule) and _has_weights_alone(path, storage):
        return _with_weights(cls, path, device, storage, strict, kwargs)
    checkpoint = load_whole(path, device, optimizers=False, weights_only=weights_only is not False, storage=storage)
    checkpoint = as_of_a_trainer(checkpoint, path, fitting=False)
    hyper = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if not isinstance(hyper, dict):  # of OmegaConf
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hyper)
    hyper.update(kwargs)
    _check_complete(cls, checkpoint, path)
    if FROZEN not in checkpoint or not issubclass(cls, pl.LightningModule):
        return constructed(cls, checkpoint, strict=strict, **kwargs)
    left_out = checkpoint.pop(FROZEN)
    module = _constructed_in_part(cls, checkpoint, kwargs)
    _check_adapters(module, checkpoint, left_out, path, strict)
    return module


def _constructed_in_part(cls: type[Loadable], checkpoint: dict[str, Any], hyper: dict[str, Any]) -> Loadable:
    """Return a module with what a checkpoint dict has, of which it may lack something."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found keys that are (in the model state dict but not|not in the model)")
        return constructed(cls, checkpoint, strict=False, **hyper)


def _has_weights_alone(path: str, storage: StorageRouter) -> bool:
    """Return whether there is no model under Lightning's names: weights of another program, or a state dict."""
    source, _ = open_source(path, storage)
    with closing(source):
        return is_weights_alone(source) or "model" not in source.components()


def _with_weights(
    cls: type[Loadable],
    path: str,
    device: torch.device,
    storage: StorageRouter,
    strict: bool | None,
    hyper: dict[str, Any],
) -> Loadable:
    """Return a module with weights of another program, under the names and as the tensors that it has."""
    checkpoint = as_of_a_trainer({"state_dict": {}}, path, fitting=False)
    checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY] = dict(hyper)
    module = _constructed_in_part(cls, checkpoint, hyper)
    assert isinstance(module, pl.LightningModule)
    state = {"module": module.to(device)}
    options = LoadOptions(strict=module.strict_loading if strict is None else strict)
    _, loaded = NestedLoad(state, objects_in(state)).run(path, Ranks.alone(), options=options, storage=storage)
    for note in loaded.notes:
        rank_zero_warn(note)
    return module


def _check_complete(cls: type[Loadable], checkpoint: Mapping[str, Any], path: str) -> None:
    """Refuse to construct from hyper-parameters that were not stored, of those that ``__init__`` takes."""
    taken = inspect.signature(cls.__init__).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in taken.values())
    takes_all = takes_all or checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in taken  # as one mapping
    lost = lost_values(checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY])
    lost = {place: value for place, value in lost.items() if takes_all or _first(place) in taken}
    if lost:
        listed = "\n  ".join(f"{place}  {value.type_name}, {value.text}" for place, value in lost.items())
        given = ", ".join(f"{name}=…" for name in dict.fromkeys(map(_first, lost)))
        pickled = any(isinstance(value, Pickled) for value in lost.values())
        other = "; or, if you trust whoever wrote it, weights_only=False for those that are pickled" if pickled else ""
        raise StateError(
            f"checkpoint {path!r} does not hold these hyper-parameters of {cls.__name__}, which are no plain values:\n"
            f"  {listed}\nPass them: load_from_checkpoint({cls.__name__}, path, {given}){other}"
        )


def _first(place: str) -> str:
    return place.partition("/")[0]


def stored_hyper_parameters(path: str, *, weights_only: bool = True) -> dict[str, Any]:
    """Return the hyper-parameters of a LightningModule that a checkpoint has, for LightningCLI; no tensor is read.

    Those that the checkpoint lacks are left out, with a warning; as are all, if it can't be read, which is what a run
    that loads it will be told.

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
    lost = sorted(set(map(_first, lost_values(hyper))))
    if lost:
        rank_zero_warn(
            f"{path!r} does not hold the hyper-parameters {lost}, which are taken from the command line and the config"
        )
    return {name: value for name, value in hyper.items() if name not in lost}


def _check_adapters(
    module: pl.LightningModule,
    checkpoint: Mapping[str, Any],
    left_out: Mapping[str, object],
    path: str,
    strict: bool | None,
) -> None:
    """Compare names with a checkpoint that has no frozen parameters: those that it left out may be missing."""
    live = {clean_fqn(name) for name in module.state_dict()}
    stored = {clean_fqn(name) for name in checkpoint["state_dict"]}
    problems = [f"{name}  in model only" for name in sorted(live - stored - left_out.keys())]
    problems += [f"{name}  in checkpoint only" for name in sorted((stored | left_out.keys()) - live)]
    if problems and (module.strict_loading if strict is None else strict):
        listed = "\n  ".join(problems[:_LISTED])
        name = type(module).__name__
        raise MismatchError(f"cannot load {path!r} into {name}: {count_text(len(problems), 'difference')}\n  {listed}")
