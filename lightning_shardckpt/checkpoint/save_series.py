"""The saves of one CheckpointIO, one after the other: each takes what it can from those before it.

That is a plan that still holds, files that may be linked, and the thread that writes. Knows neither what is saved nor
who asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint import save, save_async
from lightning_shardckpt.checkpoint.checkpoint_options import AsyncOptions, SaveOptions
from lightning_shardckpt.checkpoint.finished_saves import FinishedSaves
from lightning_shardckpt.checkpoint.incremental import SaveHistory
from lightning_shardckpt.checkpoint.plan_cache import PlanCache
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.storage.remote.remote_storage import RemoteStorage
from lightning_shardckpt.storage.router import StorageRouter, is_url

# ── saves in the background ───────────────────────────────────────────────────────────────────────────────────────────
# The asynchronous saves of one CheckpointIO, while somebody comes to ask how they ended.
#
# Between ``enable`` and ``disable`` there is a background thread that writes; outside, a save is complete on return.


class AsyncSaves:
    """The saves that go on after they returned; none, without options.

    Attributes:
        background: what writes; None while saves are synchronous.
    """

    def __init__(self, options: AsyncOptions | None) -> None:
        self.background: Background | None = None
        self._options, self._told_of_waiting = options, False

    @property
    def is_async(self) -> bool:
        """True if saves are to be asynchronous, now or while they are enabled."""
        return self._options is not None

    def enable(self, ranks: Ranks) -> None:
        """Save asynchronously from now until ``disable`` or ``leave``, if there are options that say so.

        Args:
            ranks: who saves together; for these saves alone.
        """
        if self._options is not None:
            self.background = Background(ranks, self._options.max_pending)

    def disable(self) -> None:
        """Save synchronously again."""
        self.background = None

    def wait(self, ranks: Ranks) -> None:
        """Wait until all is written; raises what failed, as ``Background.settle`` does.

        Collective: every rank of ``ranks`` must call it.
        """
        if self.background is not None:
            self.background.settle(ranks)

    def leave(self, error: BaseException) -> list[str]:
        """Finish what is queued after an exception, which other ranks may not have. Not collective.

        Failures become notes of ``error``. Returns sentences for the user.
        """
        background = self.background
        self.disable()
        if background is None:
            return []
        background.leave(error)
        return self._notes_of(background)

    def notes(self) -> list[str]:
        """Return what came up since the last call, as one text for the user, or none."""
        return [] if self.background is None else self._notes_of(self.background)

    def _notes_of(self, background: Background) -> list[str]:
        notes = background.notes()
        if background.waited and not self._told_of_waiting:
            self._told_of_waiting = True
            notes.append(
                "a save waited until an earlier one was written: saves come faster than they can be written, and only "
                f"max_pending={background.max_pending} may wait. This is said once."
            )
        return ["\n".join(notes)] if notes else []


class SaveSeries:
    """Saves at once, or in the thread of ``async_saves`` while that is enabled.

    Attributes:
        finished: those that are complete.
    """

    def __init__(self, async_saves: AsyncSaves) -> None:
        self.finished = FinishedSaves()
        self._async_saves, self._plans, self._history = async_saves, PlanCache(), SaveHistory()

    def loaded(self, path: str) -> None:
        """Take a checkpoint that was loaded as one whose files the next saves may link."""
        self._history.loaded(path)

    def save(
        self,
        path: str,
        describe: Callable[[], Snapshot],
        *,
        ranks: Ranks,
        about: RunInfo,
        options: SaveOptions,
        storage: Storage,
    ) -> list[str]:
        """Write a checkpoint, or begin to; see ``checkpoint.save`` and ``checkpoint.save_async``.

        Collective: every rank of ``ranks`` must call it, with the same path.

        Args:
            path: where to.
            describe: gives this rank's state; called once, before this returns.
            ranks: who saves together.
            about: for the root index.
            options: what the caller chose.
            storage: where ``path`` is.

        Returns:
            What a person should know, as one text or none; of asynchronous saves also what came up since the last one.

        Raises:
            Exception: as the two do.
        """
        background = self._async_saves.background
        waiting = background.waiting_saves if background is not None else lambda: 0
        with self.finished.measured(path, about.step, waiting) as complete:
            if background is None:
                notes = save(
                    path,
                    describe,
                    ranks=ranks,
                    about=about,
                    options=options,
                    storage=storage,
                    plans=self._plans,
                    history=self._history,
                    on_complete=complete,
                )
                return ["\n".join(notes)] if notes else []
            save_async(
                path,
                describe,
                ranks=ranks,
                about=about,
                options=options,
                background=background,
                storage=storage,
                plans=self._plans,
                history=self._history,
                on_complete=complete,
            )
            return self._async_saves.notes()


# ── removals ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# Delete what a callback no longer keeps: a checkpoint, a link, a plain file or an object of a store.


def remove_any(path: str, storage: Storage) -> list[str]:
    """Delete what is at a path or URL, if anything is, and return sentences about what had to stay.

    Never raises for what the file system refuses: training must not end for that.
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
