"""Several nodes: two hosts, simulated on this machine, that share a directory, or wrongly do not."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint.checkpoint import load_full
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.hosts import Hosts, launched, run_hosts, this_host, two_hosts
from tests.support.pool import run_ranks
from tests.support.storages import Lag


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with two_hosts() as found:
        yield found


class Watch(pl.Callback):
    """Keeps the whole state when training starts, and after some step."""

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
    nodes: int,
    directory: str,
    strategy: dict[str, Any],
    steps: int,
    resume: str | None = None,
    more: Sequence[pl.Callback] = (),
    **options: Any,
) -> Any:
    """Losses, the state at the end, and that when training started and after step 4; every second step is saved."""
    watch = Watch(4)
    keeps = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    options |= {"num_nodes": nodes, "callbacks": [watch, keeps, *more], "enable_checkpointing": True}
    for known in ("removed the leftover of an unfinished save", "The dirpath has changed"):
        warnings.filterwarnings("ignore", known)
    found = tiny.fit(strategy, steps, resume=resume, seed=9 if resume else 1, **options)
    return found["losses"], found["state"], watch.at_start, watch.then


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The checkpoints of two ranks on one host, uninterrupted, and what these were; tests must not change them."""
    folder = tmp_path_factory.mktemp("straight")
    return folder, run_ranks(2, trained, 1, str(folder), {}, 6)


def test_what_one_host_saved_two_resume(hosts: Hosts, tmp_path: Path, saved: tuple[Path, list[Any]]) -> None:
    folder, first = saved
    resumed = run_hosts(hosts, 1, trained, 2, str(tmp_path), {}, 6, str(folder / "step=4.ckpt"))
    for (losses, end, _, then), (rest, end_resumed, loaded, _) in zip(first, resumed, strict=True):
        assert rest == losses[4:]
        assert tiny.differences(then, loaded) == tiny.differences(end, end_resumed) == []


# ── a host that sees late what the other one did ──────────────────────────────────────────────────────────────────

LATE_S = 2.0


def seen_late(directory: str, late: int, visible_within_s: float) -> tuple[Any, Any, set[str]]:
    """Train and save; at once, train on from "last", and from a path that was written meanwhile."""
    io = ShardCkptIO()
    io.storage = StorageRouter(LocalStorage(visible_within_s))
    with Lag(directory, LATE_S if this_host() == late else 0.0) as lag:
        first = trained(2, directory, {}, 4, plugins=[io])
        return first, trained(2, directory, {}, 6, "last", plugins=[io]), lag.missed


def test_what_a_host_sees_late_is_waited_for(hosts: Hosts, tmp_path: Path, saved: tuple[Path, list[Any]]) -> None:
    straight, found = saved[1], run_hosts(hosts, 1, seen_late, str(tmp_path), 1, 60.0)
    for (losses, end, *_), (first, resumed, _) in zip(straight, found, strict=True):
        assert first[0] + resumed[0] == losses
        assert tiny.differences(end, resumed[1]) == []
    assert found[1][2]


def test_what_a_host_does_not_see_in_time_is_named(hosts: Hosts, tmp_path: Path) -> None:
    for outcome in run_hosts(hosts, 1, seen_late, str(tmp_path), 1, 0.5, expect_errors=True, grace_s=30):
        assert "rank 1 failed while saving" in outcome.error.message
        assert "'host-1' does not see this directory" in outcome.error.message
    assert os.listdir(tmp_path) == []


# ── a directory that the hosts do not share ───────────────────────────────────────────────────────────────────────


def trained_impatiently(directory: str, resume: str | None) -> Any:
    io = ShardCkptIO()
    io.storage = StorageRouter(LocalStorage(visible_within_s=0.5))
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
        assert "rank 2 (and rank(s) [3]) failed while saving" in outcome.error.message
        assert "must be on a file system that all ranks share" in outcome.error.message
    assert os.listdir(tmp_path / "run") == []
    assert subprocess.run(hosts.on(1, ["find", str(tmp_path)]), capture_output=True, text=True).stdout.split() == [
        str(tmp_path)
    ]


def trained_in_own(directory: str) -> None:
    """ModelCheckpoint would take rank 0's path everywhere."""
    trained(2, directory, {}, 1, None, [tiny.SaveAt(1, f"{directory}/{os.uname().nodename}/a.ckpt")])


