"""``RunRecorder``: a callback that records a fit as a plan says, begins it from a checkpoint, and ends it.

It comes last of all callbacks, so that it sees what the others did. The run is ended as a kill would end it: no hook
runs, so that nothing of the script's own is written that an interrupted run would not have written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from typing_extensions import override

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_trainer import set_default_root_dir
from lightning_shardckpt.compat.trainer_fit import intercept_fit, is_tuning
from lightning_shardckpt.recording.observe import Observer
from lightning_shardckpt.recording.plain_values import ValueRecorder
from lightning_shardckpt.tools.run_records import (
    Entry,
    Phase,
    RunPlan,
    Sections,
    ended_line,
    moment_line,
    rank_file,
    setting_line,
    unobserved_line,
)


@cache
def recorder_of(plan_file: str) -> RunRecorder:
    """Return the recorder of this process, which looks at its first fit; each Trainer may be given it.

    Args:
        plan_file: of a ``RunPlan`` as JSON.
    """
    plan = RunPlan.from_json(Path(plan_file).read_text())
    os.makedirs(plan.records, exist_ok=True)  # which says that there is a Trainer
    recorder = RunRecorder(plan)
    intercept_fit(recorder.begin)
    return recorder


def end_if_fabric_trains() -> None:
    """End this process at the first backward of Fabric, which has no loop that could be recorded."""

    def end(self: Fabric, *args: Any, **kwargs: Any) -> None:
        raise SystemExit(_TRAINS_WITH_FABRIC)

    Fabric.backward = end  # type: ignore[method-assign]  # for good: the process is there for this proof


_TRAINS_WITH_FABRIC = (
    "This script trains with Fabric, whose loop is the script's own: prove-resume records Trainer.fit. To prove a loop "
    "of Fabric, save at the end of a run that went straight and of one that resumed, and compare both checkpoints: "
    "python -m lightning_shardckpt diff A B"
)


def _end_process() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


class RunRecorder(Callback):
    """Records the first fit that begins.

    Args:
        plan: what to record, and where to begin and to end.
        end: ends the run, on every rank, after the last step's record, and the save if there is one.
    """

    def __init__(self, plan: RunPlan, end: Callable[[], None] = _end_process) -> None:
        self._plan, self._end = plan, end
        self._trainer: pl.Trainer | None = None
        self._step = plan.first_step
        self._values = ValueRecorder({plan.own_saves: "…", plan.root_dir: "…"})
        self._file: TextIO | None = None
        self._observer: Observer | None = None
        self._logger = _StandIn(plan.root_dir)
        self._began_from: str | None = None
        self._validation: dict[str, Entry] = {}
        self._noted = 0

    def begin(self, trainer: pl.Trainer, arguments: dict[str, Any]) -> None:
        """Prepare a fit that is about to begin; all but the first that trains are left alone.

        Args:
            trainer: whose fit it is.
            arguments: of the call, by name; the checkpoint of the plan is put there.
        """
        if self._trainer is not None or self not in trainer.callbacks or is_tuning(trainer):  # type: ignore[attr-defined]  # set later
            return
        self._trainer = trainer
        self._began_from = arguments.get("ckpt_path")
        if self._plan.resume_from is not None:
            arguments["ckpt_path"] = self._plan.resume_from
        self._redirect_saves()
        set_default_root_dir(trainer, self._plan.root_dir)
        trainer.loggers = [self._logger if number == 0 else _StandIn("") for number, _ in enumerate(trainer.loggers)]

    def _redirect_saves(self) -> None:
        assert self._trainer is not None
        for number, callback in enumerate(self._trainer.checkpoint_callbacks):
            if isinstance(callback, ModelCheckpoint):
                callback.dirpath = os.path.join(self._plan.own_saves, str(number))

    # ── hooks ─────────────────────────────────────────────────────────────────────────────────────────────────────

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if trainer is not self._trainer or stage != "fit" or self._file is not None:
            return
        self._redirect_saves()  # of callbacks that the module has configured, too
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]  # a new list: Lightning goes through the old
        self._observer = Observer(trainer, self._values, [self])
        os.makedirs(self._plan.records, exist_ok=True)
        self._file = rank_file(self._plan.records, trainer.global_rank).open("w", encoding="utf-8")
        self._put(setting_line(self._observer.setting, self._began_from and str(self._began_from)))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._observer is not None and trainer is self._trainer and self._plan.resume_from is not None:
            self._record("restored", self._observer.state())

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._observer is None or trainer is not self._trainer:
            return
        self._step += 1
        found = self._observer.before(batch)
        found["validation"], self._validation = self._validation, {}
        found["logger"] = self._values.entries("logged", self._logger.taken())
        self._record("before", found)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._observer is not None and trainer is self._trainer and not trainer.sanity_checking:
            self._validation = self._observer.validation()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._observer is None or trainer is not self._trainer:
            return
        self._record("after", self._observer.after(outputs))
        if self._step >= self._plan.last_step:
            self._finish(trainer)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._file is not None and trainer is self._trainer:
            self._put(ended_line(self._step))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, after which nothing is recorded any more."""
        if self._file is not None:
            self._file.close()
        self._file = self._observer = None

    # ── records ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _record(self, phase: Phase, sections: Sections) -> None:
        self._put(moment_line(self._step, phase, sections))
        if len(self._values.unobserved) > self._noted:
            self._noted = len(self._values.unobserved)
            self._put(unobserved_line(self._values.unobserved))

    def _put(self, line: str) -> None:
        assert self._file is not None
        self._file.write(line + "\n")
        self._file.flush()

    def _finish(self, trainer: pl.Trainer) -> None:
        if self._plan.save_to is not None:
            trainer.save_checkpoint(self._plan.save_to)
            io = trainer.strategy.checkpoint_io
            if isinstance(io, ShardCkptIO):
                io.wait()
            else:
                io.teardown()  # what saves in a thread
        self.close()
        trainer.strategy.barrier("the end of a recorded run")  # until all have recorded
        self._end()


class _StandIn(DummyLogger):
    """Takes the place of a logger, and keeps what is logged until it is taken: nothing is written or sent anywhere.

    Args:
        directory: in which code that asks for a logger's directory may write.
    """

    def __init__(self, directory: str) -> None:
        super().__init__()
        self._directory = directory
        self._metrics: list[dict[str, Any]] = []

    @property
    @override
    def save_dir(self) -> str:
        return self._directory

    @property
    def log_dir(self) -> str:
        """The same; loggers that write files have it."""
        return self._directory

    @override
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._metrics.append({"step": step, **metrics})

    def taken(self) -> list[dict[str, Any]]:
        """Return what was logged since the last call."""
        found, self._metrics = self._metrics, []
        return found
