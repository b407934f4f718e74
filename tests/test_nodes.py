"""Several nodes: two hosts, simulated on this machine, that share a directory, or wrongly do not."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shardckpt import ShardCkptIO, ranks
from lightning_shardckpt.storage.local import LocalDraft, LocalStorage
from lightning_shardckpt.storage.places import Places
from tests import tiny
from tests.hosts import Hosts, lose_this_host, run_hosts, this_host, two_hosts
from tests.lag import Lag
from tests.pool import run_ranks


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found:
        yield found


class Watch(pl.Callback):
    """Keeps the whole state when training starts, and behind some step."""

    def __init__(self, step: int) -> None:
        self._step = step
        self.at_start: dict[str, Any] = {}
        self.then: dict[str, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.at_start = tiny.full_state(module, trainer.optimizers)

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_step == self._step:
            self.then = tiny.full_state(module, trainer.optimizers)


def trained(
    nodes: int, directory: str, strategy: dict[str, Any], steps: int, resume: str | None = None, more: Sequence[pl.Callback] = (), **options: Any
) -> Any:
    """Losses, the state at the end, and that when training started and behind step 4; every second step is saved."""
    watch = Watch(4)
    keeps = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options |= {"num_nodes": nodes, "callbacks": [watch, keeps, *more], "enable_checkpointing": True}
    warnings.filterwarnings("ignore", "removed the leftover of an unfinished save")
    found = tiny.fit(strategy, steps, resume=resume, seed=9 if resume else 1, **options)
    return found["losses"], found["state"], watch.at_start, watch.then


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two ranks on one host, uninterrupted."""
    return run_ranks(2, trained, 1, str(tmp_path_factory.mktemp("straight")), {}, 6)


@pytest.mark.parametrize("from_two", [True, False], ids=["two to one", "one to two"])
def test_what_one_set_of_hosts_saved_another_one_resumes(from_two: bool, hosts: Hosts, tmp_path: Path) -> None:
    def run(two: bool, *args: Any) -> Any:
        return run_hosts(hosts, 1, trained, 2, *args) if two else run_ranks(2, trained, 1, *args)

    first = run(from_two, str(tmp_path), {}, 6)
    resumed = run(not from_two, str(tmp_path), {}, 6, str(tmp_path / "step=4.ckpt"))
    for (losses, end, _, then), (rest, end_resumed, loaded, _) in zip(first, resumed, strict=True):
        assert rest == losses[4:]
        assert tiny.differences(then, loaded) == tiny.differences(end, end_resumed) == []


# ── a host that is lost ───────────────────────────────────────────────────────────────────────────────────────────


class LoseHost(pl.Callback):
    """One host is gone in the middle of the fourth step, or of the save behind it."""

    def __init__(self, host: int, in_save: bool, cut: bool) -> None:
        self._lose = partial(lose_this_host, cut) if this_host() == host else lambda: None
        self._in_save = in_save

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 3 and not self._in_save:
            self._lose()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 4 and self._in_save:
            write = LocalDraft.write

            def lose(draft: LocalDraft, name: str, parts: Any) -> None:
                if name.startswith("optimizer-dist"):
                    self._lose()
                write(draft, name, parts)

            LocalDraft.write = lose  # type: ignore[method-assign]


TIMES = {"timeout_s": 4.0, "checkpoint_timeout_s": 3.0}


def trained_until_lost(directory: str, host: int, in_save: bool, cut: bool) -> None:
    ranks._ROLL_CALL_S = 2.0
    trained(2, directory, TIMES, 6, None, [LoseHost(host, in_save, cut)])


@pytest.mark.parametrize("cut", [False, True], ids=["killed", "cut off"])
@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("in_save", [False, True], ids=["in a step", "in a save"])
def test_without_a_host_the_other_one_ends_and_goes_on_from_the_last_checkpoint(
    in_save: bool, host: int, cut: bool, hosts: Hosts, tmp_path: Path, straight: list[Any]
) -> None:
    if cut and not hosts.pids:
        pytest.skip(f"no cable to pull: {hosts.how}")
    directory = str(tmp_path / "run")
    outcomes = run_hosts(
        hosts, 1, trained_until_lost, directory, host, in_save, cut, expect_errors=True, timeout_s=60, grace_s=30
    )
    assert outcomes[host].killed
    left = outcomes[1 - host]
    assert not left.killed, left.stacks
    named = "which may be rank 0" if host == 0 else "rank(s) [1] of 2 (on host-1) did not leave"
    if in_save:
        named = "rank 0" if host == 0 else "rank(s) [1] of 2 did not answer within 3 s while saving"
    assert named in left.error.traceback
    print(left.error.traceback.splitlines()[-2:])
    assert [name for name in os.listdir(directory) if not name.startswith(".")] == ["step=2.ckpt"]
    resumed = run_ranks(2, trained, 1, directory, {}, 6, "last")
    for (losses, end, *_), (rest, end_resumed, *_) in zip(straight, resumed, strict=True):
        assert rest == losses[2:]
        assert tiny.differences(end, end_resumed) == []
    assert sorted(os.listdir(directory)) == ["step=2.ckpt", "step=4.ckpt", "step=6.ckpt"]


