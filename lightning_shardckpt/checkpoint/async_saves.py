"""The asynchronous saves of one CheckpointIO, while somebody comes to ask how they ended.

Between ``enable`` and ``disable`` there is a background thread that writes; outside, a save is complete on return.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.background import Background
from lightning_shardckpt.checkpoint.checkpoint_options import AsyncOptions
from lightning_shardckpt.checkpoint.copy_barrier import CopyBarrier
from lightning_shardckpt.distributed.ranks import Ranks

_T = TypeVar("_T")


class AsyncSaves:
    """The saves that go on after they returned; none, without options.

    Attributes:
        background: what writes; None while saves are synchronous.
    """

    def __init__(self, options: AsyncOptions | None) -> None:
        self.background: Background | None = None
        self._barrier: CopyBarrier | None = None
        self._options, self._told_of_waiting = options, False

    @property
    def is_async(self) -> bool:
        """True if saves are to be asynchronous, now or while they are enabled."""
        return self._options is not None

    @property
    def overlaps_copies(self) -> bool:
        """True if optimizers wait for copies, so that a save may return before they are done."""
        return self._barrier is not None

    def enable(self, ranks: Ranks, *, overlap_copy: bool = True) -> None:
        """Save asynchronously from now until ``disable`` or ``leave``, if there are options that say so.

        Args:
            ranks: who saves together; for these saves alone.
            overlap_copy: whether copies may go on after a save returned, where the options say so.
        """
        if self._options is None:
            return
        self.background = Background(ranks, self._options.max_pending)
        if overlap_copy and self._options.overlap_copy and self._barrier is None:
            self._barrier = CopyBarrier(self.wait_for_copies)

    def disable(self) -> None:
        """Save synchronously again."""
        self.background = None
        if self._barrier is not None:
            self._barrier.close()
            self._barrier = None

    def wait(self, ranks: Ranks) -> None:
        """Wait until all is written; raises what failed, as ``Background.settle`` does.

        Collective: every rank of ``ranks`` must call it.
        """
        if self.background is not None:
            self.background.settle(ranks)

    def wait_for_copies(self) -> None:
        """Wait until parameters and optimizer state may change. Not collective."""
        if self.background is not None:
            self.background.wait_for_copies()

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

    def around_step(
        self, optimizer: Optimizer, closure: Callable[[], _T]
    ) -> AbstractContextManager[Callable[[], _T]]:
        """Let ``optimizer`` step in this context with the closure that is given; see ``CopyBarrier.around_step``."""
        return nullcontext(closure) if self._barrier is None else self._barrier.around_step(optimizer, closure)

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
