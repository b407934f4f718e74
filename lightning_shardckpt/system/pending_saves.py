"""Saves that this process is still writing in the background; every read waits for them. No torch."""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class PendingWriter(Protocol):
    """A background writer."""

    def drain(self) -> None:
        """Wait until all queued work is done; raises nothing. Not collective."""

    def forget(self) -> None:
        """Drop the queue in a forked child: the parent process does the work."""


WRITERS: WeakSet[PendingWriter] = WeakSet()


def drain_all() -> None:
    """Wait for all saves of this process, since a load may read any of them. Not collective; raises nothing."""
    for writer in list(WRITERS):
        writer.drain()


def _forget_all() -> None:
    for writer in list(WRITERS):
        writer.forget()


os.register_at_fork(after_in_child=_forget_all)
