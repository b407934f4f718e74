"""Saves that a Trainer writes while it goes on: what they hold, who learns of their errors, and in which order."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_shardckpt.tools.digest import digest
from tests.support import tiny, warm_python
from tests.support.pool import ROOT, run_ranks
from tests.support.storages import complete, disk_error, gated_io

EXIT = """
import sys, torch, threading
from lightning_shardckpt import ShardCkptIO
from tests.support.storages import Gated, disk_error
io = ShardCkptIO(use_async=True)
io.storage.local = storage = Gated()
storage.gate.clear()
storage.faults["write", "a.ckpt"] = disk_error
io.save_checkpoint({"state_dict": {"a": torch.ones(3)}, "global_step": 5}, sys.argv[1])
main = threading.main_thread()
threading.Thread(target=lambda: (main.join(), storage.gate.set())).start()
"""


@pytest.mark.slow
def test_a_process_that_ends_without_a_teardown_waits_for_its_save_and_shows_its_error(
    tmp_path: Path, python: warm_python.Run
) -> None:
    done = python(["-c", EXIT, str(tmp_path / "a.ckpt")], env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "Input/output error" in done.stderr and os.listdir(tmp_path) == []


class At(pl.Callback):
    """Does something at the end of a step; give it after a ModelCheckpoint's place."""

    def __init__(self, step: int, act: Callable[[pl.Trainer], None]) -> None:
        self._step, self._act = step, act

    def on_before_zero_grad(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._step:
            self._act(trainer)


def late(directory: str) -> list[Any]:
    """The save after the second step is held until the fourth: what it has, and how a run resumes from it."""
    expected = tiny.fit({}, 5, callbacks=[tiny.SaveAt(2, f"{directory}/sync")])["state"]
    io = gated_io()
    io.storage.local.gate.clear()
    release = At(4, lambda trainer: io.storage.local.gate.set())
    straight = tiny.fit({}, 5, callbacks=[tiny.SaveAt(2, f"{directory}/async"), release], plugins=[io])["state"]
    resumed = tiny.fit({}, 5, resume=f"{directory}/async", seed=9)["state"]
    pairs = [digest(f"{directory}/{name}")["whole"] for name in ("sync", "async")]
    return [pairs[0] == pairs[1], tiny.differences(expected, straight), tiny.differences(expected, resumed)]


def test_an_asynchronous_checkpoint_equals_a_synchronous_one_and_resumes_alike(tmp_path: Path) -> None:
    assert run_ranks(2, late, str(tmp_path)) == [[True, [], []]] * 2


def keep_one(directory: str) -> dict[str, Any]:
    """The save after the second step is held until the third."""
    io, seen = gated_io(), dict[str, Any]()

    def shut(trainer: pl.Trainer) -> None:
        io.wait()
        io.storage.local.looks.clear()
        io.storage.local.gate.clear()

    def look(trainer: pl.Trainer) -> None:
        seen["held"] = complete(directory)
        seen["link is broken"] = not os.path.exists(f"{directory}/last.ckpt")
        io.storage.local.gate.set()

    pl.seed_everything(1)
    when = timedelta(microseconds=1)
    keep = ModelCheckpoint(directory, save_top_k=1, save_last="link", filename="{step}", train_time_interval=when)
    callbacks = [At(1, shut), At(2, look), keep]
    run = tiny.trainer({}, max_steps=3, plugins=[io], callbacks=callbacks, enable_checkpointing=True)
    held_out = tiny.loader(count=8, shuffle=False)
    run.fit(module := tiny.TinyLM(), tiny.loader(), held_out)
    seen["kept"], seen["always some"] = sorted(os.listdir(directory)), all(io.storage.local.looks)
    run.save_checkpoint(f"{directory}/after.ckpt")
    seen["after"] = complete(directory)
    for path in ("best", "last", f"{directory}/after.ckpt"):
        run.validate(module, held_out, ckpt_path=path, verbose=False)
    seen["last"] = os.path.basename(os.path.realpath(f"{directory}/last.ckpt"))
    return seen


def test_the_best_checkpoint_is_there_until_its_successor_is(tmp_path: Path) -> None:
    for found in run_ranks(2, keep_one, str(tmp_path / "run")):
        assert found["held"] == {"step=1.ckpt"} and found["link is broken"]
        assert found["kept"] == ["last.ckpt", "step=3.ckpt"] and found["last"] == "step=3.ckpt"
        assert found["always some"] and "after.ckpt" in found["after"]


def fails_at_the_end(directory: str) -> list[Any]:
    io = gated_io()
    if dist.get_rank() == 1:
        io.storage.local.faults["write", "step=3.ckpt"] = disk_error
    keep = ModelCheckpoint(directory, save_top_k=1, every_n_train_steps=1, filename="{step}")
    run = tiny.trainer({}, max_steps=3, plugins=[io], callbacks=[keep], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(OSError) as error:
            run.fit(tiny.TinyLM(), tiny.loader())
    return [str(error.value), [str(w.message) for w in told if "not removed" in str(w.message)], complete(directory)]


def test_an_error_of_the_last_save_is_raised_by_fit_and_the_one_before_is_kept(tmp_path: Path) -> None:
    for rank, (message, said, names) in enumerate(run_ranks(2, fails_at_the_end, str(tmp_path))):
        assert "rank 1 failed while saving" in message and "Input/output error" in message
        assert [("step=2.ckpt" in s) for s in said] == [True] * (rank == 0) and names == {"step=2.ckpt"}


class Fails(tiny.TinyLM):
    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.global_step == 2:
            raise ZeroDivisionError("as users do")


def all_fail_in_training(directory: str) -> dict[str, list[Any]]:
    return {case: fails_in_training(f"{directory}/{case}", case) for case in CASES}


def fails_in_training(directory: str, case: str) -> list[Any]:
    io = gated_io()
    saves: list[pl.Callback] = [tiny.SaveAt(2, f"{directory}/pending.ckpt")]
    told: Any = nullcontext()
    if case != "nobody saves":
        saves.append(OnExceptionCheckpoint(directory))
    if case == "the save before fails":
        io.storage.local.faults["write", "pending.ckpt"] = disk_error if dist.get_rank() == 1 else lambda: None
        told = pytest.warns(UserWarning, match="before the exception, a save had failed: .*Input")
    if case == "the last save fails":
        io.storage.local.faults["write", "on_exception.ckpt"] = disk_error if dist.get_rank() == 1 else lambda: None
        told = pytest.warns(UserWarning, match="no checkpoint was saved after the exception: .*Input")
    keeping = {"callbacks": saves, "enable_checkpointing": len(saves) > 1}
    run = tiny.trainer({}, max_steps=4, limit_val_batches=0, plugins=[io], **keeping)
    with told, io.storage.local.opened_by("on_exception"), pytest.raises(ZeroDivisionError):
        run.fit(Fails(), tiny.loader())
    found = complete(directory)
    dist.barrier()
    again = tiny.trainer({}, max_steps=4, limit_val_batches=0, plugins=[io])
    again.fit(module := tiny.TinyLM(), tiny.loader(), ckpt_path=f"{directory}/{min(found)}")
    again.save_checkpoint(f"{directory}/second.ckpt")
    return [found, len(module.losses), complete(directory) - found]


CASES = {
    "all is well": {"on_exception.ckpt", "pending.ckpt"},
    "nobody saves": {"pending.ckpt"},
    "the save before fails": {"on_exception.ckpt"},
    "the last save fails": {"pending.ckpt"},
}


def test_a_fit_that_fails_finishes_its_saves_and_a_second_one_is_clean(tmp_path: Path) -> None:
    for found in run_ranks(2, all_fail_in_training, str(tmp_path)):
        assert found == {case: [names, 2, {"second.ckpt"}] for case, names in CASES.items()}
