"""Which checkpoint do ``ckpt_path="last"`` and ``"best"`` mean?

Lightning takes the ``last*`` with the newest modification time, complete or not, and nothing if that is a broken link.
Here it is the newest complete checkpoint by the step that it recorded, among all that lie where the callbacks save; of
``"best"``, the best one that is complete. What was passed over is told, with the reason.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError, ShardCkptError
from lightning_shardckpt.read import Checkpoint
from lightning_shardckpt.storage.local import LocalStorage

_SUFFIX = ".ckpt"


class ResolvingLauncher(_SubprocessScriptLauncher):
    """Starts the processes that are not there yet; replaces ``"last"`` and ``"best"`` before Lightning sees them."""

    found: str | None = None
    """What one of the words stood for in the last call."""

    @property
    def is_interactive_compatible(self) -> bool:
        """Whether a notebook can be one of the processes."""
        return self.cluster_environment.creates_processes_externally

    def launch(
        self, function: Callable[..., Any], *args: Any, trainer: pl.Trainer | None = None, **kwargs: Any
    ) -> Any:
        """Call a Trainer's function in all processes."""
        assert trainer is not None
        call = inspect.signature(function).bind(*args, **kwargs)
        given = call.arguments.get("ckpt_path")
        found = resolved(trainer, given)
        self.found = None if found == given else found
        if found != given:
            call.arguments["ckpt_path"] = found
        if self.cluster_environment.creates_processes_externally:
            return function(*call.args, **call.kwargs)
        return super().launch(function, *call.args, trainer=trainer, **call.kwargs)


def resolved(trainer: pl.Trainer, ckpt_path: Any) -> Any:
    """``ckpt_path`` as a path, if it is one of the two words and something was saved; else as it was.

    Raises:
        CheckpointNotFoundError: if there are checkpoints, but none that is complete.
    """
    savers = [c for c in trainer.callbacks if isinstance(c, OnExceptionCheckpoint)]  # type: ignore[attr-defined]
    if ckpt_path is None and savers and trainer.state.fn == TrainerFn.FITTING:
        ckpt_path = "last"  # as Lightning decides
    if ckpt_path == "last":
        return _last(trainer, savers) or ckpt_path
    if ckpt_path == "best":
        return _best(trainer) or ckpt_path
    return ckpt_path


def _last(trainer: pl.Trainer, savers: list[OnExceptionCheckpoint]) -> str | None:
    paths = {os.path.realpath(c.ckpt_path) for c in savers if os.path.lexists(c.ckpt_path)}
    broken: list[Seen] = []
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            for path in _entries(os.fspath(callback._ModelCheckpoint__resolve_ckpt_dir(trainer))):  # type: ignore[attr-defined]
                if os.path.exists(path):
                    paths.add(os.path.realpath(path) if os.path.islink(path) else path)
                else:
                    broken.append(Seen(path, problem="a link to nothing"))
    seen = [_look(path) for path in sorted(paths)]
    return _choose("last", sorted(seen, key=lambda s: (s.step, s.path), reverse=True) + broken)


def _entries(directory: str) -> Iterable[str]:
    """Checkpoints in a directory, and one that an interrupted save moved aside from there."""
    if os.path.isdir(directory):
        with os.scandir(directory) as entries:
            yield from sorted(e.path for e in entries if e.name.endswith(_SUFFIX) or e.name.startswith(".old-"))


def _best(trainer: pl.Trainer) -> str | None:
    callback = trainer.checkpoint_callback
    if not isinstance(callback, ModelCheckpoint) or not callback.best_model_path:
        return None
    scores = {path: float(score) for path, score in callback.best_k_models.items()}
    others = sorted(scores, key=scores.__getitem__, reverse=callback.mode == "max")
    paths = [callback.best_model_path, *(path for path in others if path != callback.best_model_path)]
    return _choose("best", [_look(path) for path in paths])


@dataclass(frozen=True, slots=True)
class Seen:
    """A path, with the step that its checkpoint recorded, or why it is none; step -1 then."""

    path: str
    step: int = -1
    problem: str | None = None


def _look(path: str) -> Seen:
    try:
        if os.path.isfile(path):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            return Seen(path, int(found["global_step"]))
        with Checkpoint(LocalStorage(), path) as checkpoint:
            return Seen(path, checkpoint.root.step or 0)
    except (ShardCkptError, OSError) as error:
        return Seen(path, problem=str(error))
    except Exception as error:  # whatever torch.load makes of a file
        return Seen(path, problem=f"{type(error).__name__}: {str(error).partition(chr(10))[0]}")


def agree_on_path(found: list[str | None]) -> None:
    """Raise if ranks found different checkpoints, or some none.

    Raises:
        MismatchError: naming the first two ranks that differ.
    """
    for rank, path in enumerate(found):
        if path != found[0]:
            raise MismatchError(
                f"the ranks find different checkpoints to resume from: rank 0 {found[0]!r}, rank {rank} {path!r}; "
                "is the directory on a file system that all ranks share?"
            )


def _choose(word: str, seen: list[Seen]) -> str | None:
    """The first complete one; tells which were passed over."""
    skipped = [s for s in seen if s.problem is not None]
    complete = [s for s in seen if s.problem is None]
    listed = "; ".join(f"{s.path!r}: {s.problem}" for s in skipped)
    if not complete and skipped:
        raise CheckpointNotFoundError(f'ckpt_path="{word}": no checkpoint is complete: {listed}')
    if not complete:
        return None
    if skipped:
        rank_zero_warn(f'ckpt_path="{word}" passes over what is no complete checkpoint: {listed}')
    rank_zero_info(f'ckpt_path="{word}" is {complete[0].path!r} at step {complete[0].step}')
    return complete[0].path
