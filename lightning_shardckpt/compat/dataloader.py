"""Give a DataLoader's iterators another source of indices, without changing its samplers.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils.data import DataLoader


class IndexSource(Protocol):
    """The source from which the iterators of a DataLoader draw: indices, or lists of them where it makes batches."""

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""

    def __len__(self) -> int:
        """Return how many indices or lists there are."""


class IndexedLoader(DataLoader[Any]):
    """A DataLoader whose subclass may replace what its iterators draw indices from.

    Relies on ``DataLoader._index_sampler``: each iterator reads it when it is made, iterates over that at its first
    index, and an iterator of persistent workers again for every epoch. ``len(loader)`` is that of what it gives.
    """

    @property
    def _index_sampler(self) -> Any:
        return self.index_source(super()._index_sampler)

    def index_source(self, sampler: Any) -> IndexSource:
        """Return what to draw from, given a DataLoader's sampler or batch sampler; by default that itself."""
        source: IndexSource = sampler
        return source
