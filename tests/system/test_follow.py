"""A follower evaluates each checkpoint of a training in other processes, whichever of them is killed."""

from __future__ import annotations

import csv
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from lightning_shardckpt import FollowedMetrics, ShardCkptIO, save
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.storage.run_folder import RunFolder
from lightning_shardckpt.tools.follow import follow
from tests.support import tiny
from tests.support.pool import ROOT, run_ranks
from tests.support.stores import Bucket

# Says that it has begun, and goes on when it may, for steps that have a gate; the second argument is a step to die at.
EVALUATE = """
import json, os, signal, sys
from lightning_shardckpt import metadata
from lightning_shardckpt.tools.verify import verify
gates, fatal, path = sys.argv[1:]
step = metadata(path).step
try:
    if os.path.exists(f"{gates}/begun-{step}"):
        with open(f"{gates}/begun-{step}", "w") as begun:
            begun.write(str(os.getpid()))
        open(f"{gates}/go-{step}").read()
except KeyboardInterrupt:
    open(f"{gates}/interrupted", "w").close()
    raise
print('{"score": 0}')
print(json.dumps({"score": step * 10, "whole": not verify(path).findings, "name": os.path.basename(path)}))
print("the end")
if step == int(fatal):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class Gates:
    """Named pipes at which an evaluation waits."""

    def __init__(self, folder: Path, *steps: int) -> None:
        self.folder, self.script = folder, folder / "evaluate.py"
        folder.mkdir(exist_ok=True)
        self.script.write_text(EVALUATE)
        for step in steps:
            for name in ("begun", "go"):
                os.mkfifo(folder / f"{name}-{step}")

    def begun(self, step: int) -> int:
        """Wait until the evaluation of a step has begun; return its process."""
        pipe = os.open(self.folder / f"begun-{step}", os.O_RDONLY | os.O_NONBLOCK)
        waiting = select.poll()
        waiting.register(pipe, select.POLLIN)
        assert waiting.poll(100_000), f"the evaluation of step {step} has not begun"
        pid = int(os.read(pipe, 100))
        os.close(pipe)
        return pid

    def go(self, step: int) -> None:
        (self.folder / f"go-{step}").write_text("")

    def command(self, fatal: int = 0) -> list[str]:
        return [str(self.script), str(self.folder), str(fatal), "{}"]


@contextmanager
def following(run_dir: str, gates: Gates, *options: str, fatal: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """A follower in a process of its own."""
    command = [sys.executable, "-m", "lightning_shardckpt", "follow", run_dir, "--interval=0.05", *options, "--"]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*command, *gates.command(fatal)], env=env, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def run_folder(run_dir: str) -> RunFolder:
    return RunFolder(run_dir, StorageRouter())


def evaluated(run_dir: str) -> dict[int, Any]:
    """The exit status of each step, in order; each was evaluated once."""
    found = run_folder(run_dir).evaluations()
    assert len({one["save_id"] for one in found}) == len(found)
    return {one["step"]: one.get("status") for one in found}


def names(run_dir: str) -> list[str]:
    return [os.path.basename(path) for path in sorted(run_folder(run_dir).list_complete())]


# ── with a training ───────────────────────────────────────────────────────────────────────────────────────────────


class Meets(pl.Callback):
    """On rank 0: waits in the second batch until step 1 is evaluated; lets it end only after the training."""

    def __init__(self, gates: Gates, run_dir: str, *, dies: bool) -> None:
        self._gates, self._run_dir, self._dies = gates, run_dir, dies

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.is_global_zero and self._dies and trainer.global_step == 1:
            self._gates.begun(1)
        if trainer.is_global_zero and self._dies and trainer.global_step == 2:
            assert names(self._run_dir) == ["step=1.ckpt", "step=2.ckpt"]  # save_top_k=1 has deleted the first one
            os.kill(os.getpid(), signal.SIGKILL)

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if trainer.is_global_zero and self._run_dir and names(self._run_dir)[0] == "step=1.ckpt":
            self._gates.go(1)


def train(run_dir: str, logs: str, steps: int, meets: Meets | None = None, resume: str | None = None) -> None:
    """On all ranks."""
    keeps = ModelCheckpoint(run_dir, "{step}", every_n_train_steps=1, save_top_k=1)
    callbacks = [keeps, *([meets] if meets else []), FollowedMetrics(wait_s=100)]
    options: dict[str, Any] = {"callbacks": callbacks, "enable_checkpointing": True, "logger": CSVLogger(logs)}
    tiny.fit({"data_parallel_shard_size": 2}, steps, resume=resume, **options)


def logged(folder: Path) -> list[dict[int, float]]:
    """The scores by step in each log."""
    logs = sorted(folder.rglob("metrics.csv"))
    rows = [list(csv.DictReader(log.read_text().splitlines())) for log in logs]
    return [{int(row["step"]): float(row["score"]) for row in log if row.get("score")} for log in rows]


def check_training(run_dir: str, tmp_path: Path) -> None:
    gates = Gates(tmp_path / "gates", 1)
    with following(run_dir, gates) as follower:
        killed = Meets(gates, run_dir, dies=True)
        outcomes = run_ranks(2, train, run_dir, str(tmp_path / "logs"), 4, killed, expect_errors=True, grace_s=1)
        assert outcomes[0].killed
        resumed = Meets(gates, run_dir, dies=False)
        run_ranks(2, train, run_dir, str(tmp_path / "logs"), 4, resumed, f"{run_dir}/step=2.ckpt")
        assert follower.wait(100) == 0
    # The others were deleted while the first one was evaluated. Lightning keeps the local path from which it resumed.
    steps = [1, 4] if "://" in run_dir else [1, 2, 4]
    assert evaluated(run_dir) == dict.fromkeys(steps, 0)
    assert all(one["metrics"]["whole"] for one in run_folder(run_dir).evaluations())
    assert names(run_dir) == [f"step={step}.ckpt" for step in steps[1:]]
    assert [scores for scores in logged(tmp_path / "logs") if scores] == [{step: step * 10.0 for step in steps}]


@pytest.mark.slow
def test_what_is_evaluated_outlives_save_top_k_and_a_killed_training_and_is_logged_at_its_step(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    check_training(run_dir, tmp_path)
    run_ranks(2, unfollowed, run_dir, str(tmp_path / "later"))
    assert follow(run_dir, Gates(tmp_path / "gates").command()) == 0  # it ends, since the training has
    assert list(evaluated(run_dir)) == [1, 2, 4, 5]
    run_ranks(2, train, run_dir, str(tmp_path / "later"), 5, None, f"{run_dir}/step=5.ckpt")
    assert logged(tmp_path / "later") == [{}, {5: 50.0}]


@pytest.mark.slow
def test_the_same_in_an_object_store(tmp_path: Path, s3: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    check_training(s3.url("run"), tmp_path)
    rest = {key for key in s3.listed() if not key.startswith("run/step=4.ckpt/")}
    assert rest == {"run/evaluations.jsonl", "run/.follow/ended", "run/.follow/logged"}


def unfollowed(run_dir: str, logs: str) -> None:
    missing = pytest.warns(UserWarning, match=r"metrics of 1 checkpoint are not logged.*step=5\.ckpt")
    with missing if os.environ["RANK"] == "0" else nullcontext():
        train(run_dir, logs, 5, resume=f"{run_dir}/step=4.ckpt")


# ── without one ───────────────────────────────────────────────────────────────────────────────────────────────────


def saved(folder: Path, *steps: int) -> str:
    for step in steps:
        save(f"{folder}/step={step}.ckpt", {"model": {"w": torch.full((3,), float(step))}, "step": step})
    return str(folder)


def wait_until_gone(pid: int) -> None:
    with os.fdopen(os.pidfd_open(pid)) as process:
        assert select.select([process], [], [], 100)[0]


def test_an_evaluation_whose_follower_is_killed_is_repeated_and_a_killed_command_is_not(tmp_path: Path) -> None:
    gates, run_dir = Gates(tmp_path / "gates", 2), saved(tmp_path / "run", 2, 3)
    with following(run_dir, gates) as follower:
        command = gates.begun(2)
        follower.kill()
        wait_until_gone(command)
    saved(tmp_path / "run", 1)
    with following(run_dir, gates, "--once", fatal=2) as follower:
        gates.begun(2)
        ShardCkptIO().remove_checkpoint(f"{run_dir}/step=2.ckpt")
        assert names(run_dir) == ["step=1.ckpt", "step=2.ckpt", "step=3.ckpt"]
        gates.go(2)
        assert follower.wait(100) == 1
        assert follower.stdout is not None and b"the end" in follower.stdout.read()
    assert evaluated(run_dir) == {2: -signal.SIGKILL, 1: 0, 3: 0}
    assert names(run_dir) == ["step=1.ckpt", "step=3.ckpt"]
    assert os.listdir(f"{run_dir}/.follow") == []
    with following(run_dir, gates, "--once", fatal=1) as follower:
        assert follower.wait(100) == 0
    assert len(evaluated(run_dir)) == 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_command_and_the_follower_and_nothing_is_recorded(
    tmp_path: Path, number: signal.Signals, status: int
) -> None:
    gates, run_dir = Gates(tmp_path / "gates", 1), saved(tmp_path / "run", 1)
    with following(run_dir, gates) as follower:
        gates.begun(1)
        follower.send_signal(number)
        assert follower.wait(100) == status
    assert (gates.folder / "interrupted").exists()
    assert evaluated(run_dir) == {} and os.listdir(f"{run_dir}/.follow") == []


def test_the_newest_is_evaluated_and_the_others_are_skipped_until_all_are_wanted(tmp_path: Path) -> None:
    gates, run_dir = Gates(tmp_path / "gates"), saved(tmp_path / "run", 1, 2, 10)
    assert follow(run_dir, gates.command(), newest=True, once=True) == 0
    assert evaluated(run_dir) == {1: None, 2: None, 10: 0}
    assert follow(run_dir, gates.command(), once=True) == 0
    assert [(one["step"], "status" in one) for one in run_folder(run_dir).evaluations()[3:]] == [(1, True), (2, True)]


def test_a_save_is_evaluated_once_under_whatever_names_and_again_if_it_is_replaced(tmp_path: Path) -> None:
    gates, run_dir = Gates(tmp_path / "gates"), saved(tmp_path / "run", 1, 2)
    folder = tmp_path / "run"
    shutil.copytree(folder / "step=2.ckpt", folder / "a-copy.ckpt")
    (folder / "link.ckpt").symlink_to("step=1.ckpt")
    shutil.copytree(folder / "step=1.ckpt", folder / ".tmp-draft")
    (folder / "step=3.ckpt").mkdir()  # its save has not finished
    (folder / "step=4.ckpt").mkdir()
    (folder / "step=4.ckpt" / "checkpoint.index.json").write_text("{}")
    save(folder / "last.ckpt", {"model": {"w": torch.zeros(3)}, "step": 2})  # as ModelCheckpoint(save_last=True) does
    assert follow(run_dir, gates.command(), once=True) == 0
    assert [one["metrics"]["name"] for one in run_folder(run_dir).evaluations()] == ["step=1.ckpt", "a-copy.ckpt"]
    shutil.rmtree(folder / "step=2.ckpt")
    shutil.rmtree(folder / "a-copy.ckpt")
    save(folder / "step=1.ckpt", {"model": {"w": torch.zeros(3)}, "step": 1}, overwrite=True)
    save(folder / "last.ckpt", {"model": {"w": torch.zeros(3)}, "step": 5}, overwrite=True)
    assert follow(run_dir, gates.command(), once=True) == 0
    found = [one["metrics"]["name"] for one in run_folder(run_dir).evaluations()]
    assert found == ["step=1.ckpt", "a-copy.ckpt", "step=1.ckpt", "last.ckpt"]


def test_wrong_commands_are_errors_and_record_nothing(tmp_path: Path) -> None:
    run_dir = saved(tmp_path / "run", 1)
    with pytest.raises(ValueError, match=r"needs \{\} in the place of the checkpoint's path"):
        follow(run_dir, ["true"], once=True)
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        follow(run_dir, ["no-such-program", "{}"], once=True)
    with pytest.raises(FileNotFoundError, match="does not exist yet"):
        follow(tmp_path / "other", ["true", "{}"], once=True)
    assert evaluated(run_dir) == {} and not (tmp_path / "other").exists()
    assert json.loads((Path(run_dir) / "step=1.ckpt" / "checkpoint.index.json").read_text())
