"""Every fault at every call of a save, after which a checkpoint loads. Oracle: both states, bit by bit; sweeps/faults.

``python -m tests.sweeps.faults`` tries them all. Here everything is sampled, but the deaths of one process in QUICK.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_shardckpt.distributed.ranks import Ranks
from tests.support.pool import run_ranks
from tests.sweeps.faults import saves
from tests.sweeps.faults.inject import Change, Interposer
from tests.sweeps.faults.powerloss import losses
from tests.sweeps.faults.trial import (
    ERRNOS,
    Found,
    errors,
    kills,
    prepared,
    problems,
    repeated,
    scratch,
    sweep,
)

ALONE = [each.name for each in saves.scenarios(1)]
TWO = [each.name for each in saves.scenarios(2) if each.world == 2]
DURABLE = [name for name in ALONE + TWO if saves.scenario(name).durable]
QUICK = [
    *("save over an older one, 1 rank", "save in place over an older one, 1 rank", "rotation, 1 rank"),
    "consolidation, 1 rank",
]


def rest_is_slow(names: Sequence[str]) -> pytest.MarkDecorator:
    """The quick ones, and some of the rest: ``python -m tests.sweeps.faults`` runs all."""
    rest = [name for name in names if name not in QUICK]
    return pytest.mark.parametrize("name", [*(name for name in names if name in QUICK), *one_in_eight(rest)])


def one_in_eight(names: Sequence[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names[::8]]


def in_a_fork(fn: Callable[..., Any], *args: Any, timeout_s: float = 300) -> Any:
    """Return ``fn(*args)`` of a process that has imported torch and has one thread, as sweeps need it."""
    return run_ranks(1, fn, *args, init_process_group=False, timeout_s=timeout_s)[0]


def warm() -> None:
    """Do once here what every rank of every trial, a fork of this process, would do for the first time."""
    alone = saves.scenario("save over an older one, 1 rank")
    with scratch() as folder:
        template, _ = prepared(alone, folder)
        assert list(repeated(alone, template)) == []
    one_of_two: Any = SimpleNamespace(world=2, rank=0)
    saves.of_rank(saves.NEW, one_of_two)


def swept(name: str, what: str, every: int = 1, codes: Sequence[int] = ERRNOS) -> tuple[set[Found], int, list[str]]:
    scenario = saves.scenario(name)
    if scenario.world > 1:
        warm()
    faults_of = kills if what == "kills" else partial(errors, codes=codes)
    outcomes = sweep(scenario, faults_of, every=every)
    return {o.found for o in outcomes}, len(outcomes), problems(outcomes)


def without_names(wrong: list[str]) -> list[str]:
    return [said for said in wrong if ": message: " not in said]


# ── deaths ────────────────────────────────────────────────────────────────────────────────────────────────────────


@rest_is_slow(ALONE)
def test_a_process_that_is_killed_at_a_call_leaves_the_old_or_the_new_state(name: str) -> None:
    found, trials, wrong = in_a_fork(swept, name, "kills", 1 if name in QUICK else 9)
    assert wrong == []
    assert "old" in found and found <= {"old", "new"} and trials > 1


def test_a_rank_that_is_killed_at_some_call_ends_all_ranks_and_leaves_the_old_or_the_new_state() -> None:
    found, trials, wrong = in_a_fork(swept, "save over an older one, 2 ranks", "kills", 5)
    assert wrong == []
    assert "old" in found and trials > 6


# ── errors ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("name", "every"),
    [("save over an older one, 1 rank", 5), ("consolidation, 1 rank", 1)],  # torch.save hides errors of its writes
)
def test_an_error_of_the_file_system_names_the_path(name: str, every: int) -> None:
    _, _, wrong = in_a_fork(swept, name, "errors", every, [errno.ENOSPC])
    assert [said for said in wrong if ": message: " in said] == []


def test_an_error_on_one_rank_is_raised_on_all() -> None:
    _, trials, wrong = in_a_fork(swept, "save over an older one, 2 ranks", "errors", 13, [errno.ENOSPC, errno.EIO])
    assert wrong == [] and trials > 10


@pytest.mark.parametrize("name", [*QUICK[:2], *one_in_eight(ALONE[::2])])
def test_any_error_at_some_call_is_raised_or_overcome(name: str) -> None:
    _, trials, wrong = in_a_fork(swept, name, "errors", 37)
    assert without_names(wrong) == [] and trials > 2


@pytest.mark.parametrize("name", ["first save, 1 rank", "save over an older one, 1 rank", "consolidation, 1 rank"])
def test_a_disk_that_is_full_in_the_middle_of_a_write_keeps_the_old_state(name: str) -> None:
    found, trials, wrong = in_a_fork(swept, name, "errors", 1, [])  # writes that are short, or the last ones
    assert without_names(wrong) == []
    assert found == {"old", "new"} and trials > 2


# ── power ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def lost(name: str, unsynced: str | None = None, every: int = 1) -> tuple[int, list[str]]:
    def skipped(change: Change) -> bool:
        return unsynced is not None and change.name == "sync" and change.path.endswith(unsynced)

    found = losses(saves.scenario(name), without=skipped, every=every)
    return sum(loss.states for loss in found), [loss.problem for loss in found if loss.problem]


@rest_is_slow(DURABLE)
def test_a_loss_of_power_leaves_the_old_or_the_new_state_and_the_new_one_after_a_save(name: str) -> None:
    states, wrong = in_a_fork(lost, name, None, 1 if name in QUICK else 4)
    assert wrong == [] and states > (15 if name in QUICK else 3)


@pytest.mark.parametrize("unsynced", [".safetensors", ".index.json", "-state.json", "."])
def test_each_sync_is_needed(unsynced: str) -> None:
    _, wrong = in_a_fork(lost, "save over an older one, 1 rank", unsynced)
    assert wrong


@pytest.mark.slow
def test_without_syncs_a_loss_of_power_may_leave_nothing_but_never_a_mix() -> None:
    _, wrong = in_a_fork(lost, "save without syncs over an older one, 1 rank", None, 243)
    assert any(": lost in " in said for said in wrong)
    assert not any(": mixed in " in said for said in wrong)


# ── the harness itself ────────────────────────────────────────────────────────────────────────────────────────────


def audited(name: str) -> tuple[list[str], list[str]]:
    """What the interpreter says of the calls of an action, and what an interposer counted."""
    scenario, seen, listening = saves.scenario(name), list[str](), [False]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if not listening[0]:
            return
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        if event == "open" and not isinstance(args[0], int) and args[2] & writing:
            seen.append("open")
        elif event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"):
            seen.append(event.removeprefix("os."))

    with scratch() as folder:
        template, _ = prepared(scenario, folder)
        with Interposer(template) as interposer:
            sys.addaudithook(hook)
            listening[0] = True
            scenario.act(template, Ranks.alone())
            listening[0] = False
    audited_as = {"unlink": "remove", "replace": "rename"}
    return seen, [audited_as.get(name, name) for name in (call.split()[0] for call in interposer.calls)]


@pytest.mark.parametrize("name", QUICK)
def test_no_call_escapes_the_harness(name: str) -> None:
    seen, counted = in_a_fork(audited, name)
    unaudited = ("write", "pwrite", "fsync", "renameat2", "posix_fallocate")
    assert seen == [call for call in counted if call not in unaudited]
    assert seen
