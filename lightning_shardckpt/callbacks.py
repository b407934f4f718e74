"""Callbacks: log the cost of saves, delete older checkpoints by rules, and make dropout depend on the sample.

`CheckpointMonitor` and `CheckpointRetention` read the list of finished saves of ``ShardCkptIO``, without communication
between ranks. `DropoutBySample` makes dropout depend on the sample and the module, and not on the topology.
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

from lightning_shardckpt.checkpoint.save_series import FinishedSave
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_loops import train_loaders
from lightning_shardckpt.compat.lightning_trainer import save_directory
from lightning_shardckpt.errors import ShardCkptError, UnsupportedCodeError
from lightning_shardckpt.format.clean_fqn import matching_fqns
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.parallel.pipeline.microbatch import count_samples
from lightning_shardckpt.parallel.sharding.fqn import named_modules
from lightning_shardckpt.parallel.sharding.keyed_dropout import (
    OTHER_RANDOM,
    DropoutSettings,
    can_key_dropout,
    key_dropout,
    unkey_dropout,
)
from lightning_shardckpt.parallel.sharding.sample_numbers import SampleNumbers, other_draws_error, set_running_samples
from lightning_shardckpt.state.data_position import ResumableLoader
from lightning_shardckpt.storage.router import file_path, is_url
from lightning_shardckpt.system.random_generators import rng_checksum
from lightning_shardckpt.transfer.reader import Checkpoint

# ── cost of saves ─────────────────────────────────────────────────────────────────────────────────────────────────────


class CheckpointMonitor(Callback):
    """Logs the time and size of every completed save of ``fit`` to all loggers of the Trainer.

    - ``save/seconds``: from the call of the save until the checkpoint was complete on all ranks.
    - ``save/blocked_seconds``: the part of this time in which rank 0 could not train.
    - ``save/bytes``: the size of all files of all ranks.
    - ``save/pending``: the number of asynchronous saves that were waiting when this one completed.

    The values are logged for the step that was saved, the one in the checkpoint's name, even if an asynchronous save
    completes some steps later. They are written when the next batch begins or training ends. If an exception ends the
    run, only saves that were complete by then are logged. A failed save is not logged; its error is raised.

    Rank 0 logs. Works with ``ShardCkptIO`` under ``ShardedStrategy`` and the strategies of Lightning that
    ``ShardCkptIO`` supports.
    """

    def __init__(self) -> None:
        self._io: ShardCkptIO | None = None
        self._logged: tuple[FinishedSave, ...] = ()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start to follow the saves of the Trainer's CheckpointIO.

        Raises:
            MisconfigurationException: if the Trainer has no logger.
            TypeError: if its CheckpointIO is not a ``ShardCkptIO``.
        """
        if stage != "fit":
            return
        if not trainer.loggers:
            raise MisconfigurationException(
                "CheckpointMonitor needs a logger: give the Trainer one, or leave the callback out"
            )
        io = trainer.strategy.checkpoint_io
        if not isinstance(io, ShardCkptIO):
            raise TypeError(
                f"CheckpointMonitor logs saves of ShardCkptIO, but this Trainer saves with {type(io).__name__}: use "
                "ShardedStrategy, or give the Trainer plugins=[ShardCkptIO()]"
            )
        if io is not self._io:
            self._io, self._logged = io, io.finished_saves

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
        """Log the remaining saves, for which the strategy has waited."""
        self._log_new(trainer)

    def _log_new(self, trainer: pl.Trainer) -> None:
        if self._io is None or not trainer.is_global_zero:
            return
        saves, logged = self._io.finished_saves, {id(save) for save in self._logged}
        for save in saves:
            if id(save) not in logged:
                for logger in trainer.loggers:
                    logger.log_metrics(_metrics(save), step=save.step)
        self._logged = saves


def _metrics(save: FinishedSave) -> dict[str, float]:
    return {
        "save/seconds": save.duration_s,
        "save/blocked_seconds": save.blocked_s,
        "save/bytes": float(save.nbytes),
        "save/pending": float(save.pending),
    }


# ── retention of checkpoints ──────────────────────────────────────────────────────────────────────────────────────────


