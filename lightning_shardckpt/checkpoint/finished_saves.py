"""Record the duration and size of complete saves, and the number of saves that waited.

A save is recorded once it is complete and its call has returned, in either order: a thread completes asynchronous ones.
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
class FinishedSave:
    """A complete save, with times measured on this rank.

    Attributes:
        path: of the checkpoint.
        step: of training, if the saved state has one.
        duration_s: seconds from the call until the checkpoint was complete on all ranks.
        blocked_s: seconds for which the call blocked training, including waits for room. Without ``use_async`` the
            whole save.
        nbytes: of all files of the checkpoint, over all ranks.
        pending: the number of asynchronous saves that waited to be written when this one was complete.
        linked_nbytes: the part of ``nbytes`` in files that were linked instead of written; see ``incremental``.
    """

    path: str
    step: int | None
    duration_s: float
    blocked_s: float
    nbytes: int
    pending: int
    linked_nbytes: int = 0


class FinishedSaves:
    """The latest complete saves of one caller."""

    def __init__(self) -> None:
        self._latest: deque[FinishedSave] = deque(maxlen=_KEPT)

    def latest(self) -> tuple[FinishedSave, ...]:
        """Return at most 100 saves, in the order of completion."""
        return tuple(self._latest)

    @contextmanager
    def measure(self, path: str, step: int | None, waiting: Callable[[], int]) -> Iterator[Callable[[int, int], None]]:
        """Measure a save that is called in this context.

        Args:
            path: of the checkpoint.
            step: of training.
            waiting: returns the number of saves that wait to be written.

        Yields:
            The function to call when the save is complete, in any thread, as ``on_complete`` of ``checkpoint.save``.
        """
        began, lock = time.monotonic(), threading.RLock()  # reentrant: a signal handler may save
        returned_s: float | None = None
        completion: tuple[float, int, int, int] | None = None

        def record() -> None:
            if returned_s is not None and completion is not None:
                duration_s, nbytes, linked, pending = completion
                self._latest.append(FinishedSave(path, step, duration_s, returned_s, nbytes, pending, linked))

        def complete(nbytes: int, linked_nbytes: int = 0) -> None:
            nonlocal completion
            with lock:
                completion = time.monotonic() - began, nbytes, linked_nbytes, waiting()
                record()

        try:
            yield complete
        finally:
            with lock:
                returned_s = time.monotonic() - began
                record()
