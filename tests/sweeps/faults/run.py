"""What is tried, and how thoroughly. The whole of it takes minutes, the short form a part of one."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from functools import partial

from tests.sweeps.faults import dcp
from tests.sweeps.faults.disk import full_disks
from tests.sweeps.faults.flips import FORMATS, flips
from tests.sweeps.faults.kill import ERRNOS, errors, kills, problems, sweep
from tests.sweeps.faults.powerloss import losses
from tests.sweeps.faults.report import FLIP_COLUMNS, Row, of_flips, of_losses, of_outcomes, table
from tests.sweeps.faults.saves import scenario, scenarios
from tests.sweeps.faults.trial import Outcome, Scenario

FULL_DISKS = ("first save, 1 rank", "save over an older one, 1 rank", "consolidation, 1 rank")
KINDS = {
    "SIGKILL before a call": ("kill",),
    "SIGKILL in a write": ("half",),
    "an error, once": ("errno",),
    "an error, from there on": ("sticky",),
    "short writes": ("short", "short from on"),
}


def everything(short: bool, every_scenario: int = 1) -> str:
    """Run all sweeps; the tables, and what is wrong. In a process with one thread.

    ``every_scenario``: of ours, one in so many.
    """
    tried = [*scenarios(*((1,) if short else (1, 2, 4)))][::every_scenario]
    ours = [outcome for each in tried for outcome in _swept(each, short)]
    disks, why_not = _disks()
    every = 11 if short else 1
    power = [loss for each in tried if each.durable for loss in losses(each, every=every)]
    unsynced = [] if short else losses(scenario("save without syncs over an older one, 1 rank"))
    theirs = [outcome for each in dcp.SCENARIOS for outcome in _swept(each, short)]
    their_power = [loss for each in dcp.SCENARIOS for loss in losses(each, names_with_files=True, every=every)]
    flipped = [flips(kind, every=307 if short else 1) for kind in FORMATS]
    wrong = problems([*ours, *disks]) + [loss.problem for loss in power if loss.problem]
    wrong += [loss.problem for loss in unsynced if loss.problem and loss.found == "mixed"]
    wrong += [f"{flip}" for flip in flipped[0] if flip.noticed == "silent"]
    return "\n\n".join(
        [
            table(
                "lightning-shardckpt", [*_rows(ours), of_outcomes("full disk", disks), of_losses("power loss", power)]
            ),
            table("torch DCP", [*_rows(theirs), of_losses("power loss", their_power)]),
            table("a flipped bit", [of_flips(k.name, f) for k, f in zip(FORMATS, flipped, strict=True)], FLIP_COLUMNS),
            *([f"No full disks: {why_not}"] if why_not else []),
            f"{len(wrong)} problems of lightning-shardckpt",
            *wrong[:100],
        ]
    )


def _swept(each: Scenario, short: bool) -> list[Outcome]:
    """A sample where several processes take part, or where another number of them prepared the same action."""
    first = max(each.world, each.prepared_by) == 1
    codes: Sequence[int] = ERRNOS if each.world == 1 else (errno.ENOSPC, errno.EIO)
    found = sweep(each, kills, every=each.world * 53 if short else max(1, each.world - 1))
    found += sweep(each, partial(errors, codes=codes), every=(997 if short else 1) if first else 1499 if short else 7)
    rows = [of_outcomes(each.name, found)]
    print(table("", rows), flush=True)  # so that an interrupted run has told something
    return found


def _disks() -> tuple[list[Outcome], str]:
    found: list[Outcome] = []
    for name in FULL_DISKS:
        outcomes = full_disks(scenario(name))
        if isinstance(outcomes, str):
            return [], outcomes
        found += outcomes
    return found, ""


def _rows(outcomes: Sequence[Outcome]) -> Iterable[Row]:
    for name, kinds in KINDS.items():
        yield of_outcomes(name, [o for o in outcomes if o.fault.kind in kinds])
