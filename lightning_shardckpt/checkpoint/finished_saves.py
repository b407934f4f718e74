"""Remember what complete saves took: seconds, bytes, and what waited after them.

Knows neither what is saved nor who asks. A save is recorded once it is complete and the call that began it has
returned, which may be in either order: a thread completes what is asynchronous.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_KEPT = 100


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a save, as who wrote it tells it.

    Attributes:
        nbytes: of all files that all ranks wrote.
        linked_nbytes: of those of the files that were linked, and not written.
    """

    nbytes: int
    linked_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class FinishedSave:
    """A save that is complete, with times of this rank.

    Attributes:
        path: of the checkpoint.
        step: of training, if what was saved has one.
        duration_s: seconds from the call until the checkpoint was complete on all ranks.
        blocked_s: seconds for which training could not go on: those of the call, also where it waited for room.
            Without ``use_async`` the whole save.
        nbytes: of the files of the checkpoint, over all ranks.
        pending: asynchronous saves that waited to be written when this one was done.
        linked_nbytes: of those bytes, the ones in files that were linked, and not written; see ``incremental``.
    """

    path: str
    step: int | None
    duration_s: float
    blocked_s: float
    nbytes: int
    pending: int
    linked_nbytes: int = 0


class FinishedSaves:
    """The latest saves of one caller that are complete."""

    def __init__(self) -> None:
        self._latest: deque[FinishedSave] = deque(maxlen=_KEPT)

    def latest(self) -> tuple[FinishedSave, ...]:
        """Return at most 100 of them, in the order in which they ended."""
        return tuple(self._latest)

    @contextmanager
    def measured(
        self, path: str, step: int | None, waiting: Callable[[], int]
    ) -> Iterator[Callable[[Completed], None]]:
        """Measure the call that saves, in this context; call what it gives when the save is complete, in any thread.

        Args:
            path: of the checkpoint.
            step: of training.
            waiting: tells how many saves wait to be written.
        """
        began, lock = time.monotonic(), threading.RLock()  # a signal handler may save, too
        returned_s: float | None = None
        ended: tuple[float, Completed, int] | None = None

        def record() -> None:
            if returned_s is not None and ended is not None:
                duration_s, completed, pending = ended
                nbytes, linked = completed.nbytes, completed.linked_nbytes
                self._latest.append(FinishedSave(path, step, duration_s, returned_s, nbytes, pending, linked))

        def complete(completed: Completed) -> None:
            nonlocal ended
            with lock:
                ended = time.monotonic() - began, completed, waiting()
                record()

        try:
            yield complete
        finally:
            with lock:
                returned_s = time.monotonic() - began
                record()
