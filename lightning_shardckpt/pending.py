"""Which saves are still being written by this process? Who reads waits for them. No torch."""

from __future__ import annotations

from typing import Protocol
from weakref import WeakSet


class Writer(Protocol):
    """Who writes in the background."""

    def drain(self) -> None:
        """Wait until everything is done; raises nothing. Not collective."""


WRITERS: WeakSet[Writer] = WeakSet()


def drain_all() -> None:
    """Wait for all saves of this process: what one saves, another one may load. Not collective; raises nothing."""
    for writer in list(WRITERS):
        writer.drain()
