"""The successive saves and removals of one CheckpointIO.

Each save reuses the plan, the files that may be linked, and the writing thread of earlier saves.
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

# ── asynchronous saves ────────────────────────────────────────────────────────────────────────────────────────────────


class AsyncSaves:
    """The asynchronous saves of one CheckpointIO.

    Between ``enable`` and ``disable``, while a caller will collect their errors, a background thread writes saves.
    Otherwise a save is complete on return.

    Args:
        options: None for synchronous saves only.

    Attributes:
        background: writes saves; None while saves are synchronous.
    """

    def __init__(self, options: AsyncOptions | None) -> None:
        self.background: Background | None = None
        self._options, self._noted_waiting = options, False

    @property
    def is_async(self) -> bool:
        """True if saves are asynchronous while enabled."""
        return self._options is not None

    def enable(self, ranks: Ranks) -> None:
        """Save asynchronously until ``disable`` or ``leave``, if there are options.

        Args:
            ranks: the ranks that save together; for exclusive use by these saves.
        """
        if self._options is not None:
            self.background = Background(ranks, self._options.max_pending)

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

        Args:
            error: the exception; failures of saves are added to it as notes.

        Returns:
            Sentences for the user.
        """
        background = self.background
        self.disable()
        if background is None:
            return []
        background.leave(error)
        return self._notes_of(background)

    def notes(self) -> list[str]:
        """Return the notes for the user since the last call, as one text, or none."""
        return [] if self.background is None else self._notes_of(self.background)

    def _notes_of(self, background: Background) -> list[str]:
        notes = background.notes()
        if background.waited and not self._noted_waiting:
            self._noted_waiting = True
            notes.append(
                "a save waited until an earlier one was written: saves come faster than they can be written, and only "
                f"max_pending={background.max_pending} may wait. This warning is shown once."
            )
        return ["\n".join(notes)] if notes else []


class SaveSeries:
    """Saves in the calling thread, or in the background while ``async_saves`` is enabled.

    Args:
        async_saves: the background saves.

    Attributes:
        finished: the complete saves.
    """

    def __init__(self, async_saves: AsyncSaves) -> None:
        self.finished = FinishedSaves()
        self._async_saves, self._plans, self._history = async_saves, PlanCache(), SaveHistory()

    def add_loaded(self, path: str) -> None:
        """Let later saves link the files of a checkpoint that was loaded."""
        self._history.add_loaded(path)

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
        """Write a checkpoint, or begin to; see ``checkpoint.save`` and ``checkpoint.save_async``.

        Collective: every rank of ``ranks`` must call it, with the same path.

        Args:
            path: of the new checkpoint.
            describe: returns this rank's state; called once, before this returns.
            ranks: the ranks that save together.
            run: step, epoch and topology, for the root index.
            options: the options of the save.
            storage: of ``path``.

        Returns:
            Notes for the user as one text, or none; for asynchronous saves those since the last call.

        Raises:
            Exception: the errors of ``checkpoint.save`` and ``checkpoint.save_async``.
        """
        background = self._async_saves.background
        waiting = background.waiting_saves if background is not None else lambda: 0
        with self.finished.measure(path, run.step, waiting) as complete:
            if background is None:
                notes = save(
                    path,
                    describe,
                    ranks=ranks,
                    run=run,
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
                run=run,
                options=options,
                background=background,
                storage=storage,
                plans=self._plans,
                history=self._history,
                on_complete=complete,
            )
            return self._async_saves.notes()


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
