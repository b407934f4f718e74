"""The successive saves and removals of one CheckpointIO.

Each save reuses the plan and the writing thread of earlier saves.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
from lightning_shardckpt.storage.router import StorageRouter, absolute_path, is_url

_KEPT = 100


@dataclass(slots=True)
class FinishedSave:
    """A complete save, with times measured on this rank.

    Attributes:
        step: of training, if the saved state has one.
        seconds: from the call until the checkpoint was complete on all ranks.
        blocked_seconds: in which the call blocked training; set when it has returned.
        nbytes: of all files of the checkpoint, over all ranks.
    """

    step: int | None
    seconds: float = 0.0
    blocked_seconds: float = 0.0
    nbytes: int = 0


class SaveSeries:
    """The saves of one CheckpointIO, in the calling thread, or in the background between ``enable`` and ``disable``.

    Args:
        use_async: save in the background.
        export: called on rank 0 with each complete checkpoint and its storage, in the background; returns notes, and
            its failure is a note. The next save waits for it.

    Attributes:
        is_async: True if saves are asynchronous while enabled.
        background: writes saves while a caller will collect their errors, and exports; None if nothing is pending.
        finished: the latest complete saves, until a caller takes them out.
    """

    def __init__(self, use_async: bool, export: Callable[[str, Storage], list[str]] | None = None) -> None:
        self.is_async, self._export = use_async, export
        self._is_enabled = False
        self.background: Background | None = None
        self.finished: deque[FinishedSave] = deque(maxlen=_KEPT)
        self._plans, self._noted_waiting = PlanCache(), False

    def enable(self, ranks: Ranks) -> None:
        """Save asynchronously until ``disable`` or ``leave``, if that was chosen.

        Args:
            ranks: the ranks that save together; for exclusive use by these saves.
        """
        if self.is_async:
            if self.background is not None:
                self.background.drain()
            self.background, self._is_enabled = Background(ranks), True

    def disable(self) -> None:
        """Save synchronously again."""
        self.background, self._is_enabled = None, False

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
                "a save waited until the one before was written: saves come faster than they can be written, or two "
                "callbacks save in one step. This warning is shown once."
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
        if self.background is None and self._export is not None:
            self.background = Background(Ranks.alone())  # for exports only
        background = self.background
        began, finished = time.monotonic(), FinishedSave(run.step)

        def complete(nbytes: int) -> None:
            finished.seconds, finished.nbytes = time.monotonic() - began, nbytes
            self.finished.append(finished)

        try:
            shared: dict[str, Any] = {"plans": self._plans, "on_complete": complete}
            shared |= {"ranks": ranks, "run": run, "options": options, "storage": storage}
            notes = list[str]()
            if background is not None and self._is_enabled:
                save_async(path, describe, background=background, **shared)
            else:
                if background is not None:
                    background.settle(ranks, before=path)
                notes += save(path, describe, **shared)
            if background is not None and self._export is not None and ranks.rank == 0:
                export = partial(self._export, absolute_path(path), storage)
                background.follow(path, export, "not exported for transformers")
            return (["\n".join(notes)] if notes else []) + self.notes()
        finally:
            finished.blocked_seconds = time.monotonic() - began


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
