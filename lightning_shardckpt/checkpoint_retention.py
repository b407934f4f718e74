"""``CheckpointRetention``: a callback that deletes older checkpoints of a run but for those that its rules keep.

It asks ``ShardCkptIO`` whether a save has ended, and lets it delete, as ModelCheckpoint does. No rank talks to another.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import lightning.pytorch as pl
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shardckpt.checkpoint.finished_saves import FinishedSave
from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_trainer import save_directory
from lightning_shardckpt.errors import ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.router import is_url
from lightning_shardckpt.transfer.reader import Checkpoint

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

    def superfluous(self, found: Iterable[SavedCheckpoint], protected: Collection[str] = ()) -> list[SavedCheckpoint]:
        """The checkpoints that no rule keeps, the oldest first; never one of the ``protected`` paths."""
        newest_first = sorted(found, key=lambda one: (one.saved_at_s, one.step), reverse=True)
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
            found = list(self._complete(directory, self._io, protected))
            for one in self.rules.superfluous(found, protected):
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
