"""Resolution of the words that ``ckpt_path`` may have, so that the rest of a run sees paths.

For ``"last"``, Lightning takes the ``last*`` file with the newest modification time, complete or not, and nothing if it
is a broken link. Here it is the complete checkpoint with the highest step in the callbacks' directories; ``"best"`` is
the best complete one. A warning lists incomplete checkpoints that were skipped. ``"hpc"``, a requeued SLURM job and
``"registry:…"`` are resolved as in Lightning. Rank 0 resolves, for all ranks.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shardckpt.compat.lightning_trainer import (
    ScriptLauncher,
    assigned_path,
    is_lightning_keyword,
    resolve_keyword,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, ShardCkptError
from lightning_shardckpt.sources.open_source import find_dcp_directory
from lightning_shardckpt.sources.torch_save import leaves_out_frozen
from lightning_shardckpt.storage.router import StorageRouter, file_path, is_url
from lightning_shardckpt.transfer.reader import Checkpoint

_SUFFIX = ".ckpt"


class ResolvingLauncher(ScriptLauncher):
    """Starts missing processes, and resolves words in ``ckpt_path`` before Lightning sees them.

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
        return self._starts_none

    @property
    def _starts_none(self) -> bool:
        return self.num_processes * self.num_nodes == 1 or self.cluster_environment.creates_processes_externally

    def launch(self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any) -> Any:
        """Call a Trainer's function in all processes."""
        assert trainer is not None
        call = inspect.signature(function).bind(*args, **kwargs)
        if self._starts_none:
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
    """Return the path for ``"last"``, ``"best"`` or None if there are checkpoints; else ``ckpt_path``.

    None means "hpc" in a requeued SLURM job. With an OnExceptionCheckpoint it means "last" among its checkpoint and
    those named ``last*``.

    Args:
        trainer: with the callbacks that save.
        ckpt_path: the user's argument.

    Raises:
        CheckpointNotFoundError: if there are checkpoints, but no complete one; for a model of the registry that was not
            downloaded.
        ValueError: by Lightning, for "hpc" without a checkpoint.
    """
    if ckpt_path is None and assigned_path(trainer) is not None:
        return None
    if ckpt_path is None and SLURMEnvironment.detect():
        with suppress(ValueError):  # by Lightning, if the job was not requeued
            return _ask_lightning(trainer, "hpc")
    if is_lightning_keyword(ckpt_path):
        return _ask_lightning(trainer, str(ckpt_path))
    fitting = trainer.state.fn == TrainerFn.FITTING
    savers = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    implied = ckpt_path is None and fitting and bool(savers)
    if ckpt_path not in ("last", "best") and not implied:
        return ckpt_path
    storage, word = _storage_of(trainer), ckpt_path or "last"
    paths = _list_best(trainer) if word == "best" else _list_saved(trainer, savers, implied, storage)
    return _choose(word, (_inspect(path, storage, fitting) for path in paths)) or ckpt_path


def _ask_lightning(trainer: pl.Trainer, word: str) -> str:
    """Return the path to which Lightning resolves a word.

    Raises:
        CheckpointNotFoundError: for a model of the registry that was not downloaded.
        ValueError: by Lightning, for "hpc" without a checkpoint.
    """
    path = resolve_keyword(trainer, word)
    if path == word and not os.path.lexists(word):
        raise CheckpointNotFoundError(
            f"ckpt_path={word!r} is a model of Lightning's registry, which needs the package litmodels: install it, or "
            "pass the path of a checkpoint"
        )
    assert path is not None
    return os.fspath(path)


def _storage_of(trainer: pl.Trainer) -> StorageRouter:
    """Return the storage of ShardCkptIO, with the user's options."""
    storage = getattr(trainer.strategy.checkpoint_io, "storage", None)
    return storage if isinstance(storage, StorageRouter) else StorageRouter(storage)


# ── candidates ────────────────────────────────────────────────────────────────────────────────────────────────────


def _list_best(trainer: pl.Trainer) -> list[str]:
    """Return the checkpoints of the first ModelCheckpoint, best first."""
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or not callback.best_model_path:
        return []
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    others = sorted(scores, key=scores.__getitem__, reverse=callback.mode == "max")
    return [callback.best_model_path, *(path for path in others if path != callback.best_model_path)]


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
    return storage.remote(path).is_complete(path) if is_url(path) else os.path.lexists(path)


def _list_directory(directory: str, storage: StorageRouter) -> Iterable[str]:
    """Yield the checkpoints in a directory.

    In an object store only complete ones, since an interrupted save leaves its parts at the path of the checkpoint.
    """
    if is_url(directory):
        yield from (url for url in storage.remote(directory).list_complete(directory) if url.endswith(_SUFFIX))
    elif os.path.isdir(directory):
        with os.scandir(directory) as entries:
            yield from sorted(e.path for e in entries if e.name.endswith(_SUFFIX))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path with the step of its checkpoint, or the problem with it.

    ``ours``: the checkpoint has this package's format. If it is incomplete, a run must not start from scratch.
    """

    path: str
    step: int = -1
    problem: str | None = None
    ours: bool = True


def _inspect(path: str, storage: StorageRouter, fitting: bool) -> Candidate:
    if not is_url(path) and not os.path.exists(path) and os.path.islink(path):
        return Candidate(path, problem="a link to nothing")
    if os.path.isfile(path) or find_dcp_directory(path) is not None:
        return Candidate(path, problem="not of lightning-shardckpt, so it is resumed only from its path", ours=False)
    try:
        with Checkpoint(storage, path) as checkpoint:
            has_optimizers = any(name.startswith("optimizer-state-dist-") for name in checkpoint.root.documents)
            light = None if has_optimizers or not fitting else "it holds weights only, and training needs more"
            return Candidate(path, checkpoint.root.step or 0, light)
    except (ShardCkptError, OSError) as error:
        return Candidate(path, problem=str(error))


def _choose(word: str, candidates: Iterator[Candidate]) -> str | None:
    """Return the path of the first complete candidate for "best", of the highest step for "last"; warn of the others.

    Raises:
        CheckpointNotFoundError: if there are checkpoints of this package, but no complete one.
    """
    skipped, complete = list[Candidate](), list[Candidate]()
    for candidate in candidates:
        (complete if candidate.problem is None else skipped).append(candidate)
        if complete and word == "best":
            break  # the rest have worse scores
    chosen = None
    if complete:
        chosen = max(complete, key=lambda one: (one.step, one.path)) if word == "last" else complete[0]
    if chosen is not None and word == "last":
        skipped = [one for one in skipped if not 0 <= one.step < chosen.step]  # would not be chosen anyway
    listed = "; ".join(f"{one.path!r}: {one.problem}" for one in skipped)
    if chosen is None and any(one.ours for one in skipped):
        raise CheckpointNotFoundError(f'ckpt_path="{word}": no checkpoint is complete: {listed}')
    if skipped:
        rank_zero_warn(f'ckpt_path="{word}" skips checkpoints that are not complete: {listed}')
    if chosen is None:
        return None
    rank_zero_info(f'ckpt_path="{word}" is {chosen.path!r} at step {chosen.step}')
    return chosen.path
