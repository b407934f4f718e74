"""The results of the sweeps together. Tables: kinds of fault by what became of the checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.sweeps.faults.flips import Flip, summary
from tests.sweeps.faults.powerloss import Loss
from tests.sweeps.faults.trial import Outcome

COLUMNS = ("faults", "OLD", "NEW", "mixed", "lost", "undetected", "hung", "next save wrong", "not named")
FLIP_COLUMNS = ("flips", "detected", "harmless", "silent")


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of fault, and how often what happened."""

    name: str
    counts: tuple[int, ...]


def of_outcomes(name: str, outcomes: Sequence[Outcome]) -> Row:
    """``undetected``: the action returned and what loads is not new; ``OLD``: also nothing, before a first save."""
    found = [sum(o.found == kind for o in outcomes) for kind in ("old", "new", "mixed", "lost")]
    said = [
        sum(any(p.startswith(kind) for p in o.problems) for o in outcomes)
        for kind in ("undetected:", "hung:", "next:", "message:")
    ]
    return Row(name, (len(outcomes), *found, *said))


def of_losses(name: str, losses: Sequence[Loss]) -> Row:
    """Counts states of the disk, over all moments."""
    found = [sum(loss.states for loss in losses if loss.found == kind) for kind in ("old", "new", "mixed", "lost")]
    after = sum(loss.states for loss in losses if loss.done == loss.of and loss.found == "old")
    return Row(name, (sum(loss.states for loss in losses), *found, after, 0, 0, 0))


def of_flips(name: str, flips: list[Flip]) -> Row:
    """Counts changed bytes."""
    counts = summary(flips)
    return Row(name, (len(flips), counts["detected"], counts["harmless"], counts["silent"]))


def table(title: str, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> str:
    """As Markdown."""
    lines = [(title, *columns), ("---", *["---:"] * len(columns))]
    lines += [(row.name, *(f"{count:,}" for count in row.counts)) for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
