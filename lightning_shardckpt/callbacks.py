"""Callbacks: log what saves took, delete older checkpoints by rules, and make dropout depend on the sample.

`CheckpointMonitor` and `CheckpointRetention` ask ``ShardCkptIO`` which saves have ended; no rank talks to another. With
`DropoutBySample`, dropout depends on the sample and the module, and not on the topology.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from typing_extensions import override

from lightning_shardckpt.checkpoint.finished_saves import FinishedSave
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_loops import train_loaders
from lightning_shardckpt.compat.lightning_trainer import save_directory
from lightning_shardckpt.errors import ShardCkptError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import matching_fqns
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.parallel.pipeline.microbatch import samples_in
from lightning_shardckpt.parallel.sharding.fqn import named_modules
from lightning_shardckpt.parallel.sharding.keyed_dropout import (
    OTHER_RANDOM,
    DropoutSettings,
    is_droppable,
    key_dropout,
    unkey_dropout,
)
from lightning_shardckpt.parallel.sharding.sample_numbers import SampleNumbers, other_draws, set_running_samples
from lightning_shardckpt.state.data_position import ResumableLoader
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.system.random_generators import rng_checksum
from lightning_shardckpt.transfer.reader import Checkpoint

# ── what saves took ───────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointMonitor(Callback):
    """Logs, for every save of ``fit`` that is complete, what it took; under these names, to all loggers of the Trainer:

    - ``save/seconds``: from the save's call until the checkpoint was complete on all ranks.
    - ``save/blocked_seconds``: for which rank 0 could not train meanwhile.
    - ``save/bytes``: of all files that all ranks wrote.
    - ``save/pending``: asynchronous saves that waited to be written when this one was done.

    They are logged at the step that was saved, which is the one in a checkpoint's name, also if an asynchronous save
    ends some steps later. That is written when the next batch begins, or training ends; of a run that an exception ends
    only the saves are logged that were complete by then. A save that fails is not logged: its error is raised.

    Rank 0 logs. For ``ShardCkptIO``, under ``ShardedStrategy`` or those of Lightning's own strategies that it works
    with.
    """

    def __init__(self) -> None:
        self._io: ShardCkptIO | None = None
        self._known: tuple[FinishedSave, ...] = ()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at the Trainer's CheckpointIO from now on.

        Raises:
            MisconfigurationException: if the Trainer has no logger.
            TypeError: if its CheckpointIO is another one than ``ShardCkptIO``.
        """
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException(
                "CheckpointMonitor has nowhere to log to: give the Trainer a logger, or leave the callback out"
            )
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, ShardCkptIO):
            raise TypeError(
                f"CheckpointMonitor logs saves of ShardCkptIO, but this Trainer saves with {type(io).__name__}: use "
                "ShardedStrategy, or give the Trainer plugins=[ShardCkptIO()]"
            )
        if io is not self._io:
            self._io, self._known = io, io.finished_saves

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self._log_new(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log_new(trainer)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._log_new(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Log what is left: the strategy has waited for all saves by now."""
        self._log_new(trainer)

    def _log_new(self, trainer: pl.Trainer) -> None:
        if self._io is None or not trainer.is_global_zero:
            return
        saves, known = self._io.finished_saves, {id(save) for save in self._known}
        for save in saves:
            if id(save) not in known:
                for logger in trainer.loggers:
                    logger.log_metrics(_metrics(save), step=save.step)
        self._known = saves


def _metrics(save: FinishedSave) -> dict[str, float]:
    return {
        "save/seconds": save.duration_s,
        "save/blocked_seconds": save.blocked_s,
        "save/bytes": float(save.nbytes),
        "save/pending": float(save.pending),
    }


# ── which checkpoints are kept ────────────────────────────────────────────────────────────────────────────────────────
# Choose which checkpoints of a directory to keep: the last ones, every n-th step, one per hour or day. Pure.


_HOUR_S, _DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its path, the step that it recorded, and when it was saved, in seconds since the epoch."""

    path: str
    step: int
    saved_at_s: float


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """What to keep; a checkpoint that one rule keeps is kept.

    Attributes:
        last: how many of those that were saved last.
        every_n_steps: all whose step is a multiple of it; None for none.
        hourly: the last one of an hour, for so many of the last hours that have one; -1 for all of them.
        daily: the same by days. Hours and days are those of UTC.

    Raises:
        ValueError: for a number that cannot be, naming it.
    """

    last: int = 1
    every_n_steps: int | None = None
    hourly: int = 0
    daily: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"last is how many checkpoints are kept at least, and must be positive, got {self.last}")
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is a number of steps and must be positive, got {self.every_n_steps}")
        for name in ("hourly", "daily"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} is a number of checkpoints, or -1 for all, got {getattr(self, name)}")

    def superfluous(self, saved: Iterable[SavedCheckpoint], protected: Collection[str] = ()) -> list[SavedCheckpoint]:
        """The checkpoints that no rule keeps, the oldest first; never one of the ``protected`` paths."""
        newest_first = sorted(saved, key=lambda one: (one.saved_at_s, one.step), reverse=True)
        kept = {one.path for one in newest_first[: self.last]}
        if self.every_n_steps is not None:
            kept |= {one.path for one in newest_first if one.step % self.every_n_steps == 0}
        for count, period_s in ((self.hourly, _HOUR_S), (self.daily, _DAY_S)):
            periods: dict[int, str] = {}
            for one in newest_first:
                periods.setdefault(int(one.saved_at_s // period_s), one.path)
            kept.update(list(periods.values())[: None if count == -1 else count])
        return [one for one in reversed(newest_first) if one.path not in kept and one.path not in protected]


class CheckpointRetention(Callback):
    """Keeps the last checkpoints, every n-th step, and one per hour or day, and deletes the others.

    For ``ModelCheckpoint(save_top_k=-1)``, which deletes none. It looks at the directories where the Trainer's
    ModelCheckpoints save, when a save is complete and none is being written: before the next batch, and at the end of
    ``fit``. So it finds those of earlier runs into the same directory, too.

    Never deleted are: the newest checkpoint; a callback's best one, its ``last``, and the top k of one that has a
    number of them; what a link in the directory names; the one that ``fit`` resumed from, and that of
    OnExceptionCheckpoint; what is no complete checkpoint of a Trainer by ``ShardCkptIO``. One that somebody reads is
    read to its end. Times are those of the root index, which is written last; a copy must preserve them (``cp -a``).

    Args:
        last: how many of those that were saved last are kept.
        every_n_steps: keep all whose step is a multiple of it.
        hourly: keep the last one of an hour, for so many of the last hours that have one; -1 for all of them.
        daily: the same by days. Hours and days are those of UTC.
    """

    def __init__(self, last: int = 1, every_n_steps: int | None = None, hourly: int = 0, daily: int = 0) -> None:
        self.rules = RetentionRules(last, every_n_steps, hourly, daily)
        self._io: ShardCkptIO | None = None
        self._seen: FinishedSave | None = None
        self._steps: dict[tuple[str, int, int], int | None] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Look at the Trainer's CheckpointIO and ModelCheckpoints from now on.

        Raises:
            TypeError: if its CheckpointIO is another one than ``ShardCkptIO``.
            MisconfigurationException: if a ModelCheckpoint saves to an object store.
        """
        if stage != "fit":
            return
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, ShardCkptIO):
            raise TypeError(
                f"CheckpointRetention deletes checkpoints of ShardCkptIO, but this Trainer saves with "
                f"{type(io).__name__}: use ShardedStrategy, or give the Trainer plugins=[ShardCkptIO()]"
            )
        callbacks = _model_checkpoints(trainer)
        for callback in callbacks:
            if callback.dirpath is not None and is_url(callback.dirpath):
                raise MisconfigurationException(
                    f"CheckpointRetention needs a file system, and {callback.dirpath!r} is a URL: let rules of the "
                    "bucket delete old objects, or keep fewer with save_top_k"
                )
        if all(callback.save_top_k != -1 for callback in callbacks):
            rank_zero_warn(
                "CheckpointRetention has nothing to choose from: set ModelCheckpoint(save_top_k=-1), else it deletes "
                "older checkpoints by itself"
            )
        self._io, self._seen = io, (io.finished_saves or (None,))[-1]

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: object) -> None:
        self._delete_superfluous(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._delete_superfluous(trainer)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Delete what the last save made superfluous."""
        self._delete_superfluous(trainer)

    def _delete_superfluous(self, trainer: pl.Trainer) -> None:
        if self._io is None or not trainer.is_global_zero or not self._io.finished_saves:
            return
        newest, background = self._io.finished_saves[-1], self._io.async_saves.background
        if newest is self._seen or (background is not None and not background.is_idle()):
            return
        self._seen = newest
        protected = {os.path.realpath(path) for path in _protected(trainer)} | {os.path.realpath(newest.path)}
        for directory in {os.path.realpath(save_directory(one, trainer)) for one in _model_checkpoints(trainer)}:
            checkpoints = list(self._complete(directory, self._io, protected))
            for one in self.rules.superfluous(checkpoints, protected):
                self._io.remove_checkpoint(one.path)

    def _complete(self, directory: str, io: ShardCkptIO, protected: set[str]) -> Iterator[SavedCheckpoint]:
        """Complete checkpoints of a Trainer in a directory; adds to ``protected`` what links name."""
        if not os.path.isdir(directory):
            return
        with os.scandir(directory) as entries:
            there = sorted(entries, key=lambda entry: entry.name)
        protected |= {os.path.realpath(entry.path) for entry in there if entry.is_symlink()}
        for entry in there:
            if entry.name.endswith(ModelCheckpoint.FILE_EXTENSION) and entry.is_dir(follow_symlinks=False):
                try:
                    root = os.stat(os.path.join(entry.path, ROOT_NAME))
                    mark = entry.path, root.st_ino, root.st_mtime_ns
                    if mark not in self._steps:
                        with Checkpoint(io.storage, entry.path) as checkpoint:
                            is_trainers = "trainer-state.json" in checkpoint.root.documents
                            self._steps[mark] = checkpoint.root.step if is_trainers else None
                except (ShardCkptError, OSError):
                    continue  # not complete, or gone
                step = self._steps[mark]
                if step is not None:
                    yield SavedCheckpoint(entry.path, step, root.st_mtime)


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _protected(trainer: pl.Trainer) -> Iterator[str]:
    """Paths that callbacks or the user count on."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, OnExceptionCheckpoint):
            yield callback.ckpt_path
    for callback in _model_checkpoints(trainer):
        yield from filter(None, (callback.best_model_path, callback.last_model_path))
        if callback.save_top_k > 0:
            yield from callback.best_k_models
    if trainer.ckpt_path:
        yield os.fspath(trainer.ckpt_path)


# ── dropout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class DropoutBySample(Callback):
    """Lets each ``nn.Dropout`` of the model drop, in training, by a hash of seed, epoch, sample, module and element.

    So the same elements are dropped for the same place in the epoch's order of samples, on any number of data-parallel
    ranks, in any microbatch, under tensor parallelism, and under Lightning's own strategies: a run continues on another
    topology with the dropout that it would have had. It draws no random numbers.

    The samples must be a dim of their own in the input of each dropout. Under tensor parallelism, a dropout of columns
    or heads is named as ``ShardedDropout`` in ``tensor_parallel_plan``. Where a module is called more than once in a
    step, its calls are told apart by their number.

    Args:
        seed: of all streams. A run that resumes takes the one that it was begun with.
        samples_dim: the dim of a dropout's input that has the samples: for all, or by patterns of module names (the
            others have 0).
        strict: whether it is an error that the model draws random numbers otherwise: before training for modules that
            are known to, else when a step does. What a pipeline's loss draws after its layers is not noticed. If false,
            those are drawn as ever.
    """

    def __init__(self, seed: int = 0, samples_dim: int | Mapping[str, int] = 0, strict: bool = True) -> None:
        self.seed, self.samples_dim, self.strict = seed, samples_dim, strict
        self._keyed: list[nn.Module] = []
        self._drawn: int | None = None
        self._batch_size = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the model's dropouts over.

        Raises:
            MisconfigurationException: if modules of the model draw random numbers that are not known by sample, or a
                pattern matches no dropout.
        """
        modules = named_modules(pl_module)
        if self.strict:
            self._check(modules)
        dims, group = self._dims(modules), _tensor_group(trainer.strategy)
        for fqn, module in modules.items():
            if is_droppable(module):
                key_dropout(module, DropoutSettings(fqn, self.seed, dims.get(fqn, 0), group))
                self._keyed.append(module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Say which samples the batch has."""
        numbers = self._numbers(trainer, batch, batch_idx)
        set_running_samples(SampleNumbers(trainer.current_epoch, numbers, alone=self.strict))
        topology = getattr(trainer.strategy, "topology", None)
        pipelined = topology is not None and topology.pipeline > 1
        self._drawn = rng_checksum() if self.strict and not pipelined else None  # a pipeline draws, and looks itself

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look whether the step drew random numbers otherwise.

        Raises:
            UnsupportedCodeError: if it did.
        """
        if self._drawn is not None and self._drawn != rng_checksum():
            raise other_draws("the training step")

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        """The samples are used."""
        set_running_samples(None)

    @override
    def on_train_end(self, *args: Any) -> None:
        """Give the dropouts back."""
        self._end()

    @override
    def on_exception(self, *args: Any) -> None:
        """Give the dropouts back."""
        self._end()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take the seed of the run that is continued."""
        if state_dict["seed"] != self.seed:
            rank_zero_warn(
                f"DropoutBySample(seed={self.seed}) continues with seed {state_dict['seed']}, that of the checkpoint"
            )
        self.seed = state_dict["seed"]

    def _end(self) -> None:
        set_running_samples(None)
        for module in self._keyed:
            unkey_dropout(module)
        self._keyed.clear()

    def _check(self, modules: Mapping[str, nn.Module]) -> None:
        other = {fqn: what for fqn, module in modules.items() if (what := _draws_otherwise(module)) is not None}
        if other:
            named = ", ".join(f"{fqn} ({what})" for fqn, what in other.items())
            raise MisconfigurationException(
                f"DropoutBySample can key nn.Dropout and nn.Dropout1d to 3d, but these draw random numbers by "
                f"themselves: {named}. Set their probability to 0, use nn.Dropout modules in their place, or let them "
                "be with strict=False."
            )

    def _dims(self, modules: Mapping[str, nn.Module]) -> dict[str, int]:
        dropouts = {fqn: module for fqn, module in modules.items() if is_droppable(module)}
        if isinstance(self.samples_dim, int):
            return dict.fromkeys(dropouts, self.samples_dim)
        dims: dict[str, int] = {}
        for pattern, dim in self.samples_dim.items():
            matched = matching_fqns(dropouts, pattern)
            if not matched:
                raise MisconfigurationException(
                    f"DropoutBySample(samples_dim=…): {pattern!r} matches none of the dropouts {sorted(dropouts)}"
                )
            dims |= dict.fromkeys(matched, dim)
        return dims

    def _numbers(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> torch.Tensor:
        """The places of this rank's samples in the epoch's order of all data-parallel ranks."""
        try:
            count = samples_in(batch)
        except UnsupportedCodeError as error:
            raise MisconfigurationException(
                f"DropoutBySample must know the samples of a batch, and the first dims of its tensors differ: {error}"
            ) from error
        share = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"num_replicas": 1, "rank": 0}
        ranks, rank = share["num_replicas"], share["rank"]
        loaders = train_loaders(trainer)
        first: int | None = loaders[0].first_sample(batch_idx) if isinstance(loaders[0], ResumableLoader) else None
        if first is None:
            self._batch_size = getattr(loaders[0], "batch_size", None) or max(count, self._batch_size)
            first = batch_idx * ranks * self._batch_size
        return torch.arange(first + rank, first + rank + count * ranks, ranks)


def _draws_otherwise(module: nn.Module) -> str | None:
    """Return what in a module draws random numbers that are not of a dropout module; None if nothing does."""
    if isinstance(module, OTHER_RANDOM) and getattr(module, "p", 1.0) > 0:
        return type(module).__name__
    inner = getattr(module, "dropout", 0.0)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and inner > 0:
        return f"{type(module).__name__} with dropout={inner}"
    return None


def _tensor_group(strategy: Any) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks, of ShardedStrategy or Lightning's ModelParallelStrategy; None if there are none."""
    mesh: Any = getattr(strategy, "device_mesh", None)
    for name in ("tensor", "tensor_parallel"):
        if mesh is not None and name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1:
            group: dist.ProcessGroup = mesh.get_group(name)
            return group
    return None
