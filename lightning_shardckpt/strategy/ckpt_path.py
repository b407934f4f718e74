"""Find the checkpoints that words in ``ckpt_path`` mean, so that the rest of a run sees paths.

Of ``"last"``, Lightning takes the ``last*`` with the newest modification time, complete or not, and nothing if that is
a broken link. Here it is the newest complete checkpoint by the step that it recorded, among all that lie where the
callbacks save; of ``"best"``, the best one that is complete. What was passed over is told, with the reason. What
``"hpc"``, a requeued SLURM job and ``"registry:…"`` mean is what Lightning says.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable
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
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.sources.dcp import step_of
from lightning_shardckpt.sources.did_you_mean import READABLE
from lightning_shardckpt.sources.paths import dcp_place, leaves_out
from lightning_shardckpt.storage.router import StorageRouter, is_url
from lightning_shardckpt.transfer.reader import Checkpoint

_SUFFIX = ".ckpt"
_ASIDE = re.compile(r"\.old-[0-9a-f]{16}")
_STEP, _HEAD_BYTES = re.compile(rb'"step":(\d{1,18}),"epoch":'), 1024


class ResolvingLauncher(ScriptLauncher):
    """Starts the processes that are not there yet; replaces words in ``ckpt_path`` before Lightning sees them.

    One process alone starts none, and leaves no ``LOCAL_RANK`` in the environment: that would tell the next Trainer and
    each program that is started from here that it is a rank of this run. So it may be a notebook.

    Args:
        args: for Lightning's launcher.
        meet: makes this process one of the ranks, which decide together.
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
        self.weights_only = call.arguments.get("weights_only")
        given = call.arguments.get("ckpt_path")
        find = partial(resolved, trainer, given, weights_only=self.weights_only is not False)
        ranks = self._meet()
        found = agreed(find, given, ranks, _storage_of(trainer).visible_within_s)
        self.resumes_from = found
        if found != given:
            call.arguments["ckpt_path"] = found
        with ranks.watched():
            return function(*call.args, **call.kwargs)


def agreed(find: Callable[[], Any], given: Any, ranks: Ranks, visible_within_s: float) -> Any:
    """Return what ``find`` finds on all ranks, which look again while they see different checkpoints.

    Collective: every rank of ``ranks`` must call it. What is equal to ``given`` is not compared.

    Raises:
        CheckpointNotFoundError: if no rank finds a complete one, though there are some.
        MismatchError: if they still differ when a network file system should have shown all of them the same.
    """
    found = given

    def look() -> dict[str, str | None]:
        nonlocal found
        try:
            found = find()
        except CheckpointNotFoundError as error:
            return {"problem": str(error)}
        return {"path": None if found == given else os.fspath(found)}

    def same(views: list[dict[str, str | None]], look_again: bool) -> bool:
        problems = [view["problem"] for view in views if "problem" in view]
        if len(problems) == len(views):
            raise CheckpointNotFoundError(problems[0])
        other = next((rank for rank, view in enumerate(views) if view != views[0]), None)
        if other is not None and not look_again:
            raise MismatchError(
                f"the ranks find different checkpoints to resume from: rank 0 {_seen(views[0])}, rank {other} "
                f"{_seen(views[other])}; the directory must be on a file system that all ranks share"
            )
        return other is None

    ranks.step_until("agreeing on ckpt_path", look, same, visible_within_s)
    return found


def _seen(view: dict[str, str | None]) -> str:
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


def resolved(trainer: pl.Trainer, ckpt_path: Any, *, weights_only: bool = True) -> Any:
    """``ckpt_path`` as a path, if it is a word of Lightning's and something was saved; else as it was.

    None stands for "hpc" in a requeued SLURM job, and for "last" where there is an OnExceptionCheckpoint: then only its
    checkpoint and those that are called ``last*`` are meant.

    Args:
        trainer: whose callbacks say where they save.
        ckpt_path: the user's.
        weights_only: for plain files, as in ``torch.load``.

    Raises:
        CheckpointNotFoundError: if there are checkpoints, but none that is complete; for a model of the registry that
            was not downloaded.
        ValueError: by Lightning, for "hpc" without a checkpoint.
    """
    if ckpt_path is None and assigned_path(trainer) is not None:
        return None
    if ckpt_path is None and SLURMEnvironment.detect():
        with suppress(ValueError):  # by Lightning, if the job was not requeued
            return _of_lightning(trainer, "hpc")
    if is_word_of_lightning(ckpt_path):
        return _of_lightning(trainer, ckpt_path)
    fitting, storage = trainer.state.fn == TrainerFn.FITTING, _storage_of(trainer)
    look = partial(_look, storage=storage, fitting=fitting, weights_only=weights_only)
    savers = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    if ckpt_path == "best":
        return _choose("best", _best(trainer), look, storage) or ckpt_path
    implied = ckpt_path is None and fitting and savers
    if ckpt_path != "last" and not implied:
        return ckpt_path
    found = _last(trainer, savers, "last" if implied else "", storage)
    by_step = sorted(found, key=lambda path: (_claimed_step(path, storage), path), reverse=True)
    chosen = _choose("last", by_step, look, storage)
    return ckpt_path if chosen is None else found[chosen]


