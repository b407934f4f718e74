"""Resolve the words that ``ckpt_path`` may have, so that the rest of a run sees paths.

Of ``"last"``, Lightning takes the ``last*`` with the newest modification time, complete or not, and nothing if that is
a broken link. Here it is the newest complete checkpoint by the step that it recorded, among all that lie where the
callbacks save; of ``"best"``, the best one that is complete. A warning lists those that were passed over, and why.
``"hpc"``, a requeued SLURM job and ``"registry:…"`` are resolved as Lightning does.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shardckpt.compat.lightning_trainer import (
    ScriptLauncher,
    assigned_path,
    is_word_of_lightning,
    path_of_word,
    save_directory,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError, ShardCkptError
from lightning_shardckpt.sources.dcp import step_of
from lightning_shardckpt.sources.did_you_mean import READABLE
from lightning_shardckpt.sources.paths import dcp_place, leaves_out
from lightning_shardckpt.storage.router import StorageRouter, is_url
from lightning_shardckpt.transfer.reader import Checkpoint

_SUFFIX = ".ckpt"
_ASIDE = re.compile(r"\.old-[0-9a-f]{16}")


class ResolvingLauncher(ScriptLauncher):
    """Starts the processes that are not there yet, and replaces words in ``ckpt_path`` before Lightning sees them.

    One process alone starts none, and leaves no ``LOCAL_RANK`` in the environment: that would tell the next Trainer and
    each program that is started from here that it is a rank of this run. So it may be a notebook.

    Args:
        args: for Lightning's launcher.
        meet: makes this process one of the ranks.
    """

    resumes_from: str | os.PathLike[str] | None = None
    """The path of a checkpoint that the last call was given."""
    weights_only: bool | None = None
    """What the user passed in it; Lightning forgets it where a checkpoint is loaded after the setup."""

    def __init__(self, *args: Any, meet: Callable[[], Ranks]) -> None:
        super().__init__(*args)
        self._meet = meet

    @property
    def is_interactive_compatible(self) -> bool:
        """True if a notebook can be one of the processes."""
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
        resolve = partial(resolve_ckpt_path, trainer, given, weights_only=self.weights_only is not False)
        ranks = self._meet()
        self.resumes_from = agree_on_path(resolve, given, ranks, _storage_of(trainer).visible_within_s)
        if self.resumes_from != given:
            call.arguments["ckpt_path"] = self.resumes_from
        with ranks.watch():
            return function(*call.args, **call.kwargs)


def agree_on_path(resolve: Callable[[], Any], given: Any, ranks: Ranks, visible_within_s: float) -> Any:
    """Return what ``resolve`` returns on all ranks, which look again while they see different checkpoints.

    Collective: every rank of ``ranks`` must call it. What is equal to ``given`` is not compared.

    Raises:
        CheckpointNotFoundError: if no rank finds a complete one, though there are some.
        MismatchError: if they still differ when a network file system should have shown all of them the same.
    """
    path = given

    def look() -> dict[str, str | None]:
        nonlocal path
        try:
            path = resolve()
        except CheckpointNotFoundError as error:
            return {"problem": str(error)}
        return {"path": None if path == given else os.fspath(path)}

    def are_same(views: list[dict[str, str | None]], look_again: bool) -> bool:
        problems = [view["problem"] for view in views if "problem" in view]
        if len(problems) == len(views):
            raise CheckpointNotFoundError(problems[0])
        other = next((rank for rank, view in enumerate(views) if view != views[0]), None)
        if other is not None and not look_again:
            raise MismatchError(
                f"the ranks find different checkpoints to resume from: rank 0 {_describe(views[0])}, rank {other} "
                f"{_describe(views[other])}; the directory must be on a file system that all ranks share"
            )
        return other is None

    ranks.step_until("agreeing on ckpt_path", look, are_same, visible_within_s)
    return path


def _describe(view: dict[str, str | None]) -> str:
    return f"none that is complete ({view['problem']})" if "problem" in view else repr(view["path"])


def begins_anew(trainer: pl.Trainer, launcher: object) -> bool:
    """Return whether a run may need weights to begin with; False if a checkpoint has all of them.

    One that is loaded with ``strict_loading=False`` may lack some.
    """
    path = launcher.resumes_from if isinstance(launcher, ResolvingLauncher) else None
    path = assigned_path(trainer) if path is None else path
    if path is None or not trainer.lightning_module.strict_loading:
        return True
    if not is_url(path) and not os.path.lexists(path):
        return True
    if os.path.isfile(path):
        return leaves_out(os.fspath(path))
    try:
        with Checkpoint(_storage_of(trainer), os.fspath(path)) as checkpoint:
            return any(name.startswith("frozen-state-dist-") for name in checkpoint.root.documents)
    except ShardCkptError:  # of another format; what is wrong with it is said when it is loaded
        return False


def resolve_ckpt_path(trainer: pl.Trainer, ckpt_path: Any, *, weights_only: bool = True) -> Any:
    """Return the path that ``"last"``, ``"best"`` or None stands for, if something was saved; else ``ckpt_path``.

    None stands for "hpc" in a requeued SLURM job, and for "last" where there is an OnExceptionCheckpoint: then only its
    checkpoint and those that are called ``last*`` are meant.

    Args:
        trainer: whose callbacks say where they save.
        ckpt_path: the user's.
        weights_only: for plain files, as in ``torch.load``.

    Returns:
        The path; None or the word where there is nothing to resume from.

    Raises:
        CheckpointNotFoundError: if there are checkpoints, but none that is complete; for a model of the registry that
            was not downloaded.
        ValueError: by Lightning, for "hpc" without a checkpoint.
    """
    if ckpt_path is None and assigned_path(trainer) is not None:
        return None
    if ckpt_path is None and SLURMEnvironment.detect():
        with suppress(ValueError):  # by Lightning, if the job was not requeued
            return _ask_lightning(trainer, "hpc")
    if is_word_of_lightning(ckpt_path):
        return _ask_lightning(trainer, str(ckpt_path))
    fitting = trainer.state.fn == TrainerFn.FITTING
    savers = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    implied = ckpt_path is None and fitting and bool(savers)
    if ckpt_path not in ("last", "best") and not implied:
        return ckpt_path
    storage, word = _storage_of(trainer), ckpt_path or "last"
    paths = {path: path for path in _best(trainer)} if word == "best" else _saved(trainer, savers, implied, storage)
    looks = (_look(path, storage=storage, fitting=fitting, weights_only=weights_only) for path in paths)
    chosen = _choose(word, looks)
    return ckpt_path if chosen is None else paths[chosen]


def _ask_lightning(trainer: pl.Trainer, word: str) -> str:
    """Return the path that Lightning takes a word for.

    Raises:
        CheckpointNotFoundError: for a model of the registry that was not downloaded.
        ValueError: by Lightning, for "hpc" without a checkpoint.
    """
    path = path_of_word(trainer, word)
    if path == word and not os.path.lexists(word):
        raise CheckpointNotFoundError(
            f"ckpt_path={word!r} is a model of Lightning's registry, which needs the package litmodels: install it, or "
            "pass the path of a checkpoint"
        )
    assert path is not None
    return os.fspath(path)


def _storage_of(trainer: pl.Trainer) -> StorageRouter:
    """Return the storage with the options that the user gave to ShardCkptIO."""
    storage = getattr(trainer.strategy.checkpoint_io, "storage", None)
    return storage if isinstance(storage, StorageRouter) else StorageRouter(storage)


# ── candidates ────────────────────────────────────────────────────────────────────────────────────────────────────


def _best(trainer: pl.Trainer) -> list[str]:
    """Return the checkpoints of the first ModelCheckpoint, the best one first."""
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or not callback.best_model_path:
        return []
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    others = sorted(scores, key=scores.__getitem__, reverse=callback.mode == "max")
    return [callback.best_model_path, *(path for path in others if path != callback.best_model_path)]


def _saved(
    trainer: pl.Trainer, savers: list[OnExceptionCheckpoint], implied: bool, storage: StorageRouter
) -> dict[str, str]:
    """Return the checkpoints that may be meant, each once, with the link to it, if there is one.

    ModelCheckpoint never deletes the path from which a run resumed: that should be the link.
    """
    paths = {c.ckpt_path for c in savers if _is_there(c.ckpt_path, storage)}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            entries = _entries(save_directory(callback, trainer), storage)
            paths.update(path for path in entries if not implied or os.path.basename(path).startswith("last"))
    links = {os.path.realpath(path): path for path in paths if os.path.islink(path) and os.path.exists(path)}
    plain = {path: path for path in paths if path not in links.values()}
    return plain | links


def _is_there(path: str, storage: StorageRouter) -> bool:
    return storage.remote(path).is_complete(path) if is_url(path) else os.path.lexists(path)


def _entries(directory: str, storage: StorageRouter) -> Iterable[str]:
    """Yield checkpoints in a directory, and those that an interrupted save moved aside from there.

    In a store only complete ones: what an interrupted save leaves there is where its checkpoint would be.
    """
    if is_url(directory):
        yield from (url for url in storage.remote(directory).list_complete(directory) if url.endswith(_SUFFIX))
    elif os.path.isdir(directory):
        with os.scandir(directory) as entries:
            yield from sorted(e.path for e in entries if e.name.endswith(_SUFFIX) or _ASIDE.fullmatch(e.name))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path, with the step that its checkpoint recorded, or why it is not taken.

    ``ours``: it is of this package, so that a run must not begin anew where it is incomplete.
    """

    path: str
    step: int = -1
    problem: str | None = None
    ours: bool = True


