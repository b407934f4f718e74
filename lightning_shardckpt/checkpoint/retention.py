"""Choose which checkpoints of a directory to keep: the last ones, every n-th step, one per hour or day. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

_HOUR_S, _DAY_S = 3600, 86400


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A complete checkpoint: its path, the step that it recorded, and when it was saved, in seconds since the epoch."""

    path: str
    step: int
    saved_at_s: float


@dataclass(frozen=True, slots=True)
class RetentionRules:
    """What to keep; a checkpoint that one rule keeps is kept.

    Attributes:
        last: how many of those that were saved last.
        every_n_steps: all whose step is a multiple of it; None for none.
        hourly: the last one of an hour, for so many of the last hours that have one; -1 for all of them.
        daily: the same by days. Hours and days are those of UTC.

    Raises:
        ValueError: for a number that cannot be, naming it.
    """

    last: int = 1
    every_n_steps: int | None = None
    hourly: int = 0
    daily: int = 0

    def __post_init__(self) -> None:
        if self.last < 1:
            raise ValueError(f"last is how many checkpoints are kept at least, and must be positive, got {self.last}")
        if self.every_n_steps is not None and self.every_n_steps < 1:
            raise ValueError(f"every_n_steps is a number of steps and must be positive, got {self.every_n_steps}")
        for name in ("hourly", "daily"):
            if getattr(self, name) < -1:
                raise ValueError(f"{name} is a number of checkpoints, or -1 for all, got {getattr(self, name)}")

    def superfluous(self, found: Iterable[SavedCheckpoint], protected: Collection[str] = ()) -> list[SavedCheckpoint]:
        """The checkpoints that no rule keeps, the oldest first; never one of the ``protected`` paths."""
        newest_first = sorted(found, key=lambda one: (one.saved_at_s, one.step), reverse=True)
        kept = {one.path for one in newest_first[: self.last]}
        if self.every_n_steps is not None:
            kept |= {one.path for one in newest_first if one.step % self.every_n_steps == 0}
        for count, period_s in ((self.hourly, _HOUR_S), (self.daily, _DAY_S)):
            periods: dict[int, str] = {}
            for one in newest_first:
                periods.setdefault(int(one.saved_at_s // period_s), one.path)
            kept.update(list(periods.values())[: None if count == -1 else count])
        return [one for one in reversed(newest_first) if one.path not in kept and one.path not in protected]
