"""The successive saves and removals of one CheckpointIO.

Each save reuses the plan and the writing thread of earlier saves.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint import save, save_async
from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.plan_cache import PlanCache
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.remote.remote_storage import RemoteStorage
from lightning_shardckpt.storage.router import StorageRouter, is_url

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
    """

    path: str
    step: int | None
    duration_s: float
    blocked_s: float
    nbytes: int
    pending: int


class FinishedSaves:
    """The latest complete saves of one caller."""

    def __init__(self) -> None:
        self._latest: deque[FinishedSave] = deque(maxlen=_KEPT)

    def latest(self) -> tuple[FinishedSave, ...]:
        """Return at most 100 saves, in the order of completion."""
        return tuple(self._latest)

    @contextmanager
    def measure(self, path: str, step: int | None, waiting: Callable[[], int]) -> Iterator[Callable[[int], None]]:
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
        completion: tuple[float, int, int] | None = None

        def record() -> None:
            if returned_s is not None and completion is not None:
                duration_s, nbytes, pending = completion
                self._latest.append(FinishedSave(path, step, duration_s, returned_s, nbytes, pending))

        def complete(nbytes: int) -> None:
            nonlocal completion
            with lock:
                completion = time.monotonic() - began, nbytes, waiting()
                record()

        try:
            yield complete
        finally:
            with lock:
                returned_s = time.monotonic() - began
                record()


class SaveSeries:
    """The saves of one CheckpointIO, in the calling thread, or in the background between ``enable`` and ``disable``.

    Args:
        max_pending: see ``Background``; None for synchronous saves only.

    Attributes:
        background: writes saves while a caller will collect their errors; None while saves are synchronous.
        finished: the complete saves.
    """

    def __init__(self, max_pending: int | None) -> None:
        self.background: Background | None = None
        self.finished = FinishedSaves()
        self._max_pending, self._noted_waiting = max_pending, False
        self._plans = PlanCache()

    @property
    def is_async(self) -> bool:
        """True if saves are asynchronous while enabled."""
        return self._max_pending is not None

    def enable(self, ranks: Ranks) -> None:
        """Save asynchronously until ``disable`` or ``leave``, if that was chosen.

        Args:
            ranks: the ranks that save together; for exclusive use by these saves.
        """
        if self._max_pending is not None:
            self.background = Background(ranks, self._max_pending)

    def disable(self) -> None:
        """Save synchronously again."""
        self.background = None

    def wait(self, ranks: Ranks) -> None:
        """Wait until all saves are written, and raise failures; see ``Background.settle``.

        Collective: every rank of ``ranks`` must call it.
        """
        if self.background is not None:
            self.background.settle(ranks)

    def leave(self, error: BaseException) -> list[str]:
        """Finish queued saves after an exception that other ranks may not have. Not collective.

        Returns:
            Sentences for the user; failures of saves are added to ``error`` as notes.
        """
        if self.background is not None:
            self.background.leave(error)
        notes = self.notes()
        self.disable()
        return notes

    def notes(self) -> list[str]:
        """Return the notes of the background for the user since the last call, as one text, or none."""
        if self.background is None:
            return []
        notes = self.background.notes()
        if self.background.waited and not self._noted_waiting:
            self._noted_waiting = True
            notes.append(
                "a save waited until an earlier one was written: saves come faster than they can be written, and only "
                f"max_pending={self._max_pending} may wait. This warning is shown once."
            )
        return ["\n".join(notes)] if notes else []

    def save(
        self,
        path: str,
        describe: Callable[[], Snapshot],
        *,
        ranks: Ranks,
        run: RunInfo,
        options: SaveOptions,
        storage: Storage,
    ) -> list[str]:
        """Write a checkpoint, or begin to; arguments and errors are as in ``checkpoint.save`` and ``save_async``.

        Collective: every rank of ``ranks`` must call it, with the same path.

        Returns:
            Notes for the user as one text, or none; for asynchronous saves those since the last call.
        """
        background = self.background
        waiting = background.waiting_saves if background is not None else lambda: 0
        with self.finished.measure(path, run.step, waiting) as complete:
            shared: dict[str, Any] = {"plans": self._plans, "on_complete": complete}
            shared |= {"ranks": ranks, "run": run, "options": options, "storage": storage}
            if background is None:
                notes = save(path, describe, **shared)
                return ["\n".join(notes)] if notes else []
            save_async(path, describe, background=background, **shared)
            return self.notes()


# ── removals ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def remove_any(path: str, storage: Storage) -> list[str]:
    """Delete the checkpoint, link, plain file or object at a path or URL, if there is one.

    Does not raise OSErrors, so that training goes on.

    Returns:
        Sentences about files that could not be deleted.
    """
    try:
        if is_url(path):
            return _remove_from_store(path, storage)
        if os.path.isfile(path) and not os.path.islink(path):
            os.unlink(path)
        elif os.path.lexists(path):
            return storage.remove(path)
    except OSError as error:
        return [f"not removed: {error}"]
    return []


def _remove_from_store(url: str, storage: Storage) -> list[str]:
    store = storage.backend(url) if isinstance(storage, StorageRouter) else storage
    if isinstance(store, RemoteStorage) and store.is_object(url):
        store.delete_object(url)
        return []
    if isinstance(store, RemoteStorage) and store.is_empty(url):
        return []
    return store.remove(url)
