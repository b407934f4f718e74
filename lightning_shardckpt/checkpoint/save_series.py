"""The saves of one CheckpointIO, one after the other: each takes what it can from those before it.

That is a plan that still holds, files that may be linked, and the thread that writes. Knows neither what is saved nor
who asks for it.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_shardckpt.checkpoint.async_saves import AsyncSaves
from lightning_shardckpt.checkpoint.checkpoint import save, save_async
from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.finished_saves import FinishedSaves
from lightning_shardckpt.checkpoint.incremental import SaveHistory
from lightning_shardckpt.checkpoint.plan_cache import PlanCache
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.storage.protocol import Storage


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
                overlap_copy=self._async_saves.overlaps_copies,
                on_complete=complete,
            )
            return self._async_saves.notes()
