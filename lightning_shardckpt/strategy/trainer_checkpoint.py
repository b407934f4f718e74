"""Save and load a Trainer's checkpoint under ``ShardedStrategy``.

Lightning's checkpoint dict has the shared state. Each rank adds its random states and its position in the data.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_shardckpt.checkpoint.describe import RANK_STATE
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint.partly_loaded import mark_partly_loaded
from lightning_shardckpt.checkpoint_io import ShardCkptIO, as_trainer_checkpoint
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.model_names import fit_names, has_weights_only
from lightning_shardckpt.sources.renaming import map_names
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.load_hooks import HookedState, loaded_state_dict
from lightning_shardckpt.state.loaded_optimizers import LoadedOptimizers
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


class Loaded(NamedTuple):
    """The live state dict (None once it is finished), entries that the module's own code loads, and the optimizers."""

    path: str
    live: dict[str, Any] | None
    hooked: HookedState | None
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
    of_optimizers = None if optimizers is None else LoadedOptimizers(optimizers, targets.names)

    def match_names(source: Source) -> tuple[Source, list[str]]:
        source, problems = map_names(source, io.key_mapping)
        if has_weights_only(source):
            names = io.names.state or {*targets.model.tensors, *targets.model.aliases}
            source, _, more, _ = fit_names(source, module, names)
            problems += more
        return source, problems

    targets = replace(targets, fit_source=match_names, regroup=partial(restore_param_groups, trainer))
    loaded = io.load_into(
        path,
        targets,
        strict=module.strict_loading,
        weights_only=weights_only,
        pick_rank=share.source_rank,
        filling=partial(mark_partly_loaded, [module], str(path)),
    )
    checkpoint = loaded.trainer
    checkpoint["state_dict"] = loaded_state_dict({"": module}, state_dict, loaded.extra_state, loaded.hooked)
    checkpoint["optimizer_states"] = [] if of_optimizers is None else of_optimizers.show(loaded.settings)
    rank_state = checkpoint.pop(RANK_STATE)
    checkpoint = as_trainer_checkpoint(checkpoint, str(path), fitting=fitting)
    _compare_hyper_parameters(module, checkpoint, str(path), fitting=fitting)
    return checkpoint, rank_state, Loaded(str(path), state_dict, loaded.hooked, of_optimizers)


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
