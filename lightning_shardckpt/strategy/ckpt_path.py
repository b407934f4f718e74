"""The launcher of a Trainer's processes, and ``ckpt_path="last"``, which it resolves before Lightning does.

Lightning takes the ``last*`` file with the newest modification time, complete or not. Here "last" is the complete
checkpoint with the highest step in the callbacks' directories, as rank 0 sees them; a warning lists those that were
skipped. Lightning resolves the other words (``"best"``, ``"hpc"``, ``"registry:…"``).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from contextlib import ExitStack
from glob import escape, glob
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.compat.lightning_runs import ScriptLauncher, intercept_ckpt_path
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.distributed.world import watch_run
from lightning_shardckpt.errors import CheckpointNotFoundError, ShardCkptError
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.storage.run_folder import RunFolder
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.transfer.reader import Checkpoint


class JoiningLauncher(ScriptLauncher):
    """Starts missing processes, makes this one a rank by ``join``, and keeps arguments that Lightning does not pass on.

    A single process starts no others, and sets no ``LOCAL_RANK`` in the environment: the next Trainer and child
    processes would take it for a rank of this run. So a single process may be a notebook.
    """

    ckpt_path: str | os.PathLike[str] | None = None  # the resolved path of the last call
    weights_only: bool | None = None  # the user's argument, which Lightning loses if it loads after the setup

    def __init__(self, *args: Any, join: Callable[[], Ranks]) -> None:
        super().__init__(*args)
        self._join = join

    @property
    def is_interactive_compatible(self) -> bool:
        """True if a notebook may be one of the processes."""
        return self.num_processes * self.num_nodes == 1 or self.cluster_environment.creates_processes_externally

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Call a Trainer's function in all processes."""
        assert trainer is not None
        call = inspect.signature(function).bind(*args, **kwargs)
        if self.is_interactive_compatible:
            return self._join_and_call(trainer, function, call)
        return super().launch(self._join_and_call, trainer, function, call, trainer=trainer)

    def _join_and_call(self, trainer: pl.Trainer, function: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        self.weights_only, ranks = call.arguments.get("weights_only"), self._join()

        def choose(path: Any, select: Callable[[Any], Any]) -> Any:
            last = ranks.step("resolving ckpt_path", lambda: None, lambda _: find_last(trainer, path))
            self.ckpt_path = select(last or path)
            return self.ckpt_path

        with watch_run(ranks.tuning), ExitStack() as undo:
            undo.callback(intercept_ckpt_path(trainer, choose))
            return function(*call.args, **call.kwargs)


def may_lack_weights(trainer: pl.Trainer, path: str) -> bool:
    """Return True if the checkpoint at ``path`` may lack some weights; with ``strict_loading=False`` each one may."""
    if not trainer.lightning_module.strict_loading or os.path.isfile(path):
        return True
    try:
        with Checkpoint(_storage_of(trainer), path) as checkpoint:
            return any(name.startswith("frozen-state-dist-") for name in checkpoint.root.documents)
    except (ShardCkptError, OSError):  # another format, or nothing that can be read: the load raises the error
        return False


def find_last(trainer: pl.Trainer, ckpt_path: Any = "last") -> str | None:
    """Return the path for ``"last"``; None if there are no checkpoints, and for another ``ckpt_path``.

    In a fit with an OnExceptionCheckpoint, None means "last" among its checkpoint and those named ``last*``, unless
    Lightning has another path: an assigned ``trainer.ckpt_path``, or that of a requeued SLURM job. Raises
    CheckpointNotFoundError if there are checkpoints, but no complete one.
    """
    storage, found, fits = _storage_of(trainer), set[str](), trainer.state.fn == TrainerFn.FITTING
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]  # set late
    savers = [callback for callback in callbacks if isinstance(callback, OnExceptionCheckpoint)]
    implied = ckpt_path is None and fits and bool(savers) and trainer.ckpt_path is None
    if implied and SLURMEnvironment.detect():  # Lightning finds the checkpoint of a requeued job
        implied = not glob(os.path.join(escape(str(trainer.default_root_dir)), "hpc_ckpt_*"))
    if ckpt_path != "last" and not implied:
        return None
    for saver in savers:
        found |= {path := file_path(saver.ckpt_path)} & _list_checkpoints(os.path.dirname(path), storage)
    for callback in callbacks:
        if isinstance(callback, ModelCheckpoint):
            paths = _list_checkpoints(_save_directory(callback, trainer), storage)
            found |= {path for path in paths if not implied or os.path.basename(path).startswith("last")}
    complete, skipped = list[tuple[int, str]](), list[str]()
    for path in sorted(found):
        try:
            with Checkpoint(storage, path) as checkpoint:
                if fits and not any(name.startswith("optimizer-state-dist-") for name in checkpoint.root.documents):
                    raise CheckpointNotFoundError("it holds weights only, and training needs more")
                complete.append((checkpoint.root.step or 0, path))
        except (ShardCkptError, OSError) as error:
            skipped.append(f"{path!r}: {error}")
    listed = list_some(skipped, between="; ")
    if skipped and not complete:
        raise CheckpointNotFoundError(
            f'ckpt_path="last": no checkpoint is complete: {listed}. Give a path, or remove them to begin anew'
        )
    if skipped:
        rank_zero_warn(f'ckpt_path="last" skips checkpoints that are not complete: {listed}')
    if not complete:
        return None
    step, path = max(complete)
    rank_zero_info(f'ckpt_path="last" is {path!r} at step {step}')
    return path


def _save_directory(callback: ModelCheckpoint, trainer: pl.Trainer) -> str:
    """Return the directory or URL where a ModelCheckpoint will save, before it is set up; it may not exist yet."""
    if callback.dirpath is not None:
        return os.fspath(callback.dirpath)
    parts = [trainer.default_root_dir]
    if trainer.loggers:
        logger = trainer.loggers[0]
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        parts = [logger.save_dir or trainer.default_root_dir, str(logger.name), version]
    return os.path.join(*parts, "checkpoints")


def _storage_of(trainer: pl.Trainer) -> StorageRouter:
    """Return the storage of ShardCkptIO, with the user's options."""
    io = trainer.strategy.checkpoint_io
    assert isinstance(io, ShardCkptIO)
    return io.storage


def _list_checkpoints(folder: str, storage: StorageRouter) -> set[str]:
    """Return the checkpoints in a folder; in an object store, where killed saves leave parts, only complete ones."""
    if is_url(folder):
        return {url for url in RunFolder(folder, storage).list_complete() if url.endswith(".ckpt")}
    return set(glob(os.path.join(escape(folder), "*.ckpt")))
