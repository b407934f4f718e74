"""An exception on one rank: it stays the one that is raised there, the others learn of it, and nothing hangs."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_shardckpt.system.host import TUNING
from tests.support import tiny
from tests.support.pool import run_ranks

STEP = 2


class Breaks(tiny.TinyLM):
    """One rank raises, or dies, in one place."""

    def __init__(self, who: int, where: str) -> None:
        super().__init__()
        self._who, self._where = who, where

    def _reached(self, where: str) -> None:
        if where == self._where.removeprefix("killed ") and self.global_rank == self._who and self.global_step == STEP:
            if self._where.startswith("killed"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise ZeroDivisionError(f"as users do, in {where}")

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        self._reached("on_train_batch_start")

    def training_step(self, batch: Any, index: int) -> Any:
        self._reached("training_step")
        return super().training_step(batch, index)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._reached("on_save_checkpoint")


def broken(who: int, where: str, saver: str, directory: str) -> tuple[str, str, list[str], list[str]]:
    callbacks = {
        "none": [],
        "on exception": [OnExceptionCheckpoint(directory)],
        "model checkpoint": [ModelCheckpoint(directory, every_n_train_steps=3, save_on_exception=True, save_last=True)],
        "every step": [ModelCheckpoint(directory, every_n_train_steps=1, save_top_k=-1)],
    }[saver]
    run = tiny.trainer({}, max_steps=6, limit_val_batches=0, callbacks=callbacks, enable_checkpointing=bool(callbacks))
    run.strategy.tuning = replace(TUNING, exception_agreement_s=0.2)  # nobody is to come
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            module = Breaks(who, where)
            run.fit(module, tiny.loader())
        except Exception as error:
            notes = getattr(error, "__notes__", [])
            return type(error).__name__, str(error), notes, [str(w.message) for w in said]
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(
    ("who", "where", "saver"),  # every pair of two of them
    [
        (0, "training_step", "none"),
        (1, "training_step", "on exception"),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in (
                (1, "on_train_batch_start", "model checkpoint"),
                (0, "training_step", "model checkpoint"),
                (0, "on_train_batch_start", "on exception"),
                (1, "on_train_batch_start", "none"),
            )
        ),
    ],
)
def test_the_exception_of_one_rank_is_neither_hidden_nor_waited_for(
    who: int, where: str, saver: str, tmp_path: Path
) -> None:
    found = run_ranks(2, broken, who, where, saver, str(tmp_path), expect_errors=True, grace_s=30, timeout_s=90)
    kind, message, _, said = found[who].value
    assert (kind, message) == ("ZeroDivisionError", f"as users do, in {where}")
    if saver != "none":
        assert any("no checkpoint was saved after the exception: " in line for line in said), said
    kind, message, notes, _ = found[1 - who].value
    assert kind != "ZeroDivisionError"
    assert f"as users do, in {where}" in "\n".join([message, *notes]) or "closed" in message
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_an_exception_in_a_hook_of_saving_reaches_the_rank_that_waits(who: int, tmp_path: Path) -> None:
    where = "on_save_checkpoint"
    found = run_ranks(2, broken, who, where, "every step", str(tmp_path), expect_errors=True, grace_s=30, timeout_s=90)
    assert found[who].value[:2] == ("ZeroDivisionError", f"as users do, in {where}")
    kind, message, notes, _ = found[1 - who].value
    assert kind in ("RankError", "MismatchError")
    assert f"rank {who}" in message and "as users do" in "\n".join([message, *notes])
    assert sorted(os.listdir(tmp_path)) == ["epoch=0-step=1.ckpt"]


@pytest.mark.parametrize("who", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_a_rank_that_dies_on_its_way_to_a_save_is_named(who: int, tmp_path: Path) -> None:
    where = "killed on_save_checkpoint"
    found = run_ranks(2, broken, who, where, "every step", str(tmp_path), expect_errors=True, grace_s=30, timeout_s=90)
    assert found[who].killed
    kind, message, _, _ = found[1 - who].value
    assert kind == "RankError" and "is gone" in message
    assert f"rank {who} failed while comparing the ranks" in message
    assert sorted(n for n in os.listdir(tmp_path) if not n.startswith(".tmp-")) == ["epoch=0-step=1.ckpt"]


class DiskFails(tiny.TinyLM):
    """From some step on, one rank's disk is full."""

    def on_train_batch_start(self, batch: Any, index: int) -> None:
        if self.global_step == STEP and self.global_rank == 1:
            os.fsync = no_space


def no_space(file: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def train_until_the_disk_fails(directory: str) -> tuple[str, int | None, str, list[str], int]:
    fsync = os.fsync
    callback = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=1, save_last="link")
    options: dict[str, Any] = {"limit_val_batches": 0, "enable_checkpointing": True}
    with pytest.raises(OSError) as raised:
        tiny.trainer({}, max_steps=6, callbacks=[callback], **options).fit(DiskFails(), tiny.loader())
    dist.barrier()  # rank 0 has removed what it began
    names = sorted(os.listdir(directory))
    os.fsync = fsync
    dist.barrier()
    callback = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=1, save_last="link")
    again = tiny.trainer({}, max_steps=6, callbacks=[callback], **options)
    again.fit(module := tiny.TinyLM(), tiny.loader(), ckpt_path="last")
    return type(raised.value).__name__, raised.value.errno, str(raised.value), names, len(module.losses)


@pytest.mark.slow
def test_a_disk_that_fails_one_rank_ends_training_on_all_and_the_run_goes_on_from_before(tmp_path: Path) -> None:
    for kind, code, message, names, steps in run_ranks(2, train_until_the_disk_fails, str(tmp_path)):
        assert (kind, code) == ("OSError", errno.ENOSPC)
        assert "rank 1 failed while saving" in message and str(tmp_path) in message
        assert names == ["epoch=0-step=2.ckpt", "last.ckpt"]
        assert steps == 4
    assert {"epoch=0-step=6.ckpt", "last.ckpt"} <= set(os.listdir(tmp_path))
