"""The saves that this process still writes in the background; whoever reads waits for them. No torch."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class PendingWriter(Protocol):
    """A writer in the background."""

    def drain(self) -> None:
        """Wait until everything is done; raises nothing. Not collective."""

    def forget(self) -> None:
        """Forget, in a forked process, what is pending: its parent does what there was."""


WRITERS: WeakSet[PendingWriter] = WeakSet()


def drain_all() -> None:
    """Wait for all saves of this process: what one saves, another one may load. Not collective; raises nothing."""
    for writer in list(WRITERS):
        writer.drain()


def _forget_all() -> None:
    for writer in list(WRITERS):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
