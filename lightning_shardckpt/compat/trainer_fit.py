"""Look at every call of ``Trainer.fit`` of this process before it begins.

Checked with Lightning 2.5.6 and 2.6.6.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

BeforeFit = Callable[[pl.Trainer, dict[str, Any]], None]


def intercept_fit(before: BeforeFit) -> Callable[[], None]:
    """Call a function before each fit of any Trainer. Returns the undo.

    Replaces the public method ``Trainer.fit``: Lightning has no hook that may still choose ``ckpt_path``.

    Args:
        before: gets the Trainer and the arguments of the call by name, which it may change.
    """
    original = pl.Trainer.fit

    @functools.wraps(original)
    def fit(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        call = inspect.signature(original).bind(self, *args, **kwargs)
        before(self, call.arguments)
        return original(*call.args, **call.kwargs)

    pl.Trainer.fit = fit  # type: ignore[method-assign]  # undone by what is returned

    def undo() -> None:
        pl.Trainer.fit = original  # type: ignore[method-assign]

    return undo


def is_tuning(trainer: pl.Trainer) -> bool:
    """Return whether a fit that begins is one of ``Tuner``, which looks for a learning rate or batch size and ends.

    Relies on the flag ``_early_exit`` of the callback that it adds.
    """
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # set later
    return any(c._early_exit for c in callbacks if isinstance(c, LearningRateFinder | BatchSizeFinder))
