"""What is tried, and how thoroughly, and tables: kinds of fault by what became of the checkpoints.

The whole of it takes minutes, the short form a part of one.
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from tests.sweeps.faults.flips import Flip, flips
from tests.sweeps.faults.powerloss import Loss, losses
from tests.sweeps.faults.saves import scenario, scenarios
from tests.sweeps.faults.trial import ERRNOS, Outcome, Scenario, errors, kills, problems, sweep

KINDS = {
    "SIGKILL before a call": ("kill",),
    "SIGKILL in a write": ("half",),
    "an error, once": ("errno",),
    "an error, from there on": ("sticky",),
    "short writes": ("short", "short from on"),
    "a disk that is full in a write": ("full",),
}
COLUMNS = ("faults", "OLD", "NEW", "mixed", "lost", "undetected", "hung", "next save wrong", "not named")
FLIP_COLUMNS = ("flips", "detected", "harmless", "silent")


def everything(short: bool) -> str:
    """Run all sweeps; the tables, and what is wrong. In a process with one thread."""
    tried = [*scenarios(*((1,) if short else (1, 2, 4)))]
    ours = [outcome for each in tried for outcome in _swept(each, short)]
    every = 11 if short else 1
    power = [loss for each in tried if each.durable for loss in losses(each, every=every)]
    unsynced = [] if short else losses(scenario("save without syncs over an older one, 1 rank"))
    flipped = flips(every=307 if short else 1)
    wrong = problems(ours) + [loss.problem for loss in power if loss.problem]
    wrong += [loss.problem for loss in unsynced if loss.problem and loss.found == "mixed"]
    wrong += [f"{flip}" for flip in flipped if flip.noticed == "silent"]
    of_ours = [*_rows(ours), of_losses("power loss", power)]
    parts = [
        table("lightning-shardckpt", of_ours),
        table("a flipped bit", [of_flips("lightning-shardckpt", flipped)], FLIP_COLUMNS),
        f"{len(wrong)} problems of lightning-shardckpt",
    ]
    return "\n\n".join([*parts, *wrong[:100]])


def _swept(each: Scenario, short: bool) -> list[Outcome]:
    """A sample where several processes take part, or where another number of them prepared the same action."""
    first = max(each.world, each.prepared_by) == 1
    codes: Sequence[int] = ERRNOS if each.world == 1 else (errno.ENOSPC, errno.EIO)
    found = sweep(each, kills, every=each.world * 53 if short else max(1, each.world - 1))
    found += sweep(each, partial(errors, codes=codes), every=(997 if short else 1) if first else 1499 if short else 7)
    print(table("", [of_outcomes(each.name, found)]), flush=True)  # so that an interrupted run has told something
    return found


def _rows(outcomes: Sequence[Outcome]) -> Iterable[Row]:
    for name, kinds in KINDS.items():
        yield of_outcomes(name, [o for o in outcomes if o.fault.kind in kinds])


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


Row = tuple[str, Sequence[int]]
"""A kind of fault, and how often what happened."""


def of_outcomes(name: str, outcomes: Sequence[Outcome]) -> Row:
    """``undetected``: the action returned and what loads is not new; ``OLD``: also nothing, before a first save."""
    found = [sum(o.found == kind for o in outcomes) for kind in ("old", "new", "mixed", "lost")]
    kinds = ("undetected:", "hung:", "next:", "message:")
    said = [sum(any(p.startswith(kind) for p in o.problems) for o in outcomes) for kind in kinds]
    return name, (len(outcomes), *found, *said)


def of_losses(name: str, losses: Sequence[Loss]) -> Row:
    """Counts states of the disk, over all moments."""
    found = [sum(loss.states for loss in losses if loss.found == kind) for kind in ("old", "new", "mixed", "lost")]
    after = sum(loss.states for loss in losses if loss.done == loss.of and loss.found == "old")
    return name, (sum(loss.states for loss in losses), *found, after, 0, 0, 0)


def of_flips(name: str, flips: list[Flip]) -> Row:
    """Counts changed bytes."""
    counts = Counter(flip.noticed for flip in flips)
    return name, (len(flips), counts["detected"], counts["harmless"], counts["silent"])


def table(title: str, rows: Iterable[Row], columns: Sequence[str] = COLUMNS) -> str:
    """As Markdown."""
    lines = [(title, *columns), ("---", *["---:"] * len(columns))]
    lines += [(name, *(f"{count:,}" for count in counts)) for name, counts in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
