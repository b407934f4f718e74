"""Save and load a Trainer's checkpoint under ``ShardedStrategy``.

Lightning's checkpoint dict has the shared state. Each rank adds its random states and its position in the data.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.describe import RANK_STATE
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint.partly_loaded import mark_partly_loaded
from lightning_shardckpt.checkpoint_io import ShardCkptIO, as_trainer_checkpoint
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.sources.key_mapping import map_names
from lightning_shardckpt.sources.model_names import fit_names, has_weights_only
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.json_tree import encode_small
from lightning_shardckpt.state.load_hooks import LoadedModules
from lightning_shardckpt.state.optimizer import optimizer_state
from lightning_shardckpt.strategy.lightning_module import restore_param_groups
from lightning_shardckpt.strategy.resume import DataShare, Position
from lightning_shardckpt.system.memory import gc_paused

_CLI_MARK = "_instantiator"
"""The hyper-parameter by which Lightning marks modules that a LightningCLI has built."""


def check_io(io: object) -> ShardCkptIO:
    """Return ``io`` if it is a ShardCkptIO: other CheckpointIOs expect whole tensors on one rank.

    Raises:
        TypeError: for another CheckpointIO.
    """
    if isinstance(io, ShardCkptIO):
        return io
    if isinstance(getattr(io, "checkpoint_io", None), ShardCkptIO):
        raise TypeError(
            f"{type(io).__name__} saves in a thread of rank 0 only, but under ShardedStrategy every rank writes its "
            "own slices. Pass ShardCkptIO() alone in plugins."
        )
    raise TypeError(
        f"ShardedStrategy saves with ShardCkptIO, got {type(io).__name__}; pass plugins=[ShardCkptIO()] or none"
    )


class LoadedOptimizers:
    """The state of loaded optimizers for ``on_load_checkpoint`` hooks, which must leave it as it is.

    The optimizers are loaded before the hooks run. Lightning's own strategies load them after ``on_fit_start``, from
    the dict that the hooks changed, which overwrites settings of ``on_fit_start``.

    Args:
        optimizers: all of the run.
        names: FQN by ``id`` of their parameters.
        settings: the hyper-parameters that were loaded: optimizer, param group and key.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], names: Mapping[int, str], settings: set[tuple[int, int, str]]
    ) -> None:
        self._optimizers, self._names, self._settings = optimizers, names, settings
        self._loaded = self.states()
        self._with_state: list[list[Any]] = [[p for p in one.state if id(p) in names] for one in optimizers]

    def states(self) -> list[dict[str, Any]]:
        """Return the state for hooks, in the form of ``on_save_checkpoint``; only tensors of parameters are live."""
        states = [optimizer_state(optimizer, self._names) for optimizer in self._optimizers]
        live = [{name: v for name, v in one["state"].items() if isinstance(v, Mapping)} for one in states]
        own = [{name: v for name, v in one["state"].items() if not isinstance(v, Mapping)} for one in states]
        copies = [copy.deepcopy({**one, "state": values}) for one, values in zip(states, own, strict=True)]
        return [{**one, "state": values | one["state"]} for one, values in zip(copies, live, strict=True)]

    def take(self, left: Sequence[Mapping[str, Any]]) -> None:
        """Set the hyper-parameters that were loaded again, since ``on_fit_start`` may have changed them.

        Raises:
            StateError: if hooks have changed the result of ``states``, except tensors in place, or replaced parameters.
        """
        for optimizer, parameters in zip(self._optimizers, self._with_state, strict=True):
            present = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if lost := [self._names[id(p)] for p in parameters if id(p) not in present]:
                raise StateError(
                    f"{', '.join(lost[:5])} of {type(optimizer).__name__} had state in the checkpoint, but was taken "
                    "out of the optimizer or replaced after the load, as on_fit_start may do. Replace parameters "
                    "before: in __init__, setup or configure_model"
                )
        changed = [i for i, one in enumerate(self._loaded) if i >= len(left) or not _is_same(left[i], one)]
        if changed or len(left) > len(self._loaded):
            names = ", ".join(f"{i} ({type(self._optimizers[i]).__name__})" for i in changed)
            raise StateError(
                f"on_load_checkpoint changed optimizer_states of optimizer {names or len(self._loaded)}, which "
                "ShardedStrategy has loaded already. Change the optimizer itself in on_train_start"
            )
        for number, i, key in self._settings:
            self._optimizers[number].param_groups[i][key] = self._loaded[number]["param_groups"][i][key]


def _is_same(left: Any, loaded: Any) -> bool:
    if isinstance(left, Mapping) and isinstance(loaded, Mapping):
        return left.keys() == loaded.keys() and all(_is_same(left[key], loaded[key]) for key in left)
    if isinstance(left, DTensor) or isinstance(loaded, DTensor):
        return left is loaded
    if isinstance(left, list) and isinstance(loaded, list):
        return len(left) == len(loaded) and all(map(_is_same, left, loaded))
    return left is loaded or bool(encode_small(left, "optimizer_states") == encode_small(loaded, "optimizer_states"))


