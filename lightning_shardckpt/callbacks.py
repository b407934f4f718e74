"""Callbacks: log the cost of saves, and delete older checkpoints by rules.

`CheckpointMonitor` and `CheckpointRetention` read the list of finished saves of ``ShardCkptIO``, without communication
between ranks.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shardckpt.checkpoint.save_series import FinishedSave
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_trainer import save_directory
from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.router import file_path, is_url
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