def _look(path: str, *, storage: StorageRouter, fitting: bool, weights_only: bool) -> Candidate:
    if not is_url(path) and not os.path.exists(path) and os.path.islink(path):
        return Candidate(path, problem="a link to nothing")
    lacks = "it holds weights only, so training cannot go on from it"
    try:
        if os.path.isfile(path):
            stored = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            problem = lacks if fitting and "optimizer_states" not in stored else None
            return Candidate(path, int(stored["global_step"]), problem, ours=False)
        if dcp_place(path) == path:  # else it is not a Trainer's
            step, resumes = step_of(path, weights_only=weights_only)
            return Candidate(path, step, None if resumes or not fitting else lacks, ours=False)
        with Checkpoint(storage, path) as checkpoint:
            documents = checkpoint.root.documents
            resumes = not fitting or any(name.startswith("optimizer-state-dist-") for name in documents)
            return Candidate(path, checkpoint.root.step or 0, None if resumes else lacks)
    except (ShardCkptError, OSError) as error:
        return Candidate(path, problem=str(error))
    except Exception as error:  # whatever torch.load makes of a file, or a file that is no checkpoint
        return Candidate(path, problem=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}", ours=False)


def _choose(word: str, candidates: Iterator[Candidate]) -> str | None:
    """Return the first complete one for "best", that of the highest step for "last"; warns of the others.

    Raises:
        CheckpointNotFoundError: if there are checkpoints of this package, but none that is complete.
    """
    skipped, complete = list[Candidate](), list[Candidate]()
    for seen in candidates:
        (complete if seen.problem is None else skipped).append(seen)
        if complete and word == "best":
            break  # those after it have lower scores
    chosen = None
    if complete:
        chosen = max(complete, key=lambda seen: (seen.step, seen.path)) if word == "last" else complete[0]
    if chosen is not None and word == "last":
        skipped = [seen for seen in skipped if not 0 <= seen.step < chosen.step]  # would not be taken anyway
    listed = "; ".join(f"{s.path!r}: {s.problem}" for s in skipped)
    if chosen is None and any(seen.ours for seen in skipped):
        raise CheckpointNotFoundError(f'ckpt_path="{word}": no checkpoint is complete: {listed}')
    if skipped:
        rank_zero_warn(f'ckpt_path="{word}" passes over what is no complete checkpoint: {listed}')
    if chosen is None:
        return None
    rank_zero_info(f'ckpt_path="{word}" is {chosen.path!r} at step {chosen.step}')
    if word == "last":
        times = {seen: _saved_at(seen.path) for seen in complete}
        later = [seen for seen in complete if times[seen] > times[chosen] and seen.step < chosen.step]
        if later:  # the user went back, or several runs save here
            rank_zero_warn(
                f'ckpt_path="last" is the highest step, {chosen.step}, in {chosen.path!r}, but {later[0].path!r}, of a '
                "lower one, was saved later. If the run had gone back, or another one began here, pass the path."
            )
    return chosen.path


def _saved_at(path: str) -> float:
    with suppress(OSError):
        marks = (os.path.join(path, name) for name in READABLE)
        return os.stat(path if os.path.isfile(path) else next(filter(os.path.exists, marks), "")).st_mtime
    return 0.0
