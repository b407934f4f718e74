"""The callback that logs what ``shardckpt follow`` has measured in another process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_shardckpt.storage.router import StorageRouter, absolute_path
from lightning_shardckpt.system.text import count_text, list_some
from lightning_shardckpt.system.threads import NoThreadError, Worker
from lightning_shardckpt.tools.follow import Run

_LOOK_S, _LAST_LOOK_S = 10.0, 1.0  # between two looks for evaluations, in training and at its end


class FollowedMetrics(Callback):
    """Logs the metrics of ``shardckpt follow`` to all loggers of the Trainer, at the steps of their checkpoints.

    The metrics are the numbers of the JSON object that the command printed last, under their names. Rank 0 looks for
    them every ten seconds in a thread, and logs each evaluation once, also after a resume; failed ones are warnings.

    When a fit is complete, this callback tells the follower that the training has ended, and rank 0 waits for
    evaluations that are missing. A warning lists those that are still missing then.

    Args:
        run_dir: the folder of the checkpoints, or its URL; by default the ``dirpath`` of each ModelCheckpoint.
        wait_s: the longest time to wait at the end. Without a process that follows the run, there is no wait.
    """

    def __init__(self, run_dir: str | os.PathLike[str] | None = None, *, wait_s: float = 300.0) -> None:
        self._run_dir, self._wait_s = run_dir, wait_s
        self._runs = list[_LoggedRun]()  # on rank 0, in a fit
        self._reader: Worker | None = None
        self._next_look = 0.0

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the follower that the training goes on."""
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]  # set late
            return
        storage = getattr(trainer.strategy.checkpoint_io, "storage", None)
        storage = storage if isinstance(storage, StorageRouter) else StorageRouter()
        savers = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
        given = [saver.dirpath for saver in savers] if self._run_dir is None else [self._run_dir]
        folders = dict.fromkeys(absolute_path(folder) for folder in given if folder is not None)
        self._runs = [_LoggedRun(folder, storage) for folder in folders]
        for run in self._runs:
            run.folder.set_ended(False)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if not self._runs or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + _LOOK_S
        if self._log(trainer):
            self._reader = Worker(self._look, name="shardckpt-evaluations", daemon=True)
            with suppress(NoThreadError):  # then look again later
                self._reader.start()

    @override
    def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._log(trainer, within_s=_LOOK_S):
            self._look()

    @override
    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Tell the follower that the training has ended, wait for it, and log the rest.

        The strategy has waited for asynchronous saves.
        """
        self._log(trainer, within_s=_LOOK_S)
        deadline, runs = time.monotonic() + self._wait_s, self._runs
        for run in runs:
            run.folder.set_ended(True)
        while runs:
            is_last = time.monotonic() >= deadline
            followed = [run for run in runs if run.folder.is_followed()]  # before the look: its last work is seen
            self._look()
            self._log(trainer)
            if is_last or not any(run.missing() for run in followed):
                break
            time.sleep(_LAST_LOOK_S)
        self._look()  # which notes what was logged
        if missing := [path for run in runs for path in run.missing()]:
            rank_zero_warn(
                f"metrics of {count_text(len(missing), 'checkpoint')} are not logged, since they are not evaluated: "
                f"{list_some(missing)}. `shardckpt follow` evaluates them after the training, too"
            )

    def _look(self) -> None:
        """Read evaluations, in a thread while training goes on."""
        for run in self._runs:
            run.look()

    def _log(self, trainer: pl.Trainer, *, within_s: float = 0) -> bool:
        """Log what was read, and return True, if no thread reads, after ``within_s`` at the latest."""
        if self._reader is not None and self._reader.is_running() and not self._reader.has_ended(within_s):
            return False
        for evaluation in [evaluation for run in self._runs for evaluation in run.take()]:
            if evaluation["status"] != 0:
                rank_zero_warn(f"the evaluation of {evaluation['path']!r} failed with status {evaluation['status']}")
            metrics = evaluation.get("metrics") or {}
            numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
            for logger in trainer.loggers if numbers and evaluation["status"] == 0 else ():
                logger.log_metrics(numbers, step=evaluation["step"])
        return True


class _LoggedRun(Run):
    """A run, and which of its evaluations were logged, which a resumed training reads."""

    def __init__(self, path: str, storage: StorageRouter) -> None:
        super().__init__(path, storage)
        self._evaluations, self._logged, self._taken = list[dict[str, Any]](), set[str](), list[str]()

    def look(self) -> None:
        """Read the evaluations, after writing which were logged since the last look. After an error, look again."""
        try:
            if self._taken:
                self.folder.add_logged(self._taken)
                self._taken = []
            self._logged |= self.folder.logged()
            self._evaluations = self.folder.evaluations()
        except OSError as error:
            rank_zero_warn(f"looking again for evaluations: {error}")

    def take(self) -> list[dict[str, Any]]:
        """Return the evaluations that were read and not logged yet; they count as logged then."""
        new = {_key(one): one for one in self._evaluations if "status" in one and _key(one) not in self._logged}
        self._logged |= new.keys()
        self._taken += new
        return [*new.values()]

    def missing(self) -> list[str]:
        """Return the paths of checkpoints that were not evaluated."""
        return [one.path for one in self.pending(self._evaluations)]


def _key(evaluation: Mapping[str, Any]) -> str:
    return f"{evaluation['save_id']} {evaluation['start']}"