def test_a_directory_with_another_path_on_each_host_is_an_error_on_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    for outcome in run_hosts(hosts, 1, trained_in_own, str(tmp_path), expect_errors=True, grace_s=30):
        said = "the ranks disagree about the path of this save: rank 0: .*host-0/a.ckpt.*, rank 1: .*host-1/a.ckpt"
        assert re.search(said, outcome.error.message)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir() or path.name.startswith(".")] == []


def test_a_checkpoint_that_one_host_sees_is_an_error_on_all_ranks(hosts: Hosts, tmp_path: Path) -> None:
    run_ranks(1, trained, 1, str(tmp_path / "run"), {}, 4)
    mounted_on_host_1(hosts, tmp_path)
    outcomes = run_hosts(
        hosts, 1, trained_impatiently, str(tmp_path / "run"), "last", expect_errors=True, grace_s=30
    )
    for outcome in outcomes:
        assert "file system that all ranks share" in outcome.error.message
        assert str(tmp_path / "run" / "step=4.ckpt") in outcome.error.message


def resumed_elsewhere(directory: str) -> None:
    """Host 0 does not see more of a checkpoint than the directory and the root index yet."""
    with Lag(directory, 3600.0 if this_host() == 0 else 0.0) as lag:
        lag.knows(f"{directory}/step=4.ckpt", f"{directory}/step=4.ckpt/{ROOT_NAME}")
        trained_impatiently(directory, f"{directory}/step=4.ckpt")


def test_a_file_that_a_host_does_not_see_is_named(
    hosts: Hosts, tmp_path: Path, saved: tuple[Path, list[Any]]
) -> None:
    shutil.copytree(saved[0] / "step=4.ckpt", tmp_path / "step=4.ckpt")
    outcomes = run_hosts(hosts, 1, resumed_elsewhere, str(tmp_path), expect_errors=True, grace_s=30)
    for outcome in outcomes:
        assert "rank 0 failed while" in outcome.error.message
        said = rf"{tmp_path}/step=4.ckpt', file \S+-dist-0000\d.*: the file is missing; .* 'host-0' may not see it yet"
        assert re.search(said, outcome.error.message)


# ── as users start it ─────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import json, sys
from pathlib import Path

from torch.distributed import get_rank

from tests.ranks.checkpoint.test_nodes import trained

if __name__ == "__main__":
    directory, devices, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    losses, *_ = trained(2, directory, {"timeout_s": 30.0}, steps, devices=devices)
    Path(__file__).with_name(f"losses of rank {get_rank()}.json").write_text(json.dumps(losses))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def torchrun(host: int, hosts: Hosts, port: int) -> list[str]:
    """What stands before the script on each host."""
    where = f"--nnodes 2 --nproc-per-node 1 --node-rank {host} --master-addr {hosts.address(0)} --master-port {port}"
    return [sys.executable, "-m", "torch.distributed.run", *where.split()]


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("launcher", "devices"),
    [pytest.param(None, 2, id="lightning"), pytest.param(torchrun, 1, id="torchrun")],
)
def test_a_script_that_is_started_on_both_hosts_trains_as_on_one(
    launcher: Any, devices: int, hosts: Hosts, script: Path, tmp_path: Path
) -> None:
    with launched(hosts, script, str(tmp_path / "two"), str(devices), "4", launcher=launcher) as processes:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
        assert [process.returncode for process in processes] == [0, 0], outputs
    one = run_ranks(2 * devices, trained, 1, str(tmp_path / "one"), {}, 4)
    for rank, (losses, *_) in enumerate(one):
        assert json.loads((tmp_path / f"losses of rank {rank}.json").read_text()) == losses
    assert sorted(os.listdir(tmp_path / "two")) == ["step=2.ckpt", "step=4.ckpt"]
    state = [load_full(str(tmp_path / where / "step=4.ckpt"))["state_dict"] for where in ("one", "two")]
    assert tiny.differences(*state) == []


@pytest.mark.slow
@pytest.mark.sweep
def test_when_all_processes_of_a_host_are_killed_those_of_the_other_one_end(
    hosts: Hosts, script: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "run"
    with launched(hosts, script, str(directory), "2", "100000") as (stays, goes):
        while not (directory / "step=4.ckpt").exists() and goes.poll() is None:
            goes.poll()
            threading.Event().wait(0.05)
        os.killpg(goes.pid, signal.SIGKILL)
        output = stays.communicate(timeout=100)[0]
    assert stays.returncode not in (0, None)
    assert "Error" in output
    complete = [path for path in directory.iterdir() if not path.name.startswith(".")]
    assert directory / "step=4.ckpt" in complete
    assert all(verify(str(path)).findings == () for path in complete)
