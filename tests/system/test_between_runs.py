"""A rank that ends between two runs, or fails alone, is named on the others, in seconds.

Oracle: who was made to do so; plain ddp, where the others end in less than a second with gloo's words.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
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
from lightning_shardckpt.distributed.host_numbers import any_rank, notices
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.fabric import ShardedStrategy
from lightning_shardckpt.system import host
from lightning_shardckpt.system.host import Tuning
from tests.support import tiny
from tests.support.pool import ROOT, join_store_of_rank_0, run_ranks
from tests.support.warm_python import Run

TUNING = Tuning(watch_s=0.2, exception_agreement_s=0.5)
PIPELINE = {"pipeline_parallel_size": 2, "pipeline": Pipeline(layers=["blocks.*"])}


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
    if dist.get_rank() == who:
        run("fit")
        end(how)
    say(lambda: (run("fit"), NEXT[then]()))  # one that is late is still in its first run


@pytest.mark.parametrize(
    ("how", "who", "then"),
    [("raises", 0, "fit"), ("raises", 1, "a save"), ("leaves", 0, "an agreement"), ("is killed", 1, "validate")],
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
    ("how", "when"), [("raises", "before setup"), ("leaves", "at a step"), ("is killed", "at a save")]
)
def test_a_rank_that_ends_in_a_script_of_fabric_is_named_on_the_others(how: str, when: str) -> None:
    other, _ = run_ranks(2, ends_in_a_script_of_fabric, how, when, expect_errors=True, grace_s=60)
    assert "raised RankError: " in other.output and "rank 1" in other.output, other
    assert how != "raises" or "rank 1 failed: ValueError: of mine" in other.output, other


class ReadsAlone(tiny.TinyLM):  # its rank 0 alone reads a parameter, as users do who log histograms
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def read(self, where: str) -> None:
        if where == self.where and self.global_rank == 0:
            self.head.weight.norm().item()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.read("in a step")
        return loss

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


@pytest.mark.parametrize("where", ["in a step", "at a save"])
def test_a_read_on_one_rank_is_named_on_both_and_the_next_run_says_that_it_cannot_begin(where: str) -> None:
    seconds = []
    for outcome in run_ranks(2, reads_alone, where, expect_errors=True):
        first, second = (text.partition(" raised ")[2] for text in outcome.output.split("\nrun ")[-2:])
        assert first.startswith("UnsupportedCodeError: ") and "head.weight" in first, outcome
        assert "test_between_runs.py:" in first and "read it on every rank" in first, outcome
        seconds.append(second.splitlines()[0].partition(":")[0])  # below it, a rank may see the other one leave
        assert second.startswith("RankError: this run cannot begin") or where == "in a step", outcome
    assert seconds[0] == seconds[1], seconds  # the ranks of a step may have compared what they read, and left together


class FailsAlone(tiny.TinyLM):
    def __init__(self, error: BaseException, failing: list[int]) -> None:
        super().__init__()
        self.error, self.failing = error, failing

    def training_step(self, batch: Any, index: int) -> Tensor:
        if index == 1 and self.global_rank in self.failing:
            raise self.error
        return super().training_step(batch, index)

    def validation_step(self, batch: Any, index: int) -> None:
        if index == 1 and self.global_rank in self.failing:
            raise self.error
        super().validation_step(batch, index)


def fails_alone(strategy: dict[str, Any], error: BaseException, who: int) -> None:
    def fit() -> None:
        tiny.trainer(strategy, TUNING, max_steps=3).fit(FailsAlone(error, [who]), tiny.loader())

    if dist.get_rank() != who:
        say(fit)
    try:
        fit()
    except BaseException as raised:
        if not isinstance(raised, SystemExit):  # as Python
            sys.last_value = raised
    end("leaves")


@pytest.mark.parametrize(
    ("strategy", "error", "who"), [({}, KeyboardInterrupt(), 1), (PIPELINE, ValueError("of mine"), 0)]
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
from tests.support import tiny

for devices in (2, 1):
    tiny.trainer({}, devices=devices, max_steps=2).fit(tiny.TinyLM(), tiny.loader(shuffle=False))
"""


def test_a_trainer_on_one_device_after_one_on_two_is_refused_at_once(tmp_path: Path, python: Run) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = python(["script.py"], env=os.environ | {"PYTHONPATH": str(ROOT)}, folder=tmp_path)
    assert done.returncode == 1
    assert "has 1 process(es), but the process group of this script has 2: give all of them the same" in done.stderr


# ── the next run ────────────────────────────────────────────────────────────────────────────────────────────────────


def run_twice(failing: list[int], first: str) -> list[str]:
    """Run until it fails, then fit another module; return both ends."""
    ends = []
    for name, ranks in ((first, failing), ("fit", [])):
        trainer = tiny.trainer({"timeout_s": 600.0}, TUNING, max_steps=3, limit_val_batches=3)
        module = FailsAlone(OSError("of mine"), ranks)
        try:
            getattr(trainer, name)(module, tiny.loader(shuffle=False))
            ends.append("ok")
        except Exception as error:
            ends.append(f"{type(error).__name__}: {error}")
    return ends


@pytest.mark.parametrize("first", ["fit", "validate"])
def test_a_run_after_one_rank_failed_alone_says_why_it_cannot_begin(first: str) -> None:
    failed, other = run_ranks(2, run_twice, [0], first)
    assert failed[0] == "OSError: of mine"
    assert other[0] == "RankError: rank 0 failed: OSError: of mine"
    assert failed[1] == other[1]
    assert "cannot begin: an earlier one ended on rank(s) [1] in a collective" in other[1]


def test_a_run_after_all_ranks_failed_trains() -> None:
    assert run_ranks(2, run_twice, [0, 1], "fit") == [["OSError: of mine", "ok"]] * 2


# ── the end of a script ────────────────────────────────────────────────────────────────────────────────────────────


SELDOM = Tuning(rank_poll_s=0.7, rank_longest_poll_s=0.7, host_look_s=0.0)


def end_with_the_store() -> str:
    """Rank 0 keeps the store, as under Lightning's launcher, and ends; rank 1 asks it seldom."""
    rank, rendezvous = join_store_of_rank_0()
    # Rank 0 answers when rank 1 has looked for the answer in vain, and looks again only after rank 0 has ended.
    notices.append(lambda *_: rendezvous.set("looked", "") if rank else None)
    ranks = Ranks.of_group(tuning=SELDOM if rank else host.TUNING)
    ranks.step("saving", lambda: rank, lambda rows: len(rendezvous.get("looked")))
    if rank == 0:
        del ranks
        gc.collect()  # what rank 0 waits for must not depend on the life of an object
        atexit._run_exitfuncs()  # as Python does it at the end of a script
        os._exit(0)  # as the processes of multiprocessing end
    return "complete"


def test_a_complete_run_ends_without_an_error_on_all_ranks() -> None:
    _, other = run_ranks(2, end_with_the_store, init_process_group=False, expect_errors=True)
    assert (other.value, other.error) == ("complete", None)
