"""A rank that ends between two runs, or fails alone, is named on the others, in seconds.

Oracle: who was made to do so; plain ddp, where the others end in less than a second with gloo's words.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn

import lightning_shardckpt
from lightning_shardckpt import Pipeline
from lightning_shardckpt.distributed.host_numbers import any_rank
from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system.tuning import Tuning
from tests.support import tiny
from tests.support.pool import ROOT, run_ranks
from tests.support.warm_python import Run, run_new

TUNING = Tuning(watch_s=0.2, exception_agreement_s=0.5)
PIPELINE = {"pipeline_parallel_size": 2, "pipeline": Pipeline(layers=["blocks.*"])}
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "tensor_parallel_plan": tiny.TP_PLAN}


def end(how: str) -> None:
    """End this process as a script does."""
    if how == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raises":  # as Python does it before it ends
        sys.last_value = ValueError("of mine")
    atexit._run_exitfuncs()
    os._exit(3)


def say(call: Callable[[], object]) -> None:
    """Print how a call ends, and leave: the destruction of a process group may wait for its timeout."""
    try:
        call()
        print("raised nothing")
    except BaseException as error:
        print(f"raised {type(error).__name__}: {error}")
    sys.stdout.flush()
    os._exit(0)


def run(name: str) -> None:
    getattr(tiny.trainer({}, TUNING, max_steps=2), name)(tiny.TinyLM(), tiny.loader(shuffle=False))


def saves() -> None:
    lightning_shardckpt.save("here", {"x": {"y": torch.ones(3)}})


NEXT: dict[str, Callable[[], object]] = {
    "fit": lambda: run("fit"),
    "validate": lambda: run("validate"),
    "a save": saves,
    "an agreement": lambda: any_rank(False),
}


def ends_between_runs(how: str, who: int, then: str) -> None:
    run("fit")
    if dist.get_rank() == who:
        end(how)
    say(NEXT[then])


@pytest.mark.parametrize(
    ("how", "who", "then"),
    [
        *(("raises", 0, "fit"), ("raises", 1, "a save"), ("leaves", 0, "an agreement"), ("is killed", 1, "validate")),
        *(pytest.param("raises", who, then, marks=pytest.mark.sweep) for who in (0, 1) for then in NEXT),
        *(pytest.param(how, who, "fit", marks=pytest.mark.sweep) for how in ("leaves", "is killed") for who in (0, 1)),
    ],
)
def test_a_rank_that_ends_between_two_runs_is_named_on_the_others(how: str, who: int, then: str) -> None:
    other = run_ranks(2, ends_between_runs, how, who, then, expect_errors=True, grace_s=60)[1 - who]
    assert "raised RankError: " in other.output and f"rank {who}" in other.output, other
    assert how != "raises" or f"rank {who} failed: ValueError: of mine" in other.output, other


def ends_in_a_script_of_fabric(how: str, when: str) -> None:
    strategy = ShardedStrategy()
    strategy.tuning = TUNING
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    if when == "before setup" and fabric.global_rank == 1:
        end(how)
    if when == "before setup":
        say(lambda: fabric.setup(nn.Linear(4, 4)))
    model = fabric.setup(nn.Linear(4, 4))
    fabric.backward(model(torch.ones(2, 4)).sum())
    if fabric.global_rank == 1:
        end(how)
    if when == "at a save":
        say(lambda: fabric.save("here", {"model": model}))
    say(lambda: fabric.backward(model(torch.ones(2, 4)).sum()))


@pytest.mark.parametrize(
    ("how", "when"),
    [
        pytest.param(how, when, marks=[] if (ended - at) % 3 == 0 else pytest.mark.sweep)
        for ended, how in enumerate(("raises", "leaves", "is killed"))
        for at, when in enumerate(("before setup", "at a step", "at a save"))
    ],
)
def test_a_rank_that_ends_in_a_script_of_fabric_is_named_on_the_others(how: str, when: str) -> None:
    other, _ = run_ranks(2, ends_in_a_script_of_fabric, how, when, expect_errors=True, grace_s=60)
    assert "raised RankError: " in other.output and "rank 1" in other.output, other
    assert how != "raises" or "rank 1 failed: ValueError: of mine" in other.output, other


class ReadsAlone(tiny.TinyLM):
    """Its rank 0 alone reads a parameter, in one of the places where users log histograms."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def read(self, where: str) -> None:
        if where == self.where and self.global_rank == 0:
            self.head.weight.norm().item()

    def on_train_epoch_end(self) -> None:
        self.read("at the end of an epoch")

    def on_train_batch_end(self, *_: Any) -> None:
        self.read("after a step")

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.read("in a step")
        return loss

    def on_fit_end(self) -> None:
        self.read("at the end of a fit")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.read("at a save")


def reads_alone(where: str) -> None:
    said = []
    for module in (ReadsAlone(where), tiny.TinyLM()):
        trainer = tiny.trainer({}, TUNING, max_epochs=2, limit_train_batches=3)
        try:
            trainer.fit(module, tiny.loader())
            trainer.save_checkpoint("here")
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
    print("\n".join(f"run {number} raised {text}" for number, text in enumerate(said)), flush=True)
    os._exit(0)


