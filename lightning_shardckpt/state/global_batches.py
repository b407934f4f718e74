"""Deal an epoch's order of samples to data-parallel ranks, so that after every step its first samples are used.

The order is that of all ranks together. Each step takes the next samples of it, whatever the number of ranks and the
batch size are, so a number of samples says where an epoch is, and another number of ranks can go on from there. Pure:
nothing here knows DataLoaders.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EpochPosition:
    """A position in an epoch: so many samples of the order are used, and so many batches of each rank count as used."""

    samples: int = 0
    batches: int = 0


@dataclass(frozen=True, slots=True)
class GlobalBatches:
    """The division of an order into steps, the same number on every rank.

    A step takes ``ranks * batch_size`` samples. What is left at the end makes a last step, in which some ranks have one
    sample less than others. If it is less than one sample for each rank, the last two steps share what they have.

    Args:
        ranks: data-parallel ranks.
        batch_size: samples of each rank in a step.
        drop_last: leave out a last step that is not full.
        drop_uneven: leave out at most ``ranks - 1`` samples, so that all ranks have as many as others in each step.
    """

    ranks: int
    batch_size: int
    drop_last: bool = False
    drop_uneven: bool = False

    def steps(self, samples: int) -> int:
        """Return how many steps it takes to use so many samples."""
        full, rest = self._split(samples)
        return full + len(rest)

    def used(self, samples: int, steps: int) -> int:
        """Return how many of ``samples`` are used after ``steps``."""
        full, rest = self._split(samples)
        return min(steps, full) * self.ranks * self.batch_size + sum(rest[: max(0, steps - full)])

    def repeats(self, samples: int) -> int:
        """Return how many samples of the last step some ranks repeat, as there are fewer of them than ranks."""
        _, rest = self._split(samples)
        return max(0, self.ranks - rest[-1]) if rest else 0

    def deal(self, order: Sequence[Any], rank: int) -> Iterator[list[Any]]:
        """Yield one rank's batches of ``order``."""
        full, rest = self._split(len(order))
        start, size = 0, self.ranks * self.batch_size
        for step in range(full + len(rest)):
            stop = start + (size if step < full else rest[step - full])
            batch = order[start:stop]
            yield list(batch[rank :: self.ranks]) or [batch[rank % len(batch)]]
            start = stop

    def _split(self, samples: int) -> tuple[int, tuple[int, ...]]:
        """Return the number of full steps, and the sizes of those that follow."""
        if self.drop_uneven:
            samples -= samples % self.ranks
        full, rest = divmod(samples, self.ranks * self.batch_size)
        if not rest or self.drop_last:
            return full, ()
        if rest >= self.ranks or not full or self.batch_size == 1:
            return full, (rest,)
        half = self.batch_size // 2
        return full - 1, (self.ranks * (self.batch_size - half), self.ranks * half + rest)