# ── a host that sees late what the other one did ──────────────────────────────────────────────────────────────────

LATE_S = 2.0


def seen_late(directory: str, late: int, visible_within_s: float) -> tuple[Any, Any, set[str]]:
    """Train and save; at once, train on from "last", and from a path that was written meanwhile."""
    io = ShardCkptIO()
    io.storage = Places(LocalStorage(visible_within_s))
    with Lag(directory, LATE_S if this_host() == late else 0.0) as lag:
        first = trained(2, directory, {}, 4, plugins=[io])
        return first, trained(2, directory, {}, 6, "last", plugins=[io]), lag.missed


@pytest.mark.parametrize("late", [0, 1])
def test_what_a_host_sees_late_is_waited_for(late: int, hosts: Hosts, tmp_path: Path, straight: list[Any]) -> None:
    found = run_hosts(hosts, 1, seen_late, str(tmp_path), late, 60.0)
    for (losses, end, *_), (first, resumed, missed) in zip(straight, found, strict=True):
        assert first[0] + resumed[0] == losses
        assert tiny.differences(end, resumed[1]) == []
        print(missed)
    assert found[late][2]


def test_what_a_host_does_not_see_in_time_is_named(hosts: Hosts, tmp_path: Path) -> None:
    for outcome in run_hosts(hosts, 1, seen_late, str(tmp_path), 1, 0.5, expect_errors=True, grace_s=30):
        print(outcome.error.message)
        assert "rank 1 failed while saving" in outcome.error.message
        assert "'host-1' does not see this directory" in outcome.error.message
    assert os.listdir(tmp_path) == []


# ── a directory that the hosts do not share ───────────────────────────────────────────────────────────────────────


def trained_impatiently(directory: str, resume: str | None) -> Any:
    io = ShardCkptIO()
    io.storage = Places(LocalStorage(visible_within_s=0.5))
    return trained(2, directory, {}, 6, resume, plugins=[io])


def mounted_on_host_1(hosts: Hosts, directory: Path) -> None:
    """Hide a directory behind another one, there alone."""
    if not hosts.pids:
        pytest.skip(f"no mounts of its own: {hosts.how}")
    subprocess.run(hosts.on(1, ["mount", "-t", "tmpfs", "tmpfs", str(directory)]), check=True)


def test_a_directory_that_is_another_one_on_each_host_is_an_error_on_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    mounted_on_host_1(hosts, tmp_path)
    outcomes = run_hosts(hosts, 2, trained_impatiently, str(tmp_path / "run"), None, expect_errors=True, grace_s=30)
    for outcome in outcomes:
        print(outcome.error.message)
        assert "rank 2 (and rank(s) [3]) failed while saving" in outcome.error.message
        assert "must be on a file system that all ranks share" in outcome.error.message
    assert os.listdir(tmp_path / "run") == []
    assert subprocess.run(hosts.on(1, ["find", str(tmp_path)]), capture_output=True, text=True).stdout.split() == [
        str(tmp_path)
    ]


@pytest.mark.parametrize("seen_by", [0, 1])
@pytest.mark.parametrize("word", [True, False], ids=["last", "path"])
def test_a_checkpoint_that_one_host_sees_is_an_error_on_all_ranks(
    word: bool, seen_by: int, hosts: Hosts, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "step=4.ckpt"
    if seen_by == 0:
        run_ranks(1, trained, 1, str(tmp_path / "run"), {}, 4)
        mounted_on_host_1(hosts, tmp_path)
    else:
        mounted_on_host_1(hosts, tmp_path)
        run_hosts(hosts, 1, trained_there, 1, str(tmp_path / "run"))
    resume = "last" if word else str(path)
    outcomes = run_hosts(
        hosts, 1, trained_impatiently, str(tmp_path / "run"), resume, expect_errors=True, grace_s=30
    )
    for outcome in outcomes:
        print(outcome.error.message)
        assert "file system that all ranks share" in outcome.error.message
        assert str(path) in outcome.error.message


def trained_there(host: int, directory: str) -> None:
    """Train on one host alone."""
    if this_host() == host:
        os.environ["WORLD_SIZE"] = "1"
        os.environ["RANK"] = "0"
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        trained(1, directory, {}, 4)