_HOUR_S, _DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its path, its recorded step, and the time of its save in seconds since the epoch."""

    path: str
    step: int
    saved_at_s: float


class CheckpointRetention(Callback):
    """Keeps the last checkpoints, every n-th step, and one per hour or day, and deletes the others.

    Use it with ``ModelCheckpoint(save_top_k=-1)``, which deletes none. It lists the directories of the Trainer's
    ModelCheckpoints when a save is complete and no other is running: before the next batch, and at the end of ``fit``.
    Checkpoints of earlier runs into the same directories are deleted by the same rules.

    Never deleted are: the newest checkpoint; the best checkpoint, the ``last`` and the top k of a ModelCheckpoint; the
    target of a link in the directory; the checkpoint that ``fit`` resumed from, and OnExceptionCheckpoint's; and
    everything that is not a complete checkpoint of a Trainer with ``ShardCkptIO``. A process that is reading a deleted
    checkpoint can read it to the end. Times are those of the root index, which is written last; a copy must preserve
    them (``cp -a``).

    Args:
        last: the number of most recent checkpoints to keep.
        every_n_steps: keep every checkpoint whose step is a multiple of this.
        hourly: the number of most recent hours with checkpoints of which the last checkpoint is kept; -1 for all hours.
        daily: the same for days. Hours and days are in UTC.

    Raises:
        ValueError: naming an argument that is out of range.
    """

    def __init__(self, last: int = 1, every_n_steps: int | None = None, hourly: int = 0, daily: int = 0) -> None:
        if last < 1:
            raise ValueError(f"last is the number of checkpoints to keep and must be positive, got {last}")
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps is a number of steps and must be positive, got {every_n_steps}")
        for name, count in (("hourly", hourly), ("daily", daily)):
            if count < -1:
                raise ValueError(f"{name} is a number of checkpoints, or -1 for all, got {count}")
        self.last, self.every_n_steps, self.hourly, self.daily = last, every_n_steps, hourly, daily
        self._io: ShardCkptIO | None = None
        self._seen: FinishedSave | None = None
        self._steps: dict[tuple[str, int, int], int | None] = {}

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Start to follow the saves of the Trainer's CheckpointIO.

        Raises:
            TypeError: if its CheckpointIO is not a ``ShardCkptIO``.
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
        """Delete the checkpoints that expired with the last save."""
        self._delete_superfluous(trainer)

    def _delete_superfluous(self, trainer: pl.Trainer) -> None:
        if self._io is None or not trainer.is_global_zero or not self._io.finished_saves:
            return
        newest, background = self._io.finished_saves[-1], self._io.saves.background
        if newest is self._seen or (background is not None and not background.is_idle()):
            return
        self._seen = newest
        protected = {os.path.realpath(path) for path in _protected(trainer)} | {os.path.realpath(newest.path)}
        directories = {os.path.realpath(save_directory(callback, trainer)) for callback in _model_checkpoints(trainer)}
        for directory in directories:
            checkpoints = list(self._list_complete(directory, self._io, protected))
            for checkpoint in self.select_expired(checkpoints, protected):
                self._io.remove_checkpoint(checkpoint.path)

    def select_expired(
        self, saved: Iterable[SavedCheckpoint], protected: Collection[str] = ()
    ) -> list[SavedCheckpoint]:
        """Return the checkpoints that no rule keeps, oldest first, without those at ``protected`` paths."""
        newest_first = sorted(saved, key=lambda checkpoint: (checkpoint.saved_at_s, checkpoint.step), reverse=True)
        kept = {checkpoint.path for checkpoint in newest_first[: self.last]}
        if self.every_n_steps is not None:
            kept |= {checkpoint.path for checkpoint in newest_first if checkpoint.step % self.every_n_steps == 0}
        for count, period_s in ((self.hourly, _HOUR_S), (self.daily, _DAY_S)):
            last_of_period: dict[int, str] = {}
            for checkpoint in newest_first:
                last_of_period.setdefault(int(checkpoint.saved_at_s // period_s), checkpoint.path)
            kept.update(list(last_of_period.values())[: None if count == -1 else count])
        kept.update(protected)
        return [checkpoint for checkpoint in reversed(newest_first) if checkpoint.path not in kept]

    def _list_complete(self, directory: str, io: ShardCkptIO, protected: set[str]) -> Iterator[SavedCheckpoint]:
        """Yield the complete checkpoints of a Trainer in a directory; add the targets of links to ``protected``."""
        if not os.path.isdir(directory):
            return
        with os.scandir(directory) as iterator:
            entries = sorted(iterator, key=lambda entry: entry.name)
        protected |= {os.path.realpath(entry.path) for entry in entries if entry.is_symlink()}
        for entry in entries:
            if entry.name.endswith(ModelCheckpoint.FILE_EXTENSION) and entry.is_dir(follow_symlinks=False):
                try:
                    root = os.stat(os.path.join(entry.path, ROOT_NAME))
                    identity = entry.path, root.st_ino, root.st_mtime_ns
                    if identity not in self._steps:
                        with Checkpoint(io.storage, entry.path) as checkpoint:
                            is_of_trainer = "trainer-state.json" in checkpoint.root.documents
                            self._steps[identity] = checkpoint.root.step if is_of_trainer else None
                except (ShardCkptError, OSError):
                    continue  # not complete, or gone
                step = self._steps[identity]
                if step is not None:
                    yield SavedCheckpoint(entry.path, step, root.st_mtime)


def _model_checkpoints(trainer: pl.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _protected(trainer: pl.Trainer) -> Iterator[str]:
    """Yield the paths that callbacks or the user rely on."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, OnExceptionCheckpoint):
            yield file_path(callback.ckpt_path)
    for callback in _model_checkpoints(trainer):
        yield from filter(None, (callback.best_model_path, callback.last_model_path))
        if callback.save_top_k > 0:
            yield from callback.best_k_models
    if trainer.ckpt_path:
        yield file_path(trainer.ckpt_path)