class Loaded(NamedTuple):
    """The path, the module until it is finished, and the optimizers."""

    path: str
    module: LoadedModules | None
    optimizers: LoadedOptimizers | None


def describe_trainer(checkpoint: dict[str, Any], position: Position, share: DataShare) -> dict[str, Any]:
    """Return Lightning's checkpoint dict at a position, with the state of this rank alone, for ``ShardCkptIO``.

    Args:
        checkpoint: Lightning's dict; it is not changed.
        position: the position in training.
        share: this rank's part of the data.
    """
    checkpoint = dict(checkpoint)
    loops = checkpoint.get("loops")
    if loops and position.fit_loop is not None:
        checkpoint["loops"] = loops = {**loops, "fit_loop": position.fit_loop}
        checkpoint["epoch"] = position.fit_loop["epoch_progress"]["current"]["completed"]
    if loops and "combined_loader" in loops["fit_loop"]["state_dict"]:
        state = dict(loops["fit_loop"]["state_dict"])
        del state["combined_loader"]  # the positions of each rank have it
        checkpoint["loops"] = {**loops, "fit_loop": {**loops["fit_loop"], "state_dict": state}}
    return {**checkpoint, RANK_STATE: {"place": asdict(share), **position.to_json()}}


def load_checkpoint(
    io: ShardCkptIO, trainer: pl.Trainer, share: DataShare, path: Any, *, weights_only: bool | None
) -> tuple[dict[str, Any], Mapping[str, Any] | None, Loaded]:
    """Load the model and, in a fit, the optimizers in place.

    Collective: every rank must call it.

    Args:
        io: attached to the ranks that load together.
        trainer: with the module and the optimizers.
        share: this rank's part of the data; it selects the saving rank whose state this rank loads.
        path: of the checkpoint, the same on all ranks.
        weights_only: for a file of ``torch.save``, as in ``torch.load``; None is True.

    Returns:
        Lightning's dict; the state of the selected saving rank, or None; and the loaded objects. In the dict,
        ``state_dict`` holds the filled tensors of the module; for a module with load hooks or ``on_load_checkpoint`` it
        holds entries that the module doesn't have yet.
    """
    module = trainer.lightning_module
    with gc_paused():
        state_dict = live_state_dict(module)
    fitting = trainer.state.fn == TrainerFn.FITTING
    optimizers = trainer.strategy.optimizers if fitting else None
    is_changed = is_overridden("on_load_checkpoint", module, pl.LightningModule)  # it may read the module's old values
    targets = LoadTargets.of_module(module, state_dict, io.names, optimizers, is_changed=is_changed)

    def match_names(source: Source) -> tuple[Source, list[str]]:
        source, problems = map_names(source, io.key_mapping)
        if has_weights_only(source):
            names = io.names.state or {*targets.model.tensors, *targets.model.aliases}
            source, _, more, _ = fit_names(source, module, names)
            problems += more
        if optimizers is not None and source.document("optimizer") is not None:
            restore_param_groups(trainer, source.trainer(lambda key: torch.empty(0)))
        return source, problems

    targets = replace(targets, fit_source=match_names)
    loaded = io.load_into(
        path,
        targets,
        strict=module.strict_loading,
        weights_only=weights_only,
        pick_rank=share.source_rank,
        filling=partial(mark_partly_loaded, [module], str(path)),
    )
    checkpoint, of_optimizers = loaded.trainer, None
    modules = LoadedModules({"": module}, state_dict, loaded.hooked, io.names)
    checkpoint["state_dict"], checkpoint["optimizer_states"] = modules.state_dict(loaded.extra_state), []
    if optimizers is not None:
        of_optimizers = LoadedOptimizers(optimizers, targets.names, loaded.settings)
        checkpoint["optimizer_states"] = of_optimizers.states()
    rank_state = checkpoint.pop(RANK_STATE)
    checkpoint = as_trainer_checkpoint(checkpoint, str(path), fitting=fitting)
    _compare_hyper_parameters(module, checkpoint, str(path), fitting=fitting)
    return checkpoint, rank_state, Loaded(str(path), modules, of_optimizers)


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
    both = {name: (stored[name], value) for name, value in module.hparams.items() if name in stored}
    differing = {
        name: f"{name}={saved!r} in the checkpoint, {value!r} in the module"
        for name, (saved, value) in both.items()
        if isinstance(saved, plain) and isinstance(value, plain) and saved != value and name != _CLI_MARK
    }
    if not differing:
        return
    remedy = (
        f"{path!r} was saved with other hyper-parameters: {'; '.join(differing.values())}. LightningCLI reads them "
        "only from a single file: use lightning_shardckpt.ShardedCLI, which reads them from directories and URLs, too"
    )
    if not fitting:
        given = " ".join(f"--model.{name}={both[name][0]}" for name in differing)
        raise MismatchError(f"{remedy}, or pass {given}")
    rank_zero_warn(remedy)