@pytest.mark.parametrize(
    "where",
    [
        *("in a step", "at a save"),
        *(
            pytest.param(where, marks=pytest.mark.sweep)
            for where in ("at the end of an epoch", "after a step", "at the end of a fit")
        ),
    ],
)
def test_a_read_on_one_rank_is_named_on_both_and_the_next_run_says_that_it_cannot_begin(where: str) -> None:
    seconds = []
    for outcome in run_ranks(2, reads_alone, where, expect_errors=True):
        first, second = (text.partition(" raised ")[2] for text in outcome.output.split("\nrun ")[-2:])
        assert first.startswith("UnsupportedCodeError: ") and "head.weight" in first, outcome
        assert "test_between_runs.py:" in first and "read it on every rank" in first, outcome
        seconds.append(second.partition(":")[0].strip())
        assert second.startswith("RankError: this run cannot begin") or where == "in a step", outcome
    assert seconds[0] == seconds[1], seconds  # the ranks of a step may have compared what they read, and left together


class FailsAlone(tiny.TinyLM):
    def __init__(self, error: BaseException, who: int) -> None:
        super().__init__()
        self.error, self.who = error, who

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1 and self.global_rank == self.who:
            raise self.error
        return super().training_step(batch, index)


def fails_alone(strategy: dict[str, Any], error: BaseException, who: int) -> None:
    def fit() -> None:
        tiny.trainer(strategy, TUNING, max_steps=3).fit(FailsAlone(error, who), tiny.loader())

    if dist.get_rank() != who:
        say(fit)
    try:
        fit()
    except BaseException as raised:
        if not isinstance(raised, SystemExit):  # as Python
            sys.last_value = raised
    end("leaves")


@pytest.mark.parametrize(
    ("strategy", "error", "who"),
    [
        pytest.param(
            strategy,
            error,
            who,
            marks=[] if (way, kind, who) in ((0, 0, 1), (1, 1, 0)) else pytest.mark.sweep,
        )
        for way, strategy in enumerate(({}, PIPELINE, TENSOR_PARALLEL))
        for kind, error in enumerate((KeyboardInterrupt(), ValueError("of mine")))
        for who in (0, 1)
    ],
)
def test_an_error_that_ends_one_rank_is_named_on_the_others(
    strategy: dict[str, Any], error: BaseException, who: int
) -> None:
    other = run_ranks(2, fails_alone, strategy, error, who, expect_errors=True, grace_s=60)[1 - who]
    assert "raised RankError: " in other.output or "raised UnsupportedCodeError: " in other.output, other
    assert f"rank {who} failed" in other.output and type(error).__name__ in other.output, other


def descriptors_after_runs() -> list[int]:
    module, counts = tiny.TinyLM(), []
    for _ in range(4):
        trainer: pl.Trainer = tiny.trainer({}, TUNING, max_steps=2)
        trainer.fit(module, tiny.loader())
        trainer.validate(module, tiny.loader(shuffle=False), verbose=False)
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


def test_runs_leave_no_file_descriptors() -> None:
    for counts in run_ranks(2, descriptors_after_runs):
        assert min(counts[2:]) <= min(counts[:2]), counts  # a thread that looks into /proc holds one for a moment


SCRIPT = """
import sys
import torch
from lightning.pytorch import seed_everything
from tests.support import tiny

for number, devices in enumerate(map(int, sys.argv[1:])):
    seed_everything(1)
    module, trainer = tiny.TinyLM(), tiny.trainer({}, devices=devices, max_steps=2)
    trainer.fit(module, tiny.loader(shuffle=False))
    whole = {name: tiny.whole(value) for name, value in module.state_dict().items()}
    torch.save(whole, f"{number}-of-{len(sys.argv) - 1}-rank-{trainer.global_rank}.pt")
"""


def train_in_a_script(python: Run, folder: Path, *devices: int) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    return python(["script.py", *map(str, devices)], env=os.environ | {"PYTHONPATH": str(ROOT)}, folder=folder)


def test_a_script_may_train_on_one_device_and_then_on_two(tmp_path: Path, python: Run) -> None:
    for devices in ((1, 2), (2,)):
        done = train_in_a_script(python, tmp_path, *devices)
        assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        after, alone = (torch.load(tmp_path / f"{name}-rank-{rank}.pt") for name in ("1-of-2", "0-of-1"))
        assert tiny.differences(after, alone) == []


def test_a_trainer_on_one_device_after_one_on_two_is_refused_at_once(tmp_path: Path, python: Run) -> None:
    done = train_in_a_script(python, tmp_path, 2, 1)
    assert done.returncode == 1
    assert "has 1 process(es), but the process group of this script has 2: give all of them the same" in done.stderr


LAUNCHER = """
import os, signal, subprocess, sys, time
from pathlib import Path

if "LOCAL_RANK" not in os.environ:  # rank 0, which starts rank 1 as Lightning does, and is killed
    env = os.environ | {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
    subprocess.Popen([sys.executable, *sys.argv], env=env)
    while not Path("joining").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
from tests.support import tiny

trainer = tiny.trainer({}, devices=2)
Path("joining").touch()
try:
    trainer.fit(tiny.TinyLM(), tiny.loader())
except Exception as error:
    Path("raised").write_text(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_a_rank_whose_launcher_is_killed_before_the_process_group_is_made_says_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LAUNCHER)
    with socket.socket() as closed:  # bound, and not listening
        closed.bind(("127.0.0.1", 0))
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        run_new(["script.py", str(closed.getsockname()[1])], env=env, folder=tmp_path, timeout_s=100)  # waits for both
    assert (tmp_path / "raised").read_text().startswith("RankError: rank 1 can't join the process group: the process")