# ── dropout ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class DropoutBySample(Callback):
    """Makes each ``nn.Dropout`` of the model, in training, a function of seed, epoch, sample, module and element.

    The same elements are dropped for the same position in the epoch's order of samples on any number of data-parallel
    ranks, in any microbatch, under tensor parallelism, and under Lightning's own strategies. A run that continues on
    another topology has the same dropout as without the interruption. No random numbers are drawn.

    The samples must be a dim of their own in the input of each dropout. Under tensor parallelism, declare a dropout of
    columns or heads as ``ShardedDropout`` in ``tensor_parallel_plan``. Several calls of a module in one step are
    distinguished by their order.

    Args:
        seed: the seed. A resumed run uses the seed of the original run.
        samples_dim: the dim of the dropouts' inputs that holds the samples: one for all, or by patterns of module names
            (0 for modules that match none).
        strict: raise an error if the model draws other random numbers: before training for modules that are known to
            draw, else in the step that draws. Random numbers in the loss of a pipeline, after its layers, are not
            detected. If False, other random numbers are drawn as without the callback.
    """

    def __init__(self, seed: int = 0, samples_dim: int | Mapping[str, int] = 0, strict: bool = True) -> None:
        self.seed, self.samples_dim, self.strict = seed, samples_dim, strict
        self._keyed: list[nn.Module] = []
        self._rng_before: int | None = None
        self._batch_size = 0

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Replace the random numbers of the model's dropouts.

        Raises:
            MisconfigurationException: if other modules of the model draw random numbers, or a pattern matches no
                dropout.
        """
        modules = named_modules(pl_module)
        if self.strict:
            self._check(modules)
        dims, group = self._dims(modules), _tensor_group(trainer.strategy)
        for fqn, module in modules.items():
            if can_key_dropout(module):
                key_dropout(module, DropoutSettings(fqn, self.seed, dims.get(fqn, 0), group))
                self._keyed.append(module)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the numbers of the batch's samples."""
        numbers = self._sample_numbers(trainer, batch, batch_idx)
        set_running_samples(SampleNumbers(trainer.current_epoch, numbers, alone=self.strict))
        topology = getattr(trainer.strategy, "topology", None)
        is_pipelined = topology is not None and topology.pipeline > 1
        # a pipeline draws random numbers of its own, and checks the layers itself
        self._rng_before = rng_checksum() if self.strict and not is_pipelined else None

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Check that the step drew no random numbers.

        Raises:
            UnsupportedCodeError: if it did.
        """
        if self._rng_before is not None and self._rng_before != rng_checksum():
            raise other_draws_error("the training step")

    @override
    def on_train_batch_end(self, *args: Any) -> None:
        """Clear the numbers of the batch's samples."""
        set_running_samples(None)

    @override
    def on_train_end(self, *args: Any) -> None:
        """Restore the dropouts."""
        self._restore()

    @override
    def on_exception(self, *args: Any) -> None:
        """Restore the dropouts."""
        self._restore()

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the seed of the run that is resumed."""
        if state_dict["seed"] != self.seed:
            rank_zero_warn(
                f"DropoutBySample(seed={self.seed}) continues with seed {state_dict['seed']} from the checkpoint"
            )
        self.seed = state_dict["seed"]

    def _restore(self) -> None:
        set_running_samples(None)
        for module in self._keyed:
            unkey_dropout(module)
        self._keyed.clear()

    def _check(self, modules: Mapping[str, nn.Module]) -> None:
        others = {fqn: text for fqn, module in modules.items() if (text := _describe_other_draws(module)) is not None}
        if others:
            listed = ", ".join(f"{fqn} ({text})" for fqn, text in others.items())
            raise MisconfigurationException(
                f"DropoutBySample can key nn.Dropout and nn.Dropout1d to 3d, but these draw random numbers by "
                f"themselves: {listed}. Set their probability to 0, use nn.Dropout modules in their place, or allow "
                "them with strict=False."
            )

    def _dims(self, modules: Mapping[str, nn.Module]) -> dict[str, int]:
        dropouts = {fqn: module for fqn, module in modules.items() if can_key_dropout(module)}
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

    def _sample_numbers(self, trainer: pl.Trainer, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the positions of this rank's samples in the epoch's order of samples over all data-parallel ranks."""
        try:
            count = count_samples(batch)
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


def _describe_other_draws(module: nn.Module) -> str | None:
    """Return a description of a module that draws random numbers without a dropout module; None for other modules."""
    if isinstance(module, OTHER_RANDOM) and getattr(module, "p", 1.0) > 0:
        return type(module).__name__
    inner = getattr(module, "dropout", 0.0)
    if isinstance(module, nn.MultiheadAttention | nn.RNNBase) and inner > 0:
        return f"{type(module).__name__} with dropout={inner}"
    return None


def _tensor_group(strategy: Any) -> dist.ProcessGroup | None:
    """Return the tensor-parallel group of ShardedStrategy or Lightning's ModelParallelStrategy, if there is one."""
    mesh: Any = getattr(strategy, "device_mesh", None)
    for name in ("tensor", "tensor_parallel"):
        if mesh is not None and name in (mesh.mesh_dim_names or ()) and mesh[name].size() > 1:
            group: dist.ProcessGroup = mesh.get_group(name)
            return group
    return None
