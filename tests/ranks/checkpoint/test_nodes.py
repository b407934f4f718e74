"""Several nodes: two hosts, simulated on this machine, that share a directory, or wrongly do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter
from tests.support import tiny
from tests.support.hosts import Hosts, Lag, run_hosts, this_host, two_hosts
from tests.support.pool import run_ranks

LATE_S = 2.0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found:
        yield found


def trained(
    nodes: int, directory: str, steps: int, resume: str | None = None, visible_within_s: float = 0.5
) -> dict[str, Any]:
    """Losses and the state at the end; every second step is saved."""
    io, keeps = ShardCkptIO(), ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    local = LocalStorage()
    local.visible_within_s = visible_within_s
    io.storage = StorageRouter(local)
    for known in ("removed the leftover of an unfinished save", "The dirpath has changed"):
        warnings.filterwarnings("ignore", known)
    options: dict[str, Any] = {"num_nodes": nodes, "callbacks": [keeps], "enable_checkpointing": True, "plugins": [io]}
    return tiny.fit({}, steps, resume=resume, seed=9 if resume else 1, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoints of two ranks on one host, uninterrupted, and what these were; tests must not change them."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run_ranks(2, trained, 1, str(folder), 6)


def test_what_one_host_saved_two_resume(hosts: Hosts, tmp_path: Path, saved: tuple[Path, list[Any]]) -> None:
    folder, straight = saved
    resumed = run_hosts(hosts, 1, trained, 2, str(tmp_path), 6, str(folder / "step=4.ckpt"))
    for expected, found in zip(straight, resumed, strict=True):
        assert found["losses"] == expected["losses"][4:]
        assert tiny.differences(expected["state"], found["state"]) == []


def seen_late(directory: str, late: int, visible_within_s: float) -> tuple[Any, Any, set[str]]:
    """Train and save; at once, train on from "last"; on one host all appears late."""
    with Lag(directory, LATE_S if this_host() == late else 0.0) as lag:
        first = trained(2, directory, 4, None, visible_within_s)
        return first, trained(2, directory, 6, "last", visible_within_s), lag.missed


def test_what_a_host_sees_late_is_waited_for(hosts: Hosts, tmp_path: Path, saved: tuple[Path, list[Any]]) -> None:
    found = run_hosts(hosts, 1, seen_late, str(tmp_path), 1, 60.0)
    for expected, (first, resumed, _) in zip(saved[1], found, strict=True):
        assert first["losses"] + resumed["losses"] == expected["losses"]
        assert tiny.differences(expected["state"], resumed["state"]) == []
    assert found[1][2]


def test_what_a_host_does_not_see_in_time_is_named(hosts: Hosts, tmp_path: Path) -> None:
    for outcome in run_hosts(hosts, 1, seen_late, str(tmp_path), 1, 0.5, expect_errors=True, grace_s=30):
        assert "rank 1 failed while saving" in outcome.error.message
        assert "'host-1' does not see this directory" in outcome.error.message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("resume", [None, "last"])
def test_a_directory_that_is_another_one_on_each_host_is_an_error_on_all_ranks(
    resume: str | None, hosts: Hosts, tmp_path: Path, saved: tuple[Path, list[Any]]
) -> None:
    if not hosts.pids:
        pytest.skip(f"no mounts of its own: {hosts.how}")
    if resume:
        shutil.copytree(saved[0] / "step=4.ckpt", tmp_path / "run" / "step=4.ckpt")
    subprocess.run(hosts.on(1, ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]), check=True)
    call = (2, str(tmp_path / "run"), 6, resume)
    for outcome in run_hosts(hosts, 2, trained, *call, expect_errors=True, grace_s=30):
        assert "file system that all ranks share" in outcome.error.message
        assert resume or "rank 2 (and rank(s) [3]) failed while saving" in outcome.error.message
    assert os.listdir(tmp_path / "run") == ["step=4.ckpt"] * bool(resume)
    left = subprocess.run(hosts.on(1, ["find", str(tmp_path)]), capture_output=True, text=True)
    assert left.stdout.split() == [str(tmp_path)]
