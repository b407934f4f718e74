"""``load_from_checkpoint`` constructs a module from a sharded checkpoint; Lightning's own calls no CheckpointIO."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
from torch.serialization import MAP_LOCATION

from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.checkpoint_io import as_trainer_checkpoint
from lightning_shardckpt.compat.lightning_runs import Loadable, construct_module
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.json_tree import lost_values
from lightning_shardckpt.storage.router import StorageRouter, file_path
from lightning_shardckpt.system.host import drain_all
from lightning_shardckpt.system.text import count_text, list_some


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

    The counterpart of ``LightningModule.load_from_checkpoint``. Waits for asynchronous saves of this process. Frozen
    parameters that a checkpoint of adapters leaves out keep the values that ``__init__`` or ``configure_model`` gave
    them.

    Args:
        cls: the class to construct.
        checkpoint_path: the checkpoint.
        map_location: the device for the module, or a dict or function as in ``torch.load``; the CPU by default.
        strict: require that all names match; the module's ``strict_loading`` by default.
        storage_options: for URLs, see ``ShardCkptIO``.
        pre_download: for URLs, see ``ShardCkptIO``.
        weights_only: False executes code in a plain file and in objects that were pickled with ``pickle_objects``.
        kwargs: hyper-parameters that replace the stored ones.

    Raises:
        StateError: if a hyper-parameter could not be stored and is not given.
        MismatchError: for a checkpoint of adapters, listing missing tensors other than those it leaves out.
    """
    drain_all()
    path, is_safe = file_path(checkpoint_path), weights_only is not False
    storage = StorageRouter(storage_options=storage_options, pre_download=pre_download)
    checkpoint = load_full(path, map_location, optimizers=False, weights_only=is_safe, storage=storage)
    checkpoint = as_trainer_checkpoint(checkpoint, path, fitting=False)
    checkpoint["optimizer_states"] = []  # for hooks that go over them
    hyper = checkpoint.setdefault(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if not isinstance(hyper, dict):  # of OmegaConf
        checkpoint[cls.CHECKPOINT_HYPER_PARAMS_TYPE] = type(hyper)
    hyper.update(kwargs)
    _check_complete(cls, checkpoint, path)
    frozen = checkpoint.pop(FROZEN, None)
    if frozen is None or not issubclass(cls, pl.LightningModule):
        return construct_module(cls, checkpoint, strict=strict, **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Found keys that are (in the model state dict but not|not in the model)")
        module = construct_module(cls, checkpoint, strict=False, **kwargs)
    live = {clean_fqn(name) for name in module.state_dict()}
    stored = {*map(clean_fqn, checkpoint["state_dict"]), *frozen}
    problems = [f"{name}  in model only" for name in sorted(live - stored)]
    problems += [f"{name}  in checkpoint only" for name in sorted(stored - live)]
    if problems and (module.strict_loading if strict is None else strict):
        listed, count = list_some(problems, 20, "\n  "), count_text(len(problems), "difference")
        raise MismatchError(f"cannot load {path!r} into {cls.__name__}: {count}\n  {listed}")
    return module


def _check_complete(cls: type[Loadable], checkpoint: Mapping[str, Any], path: str) -> None:
    """Raise a StateError if hyper-parameters that ``__init__`` takes were not stored."""
    parameters = inspect.signature(cls.__init__).parameters
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    takes_all = takes_all or checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_NAME) in parameters  # as one mapping
    values = lost_values(checkpoint[cls.CHECKPOINT_HYPER_PARAMS_KEY]).items()
    lost = [(key, key.partition("/")[0], value) for key, value in values]
    if lost := [one for one in lost if takes_all or one[1] in parameters]:
        listed = "\n  ".join(f"{key}  {value.type_name}, {value.text}" for key, _, value in lost)
        given = ", ".join(dict.fromkeys(f"{name}=…" for _, name, _ in lost))
        raise StateError(
            f"checkpoint {path!r} does not hold these hyper-parameters of {cls.__name__}, which are not plain values:\n"
            f"  {listed}\nPass them: load_from_checkpoint({cls.__name__}, path, {given}); or, if they were pickled and "
            "you trust their author, weights_only=False"
        )
