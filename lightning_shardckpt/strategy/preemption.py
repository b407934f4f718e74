"""End a run early on all ranks alike: by SIGTERM, on one rank or on all, or by an exception.

Lightning's own handler communicates inside the signal handler and looks at rank 0 alone (2.6.6): a signal to another
rank, or in the middle of a collective, hangs. Here the handler only remembers; before the next batch all ranks agree,
and after it all of them leave with Lightning's SIGTERMException, at the same step. ``OnExceptionCheckpoint`` and
``ModelCheckpoint(save_on_exception=True)`` save there. After an exception that only some ranks got they can't, and
must neither wait for the others nor hide what happened.
"""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from enum import Enum, auto
from types import FrameType

import lightning.pytorch as pl

from lightning_shardckpt.compat.lightning_loops import skip_sigterm_broadcast
from lightning_shardckpt.compat.lightning_trainer import receive_sigterm, sigterm_handler_before
from lightning_shardckpt.distributed.ranks import Ranks


class Preemption:
    """The signal that tells this run to end. Replaces Lightning's handler; Lightning restores what was before it."""

    def __init__(self) -> None:
        self._told = False
        self._undo: Callable[[], None] = lambda: None

    def watch(self, trainer: pl.Trainer) -> None:
        """Call when training starts, after Lightning has registered its handlers; undone by ``unwatch``."""
        self._told = False
        self._undo = skip_sigterm_broadcast(trainer)
        before = sigterm_handler_before(trainer)

        def handler(number: int, frame: FrameType | None) -> None:
            self._told = True
            if before is not None:
                before(number, frame)

        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    def unwatch(self) -> None:
        """Leave Lightning's loop as it was."""
        self._undo()

    def agree(self, trainer: pl.Trainer, anybody: Callable[[bool], bool]) -> None:
        """Call before every batch, with a collective "or": makes Lightning stop after this batch, on all ranks alike.

        Collective: every rank of the world must call it.
        """
        if anybody(self._told):
            self._told = False
            receive_sigterm(trainer)


class Ending(Enum):
    """Progress of a rank after an exception: nothing known; no save with all others; all save; its hooks are done."""

    NONE = auto()
    ALONE = auto()
    TOGETHER = auto()
    LEFT = auto()


def save_after_exception(
    ranks: Ranks, save: Callable[[], None], wait: Callable[[], None], *, agreed: bool, meeting_s: float
) -> Ending:
    """Save if all ranks come to do so; else, or if it fails, say so in a warning and go on with the exception.

    Collective for the ranks that got an exception.

    Args:
        ranks: all that save together.
        save: writes the checkpoint.
        wait: for what is saved asynchronously; called before and after, since the process may be about to end.
        agreed: whether it is known that all ranks got it, as for a signal; else that is found out.
        meeting_s: ranks that got the same exception come within this time of each other.
    """
    try:
        if not agreed:
            ranks.step("meeting for a last checkpoint", lambda: None, lambda came: None, timeout_s=meeting_s)
        try:
            wait()
        except Exception as error:  # on all ranks alike; it must not cost the last checkpoint, too
            warnings.warn(f"before the exception, a save had failed: {error}", stacklevel=2)
        save()
        wait()
    except Exception as error:
        warnings.warn(f"no checkpoint was saved after the exception: {error}", stacklevel=2)
        return Ending.ALONE
    return Ending.TOGETHER