def _of_lightning(trainer: pl.Trainer, word: str) -> str:
    found = path_of_word(trainer, word)
    if found == word and not os.path.lexists(word):
        raise CheckpointNotFoundError(
            f"ckpt_path={word!r} is a model of Lightning's registry, which needs the package litmodels: install it, or "
            "pass the path of a checkpoint"
        )
    assert found is not None
    return os.fspath(found)


def _storage_of(trainer: pl.Trainer) -> StorageRouter:
    """Return the storage with the options that the user gave to ShardCkptIO."""
    found = getattr(trainer.strategy.checkpoint_io, "storage", None)
    return found if isinstance(found, StorageRouter) else StorageRouter(found)


def _last(
    trainer: pl.Trainer, savers: list[OnExceptionCheckpoint], prefix: str, storage: StorageRouter
) -> dict[str, str]:
    """Return the checkpoints that may be meant, each once, with the link to it, if there is one; no links to nothing.

    ModelCheckpoint never deletes the path from which a run resumed: that should be the link.
    """
    paths = {c.ckpt_path for c in savers if _is_there(c.ckpt_path, storage)}
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            directory = save_directory(callback, trainer)
            found = _entries(directory, storage)
            paths.update(path for path in found if os.path.basename(path).startswith(prefix))
    links = {os.path.realpath(path): path for path in paths if os.path.islink(path) and os.path.exists(path)}
    plain = {path: path for path in paths if path not in links.values()}
    return plain | links


def _is_there(path: str, storage: StorageRouter) -> bool:
    return storage.remote(path).is_complete(path) if is_url(path) else os.path.lexists(path)


def _entries(directory: str, storage: StorageRouter) -> Iterable[str]:
    """Checkpoints in a directory, and those that an interrupted save moved aside from there.

    In a store only complete ones: what an interrupted save leaves there is where its checkpoint would be.
    """
    if is_url(directory):
        yield from (url for url in storage.remote(directory).complete(directory) if url.endswith(_SUFFIX))
    elif os.path.isdir(directory):
        with os.scandir(directory) as entries:
            yield from sorted(e.path for e in entries if e.name.endswith(_SUFFIX) or _ASIDE.fullmatch(e.name))


def _claimed_step(path: str, storage: StorageRouter) -> int:
    """The step in the first bytes of a root index, to be verified later: of many checkpoints one has to be read.

    The largest number for what must be looked at to know, such as checkpoints of other formats.
    """
    if os.path.isfile(path):
        return sys.maxsize
    try:
        if is_url(path):
            found = _STEP.search(storage.remote(path).root_head(path, _HEAD_BYTES))
        else:
            with open(os.path.join(path, ROOT_NAME), "rb") as file:
                found = _STEP.search(file.read(_HEAD_BYTES))
    except OSError:
        return sys.maxsize
    return int(found[1]) if found else sys.maxsize


def _best(trainer: pl.Trainer) -> list[str]:
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or not callback.best_model_path:
        return []
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    others = sorted(scores, key=scores.__getitem__, reverse=callback.mode == "max")
    return [callback.best_model_path, *(path for path in others if path != callback.best_model_path)]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A path, with the step that its checkpoint recorded, or why it is not taken; ``ours``: that is no good sign."""

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
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
            problem = lacks if fitting and "optimizer_states" not in found else None
            return Candidate(path, int(found["global_step"]), problem, ours=False)
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


def _choose(word: str, paths: list[str], look: Callable[[str], Candidate], storage: StorageRouter) -> str | None:
    """The first complete one, or of plain files before it that of the highest step; tells what was passed over."""
    skipped: list[Candidate] = []
    complete: list[Candidate] = []
    for path in paths:
        seen = look(path)
        (complete if seen.problem is None else skipped).append(seen)
        if seen.problem is None and (word == "best" or _claimed_step(path, storage) < sys.maxsize):
            break  # those after it have lower scores, or steps
    listed = "; ".join(f"{s.path!r}: {s.problem}" for s in skipped)
    if not complete and any(seen.ours for seen in skipped):
        raise CheckpointNotFoundError(f'ckpt_path="{word}": no checkpoint is complete: {listed}')
    if skipped:
        rank_zero_warn(f'ckpt_path="{word}" passes over what is no complete checkpoint: {listed}')
    if not complete:
        return None
    chosen = complete[0] if word == "best" else max(complete, key=lambda seen: seen.step)
    rank_zero_info(f'ckpt_path="{word}" is {chosen.path!r} at step {chosen.step}')
    if word == "last":
        _warn_of_another_branch(chosen, paths, storage)
    return chosen.path


def _warn_of_another_branch(chosen: Candidate, paths: list[str], storage: StorageRouter) -> None:
    """A lower step that was saved later: somebody went back, or several runs save here. Only the user can know."""
    times = {path: _saved_at(path) for path in paths}
    newer = [path for path in paths if times[path] > times[chosen.path]]
    later = [path for path in newer if 0 <= _claimed_step(path, storage) < chosen.step]
    if later:
        rank_zero_warn(
            f'ckpt_path="last" is the highest step, {chosen.step}, in {chosen.path!r}, but {later[0]!r}, of a lower '
            "one, was saved later. If the run had gone back, or another one began here, pass the path instead."
        )


def _saved_at(path: str) -> float:
    with suppress(OSError):
        marks = (os.path.join(path, name) for name in READABLE)
        return os.stat(path if os.path.isfile(path) else next(filter(os.path.exists, marks), "")).st_mtime
    return 0.0
