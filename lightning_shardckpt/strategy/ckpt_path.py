"""Resolution of ``ckpt_path="last"``, so that the rest of a run sees a path.

Lightning takes the ``last*`` file with the newest modification time, complete or not, and nothing if it is a broken
link. Here it is the complete checkpoint with the highest step in the callbacks' directories, as rank 0 sees them; a
warning lists those that were skipped. Other words (``"best"``, ``"hpc"``, ``"registry:…"``) are left to Lightning.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from glob import escape, iglob
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shardckpt.compat.lightning_trainer import ScriptLauncher, assigned_path
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, ShardCkptError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.sources.open_source import find_dcp_directory
from lightning_shardckpt.sources.torch_save import leaves_out_frozen
from lightning_shardckpt.storage.remote_storage import list_complete
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.transfer.reader import Checkpoint

_SUFFIX = ".ckpt"


class ResolvingLauncher(ScriptLauncher):
    """Starts missing processes, and resolves ``ckpt_path`` before Lightning sees it.

    A single process starts no others, and sets no ``LOCAL_RANK`` in the environment: the next Trainer and child
    processes would take it for a rank of this run. So a single process may be a notebook.

    Args:
        args: for Lightning's launcher.
        join: makes this process one of the ranks.
    """

    resumes_from: str | os.PathLike[str] | None = None
    """The resolved ``ckpt_path`` of the last call."""
    weights_only: bool | None = None
    """The user's argument of the last call; Lightning loses it if a checkpoint is loaded after the setup."""

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
            return self._resolve_and_call(trainer, function, call)
        return super().launch(self._resolve_and_call, trainer, function, call, trainer=trainer)

    def _resolve_and_call(self, trainer: pl.Trainer, function: Callable[..., Any], call: inspect.BoundArguments) -> Any:
        given, self.weights_only = call.arguments.get("ckpt_path"), call.arguments.get("weights_only")
        ckpt_path = file_path(given) if isinstance(given, str | os.PathLike) else given
        ranks = self._join()

        def resolve(_: object) -> str | None:  # None for the user's path, which each rank has
            path = resolve_ckpt_path(trainer, ckpt_path)
            return None if path == ckpt_path else os.fspath(path)

        path: str | None = ranks.step("resolving ckpt_path", lambda: None, resolve)
        self.resumes_from = ckpt_path if path is None else path
        if self.resumes_from != given:
            call.arguments["ckpt_path"] = self.resumes_from
        with ranks.watch():
            return function(*call.args, **call.kwargs)


def needs_weights(trainer: pl.Trainer, path: str | None) -> bool:
    """Return True if a run that loads ``path`` may need initial weights, since the checkpoint may lack some.

    With ``strict_loading=False`` every checkpoint may.
    """
    if path is None or not trainer.lightning_module.strict_loading:
        return True
    if not is_url(path) and not os.path.lexists(path):
        return True
    if os.path.isfile(path):
        return leaves_out_frozen(path)
    try:
        with Checkpoint(_storage_of(trainer), path) as checkpoint:
            return any(name.startswith("frozen-state-dist-") for name in checkpoint.root.documents)
    except ShardCkptError:  # another format, or damaged: the load raises the error
        return False


def resolve_ckpt_path(trainer: pl.Trainer, ckpt_path: Any) -> Any:
    """Return the path for ``"last"`` if there are checkpoints; else ``ckpt_path``.

    In a fit with an OnExceptionCheckpoint, None means "last" among its checkpoint and those named ``last*``, unless
    Lightning has another path: an assigned ``trainer.ckpt_path``, or that of a requeued SLURM job.

    Raises:
        CheckpointNotFoundError: if there are checkpoints, but no complete one.
    """
    fitting = trainer.state.fn == TrainerFn.FITTING
    savers = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    implied = ckpt_path is None and fitting and bool(savers)
    if ckpt_path != "last" and not (implied and assigned_path(trainer) is None and not _is_requeued(trainer)):
        return ckpt_path
    storage, is_incomplete = _storage_of(trainer), False
    complete, skipped = list[tuple[int, str]](), list[str]()
    for path in _list_saved(trainer, savers, implied, storage):
        try:
            complete.append((_read_step(path, storage, fitting), path))
        except (ShardCkptError, OSError) as error:
            skipped.append(f"{path!r}: {error}")
            is_incomplete = is_incomplete or not _is_foreign(path)
    if is_incomplete and not complete:
        raise CheckpointNotFoundError(f'ckpt_path="last": no checkpoint is complete: {"; ".join(skipped)}')
    if skipped:
        rank_zero_warn(f'ckpt_path="last" skips checkpoints that are not complete: {list_some(skipped, between="; ")}')
    if not complete:
        return ckpt_path
    step, path = max(complete)
    rank_zero_info(f'ckpt_path="last" is {path!r} at step {step}')
    return path


def _is_requeued(trainer: pl.Trainer) -> bool:
    """Return True if Lightning finds a checkpoint that a requeued SLURM job has saved."""
    saved = iglob(os.path.join(escape(str(trainer.default_root_dir)), "hpc_ckpt_*"))
    return SLURMEnvironment.detect() and any(saved)


def _storage_of(trainer: pl.Trainer) -> StorageRouter:
    """Return the storage of ShardCkptIO, with the user's options."""
    storage = getattr(trainer.strategy.checkpoint_io, "storage", None)
    return storage if isinstance(storage, StorageRouter) else StorageRouter(storage)


def _list_saved(
    trainer: pl.Trainer, savers: list[OnExceptionCheckpoint], implied: bool, storage: StorageRouter
) -> list[str]:
    """Return the candidates for "last"."""
    paths = {path for path in (file_path(c.ckpt_path) for c in savers) if _exists(path, storage)}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            entries = _list_directory(_save_directory(callback, trainer), storage)
            paths.update(path for path in entries if not implied or os.path.basename(path).startswith("last"))
    return sorted(paths)


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


def _exists(path: str, storage: StorageRouter) -> bool:
    return storage.objects(path).exists(f"{path}/{ROOT_NAME}") if is_url(path) else os.path.lexists(path)


def _list_directory(directory: str, storage: StorageRouter) -> Iterable[str]:
    """Return the checkpoints in a directory.

    In an object store only complete ones, since an interrupted save leaves its parts at the path of the checkpoint.
    """
    if is_url(directory):
        return [url for url in list_complete(storage.objects(directory), directory) if url.endswith(_SUFFIX)]
    names = os.listdir(directory) if os.path.isdir(directory) else ()
    return [os.path.join(directory, name) for name in names if name.endswith(_SUFFIX)]


def _is_foreign(path: str) -> bool:
    """Return True for a file or directory of another program, which does not keep a first run from starting."""
    return os.path.isfile(path) or find_dcp_directory(path) is not None


def _read_step(path: str, storage: StorageRouter, fitting: bool) -> int:
    """Return the step of a complete checkpoint from which a run can resume.

    Raises:
        ShardCkptError: with the reason, for another path.
    """
    if not is_url(path) and not os.path.exists(path):
        raise CheckpointNotFoundError("a link to nothing")
    if _is_foreign(path):
        raise CheckpointNotFoundError("not of lightning-shardckpt, so it is resumed only from its path")
    with Checkpoint(storage, path) as checkpoint:
        if fitting and not any(name.startswith("optimizer-state-dist-") for name in checkpoint.root.documents):
            raise CheckpointNotFoundError("it holds weights only, and training needs more")
        return checkpoint.root.step or 0
