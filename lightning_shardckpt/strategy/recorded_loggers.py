"""Note what a pipelined step writes to the Trainer's loggers by itself, to write it once, on rank zero.

Stages run a step several times, and only the last one runs it to its end. There, and in runs that don't count,
something that stands for each logger takes the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_shardckpt.parallel.pipeline.portable_values import moved_to


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """One call of a method of a logger, or of its experiment.

    ``path`` is the number of the logger, then names of attributes, and keys in lists of one.
    """

    path: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def repeat(self, loggers: Sequence[Any], device: torch.device) -> None:
        """Make the call on a real logger, with tensors on ``device``."""
        number, *keys = self.path
        found = loggers[number]
        for key in keys:
            found = found[key[0]] if isinstance(key, list) else getattr(found, key)
        args, kwargs = moved_to((self.args, self.kwargs), device)
        found(*args, **kwargs)


@contextmanager
def recorded_loggers(trainer: pl.Trainer, note: Callable[[WrittenCall], None]) -> Iterator[None]:
    """Inside, ``note`` gets what is called of the loggers of ``trainer``; their other attributes are there."""
    loggers = trainer.loggers
    if not loggers:
        yield
        return
    trainer.loggers = [_Recorded(logger, (number,), note) for number, logger in enumerate(loggers)]  # type: ignore[misc]
    try:
        yield
    finally:
        trainer.loggers = loggers


class _Recorded:
    """Stands for a logger, its experiment, or another object or method that is found there."""

    def __init__(self, target: Any, path: tuple[Any, ...], note: Callable[[WrittenCall], None]) -> None:
        self.__dict__.update(_target=target, _path=path, _note=note)

    @property  # type: ignore[misc]  # so that isinstance says what it stands for
    def __class__(self) -> type:
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        return self._standing_for(getattr(self.__dict__["_target"], name), name)

    def __getitem__(self, key: Any) -> Any:
        return self._standing_for(self._target[key], [key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._note(WrittenCall((*self._path, "__setitem__"), (key, value), {}))

    def _standing_for(self, found: Any, key: Any) -> Any:
        is_value = type(found).__module__ == "builtins" or isinstance(found, PurePath | Tensor)
        return found if is_value and not callable(found) else _Recorded(found, (*self._path, key), self._note)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._note(WrittenCall(self._path, args, kwargs))
