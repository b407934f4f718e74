"""SIGTERM on one rank or on all: a checkpoint at a step boundary, and the same end on every rank.

That such runs continue exactly is in the table of test_resume.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.sources.open_source import open_checkpoint
from lightning_shardckpt.system.host import TUNING
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.pool import run_ranks


class Terminate(pl.Callback):  # sends SIGTERM to some ranks' own process in the middle of a step
    def __init__(self, ranks: list[int], step: int) -> None:
        self._ranks, self._step = ranks, step

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self._step and trainer.global_rank in self._ranks:
            os.kill(os.getpid(), signal.SIGTERM)


def meet_seldom(ranks: list[int], step: int) -> int:
    tuning = replace(TUNING, agreement_s=60.0, agreement_batches=8)  # after 1, 2, 4, 8, 8 … batches
    run = tiny.trainer({}, tuning, max_steps=40, limit_val_batches=0, callbacks=[Terminate(ranks, step)])
    with pytest.raises(SystemExit):
        run.fit(tiny.TinyLM(), tiny.loader())
    return run.global_step


def test_ranks_that_meet_seldom_end_at_the_next_meeting() -> None:
    assert run_ranks(2, meet_seldom, [1], 17) == [24] * 2  # of batches 0, 1, 3, 7, 15, 23, …


HOOKS = [
    *("on_train_batch_start", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_train_batch_end", "on_save_checkpoint"),
]


class TerminateSomewhere(pl.Callback):  # sends SIGTERM once, to some ranks' own process, in a hook at or after a step
    def __init__(self, ranks: list[int], step: int, hook: str) -> None:
        self._ranks, self._step, self._left = ranks, step, True
        setattr(self, hook, self._reached)

    def _reached(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._left and trainer.global_step >= self._step:
            self._left = False
            if trainer.global_rank in self._ranks:
                os.kill(os.getpid(), signal.SIGTERM)


def terminated_often(directory: str, numbers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Step of the signal, of the end and of the checkpoint, for some of 36 runs.

    In these, each hook meets each step, and each kind of save on each choice of ranks.
    """
    found = []
    for number in numbers:
        turn, place = divmod(number, len(HOOKS))
        ranks, step, hook = [[0], [1], [0, 1]][(turn + place // 2) % 3], (turn + place) % 6, HOOKS[place]
        folder, io = f"{directory}/{number}", ShardCkptIO(use_async=(turn + place // 3) % 2 == 1)
        keeps = ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1)
        callbacks = [TerminateSomewhere(ranks, step, hook), keeps, OnExceptionCheckpoint(folder, "ended")]
        options: dict[str, Any] = {"limit_val_batches": 0, "callbacks": callbacks, "plugins": [io]}
        patient = replace(TUNING, exception_agreement_s=60.0, agreement_s=0.0)  # a rank may be behind on a busy machine
        run = tiny.trainer({}, patient, max_steps=12, enable_checkpointing=True, **options)
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(SystemExit):
            run.fit(tiny.TinyLM(), tiny.loader())
        assert signal.getsignal(signal.SIGTERM) == before
        dist.barrier()
        assert verify(f"{folder}/ended.ckpt").findings == ()
        with open_checkpoint(f"{folder}/ended.ckpt") as checkpoint:
            assert checkpoint.root.step is not None
            found.append((step, run.global_step, checkpoint.root.step))
    return found


def test_wherever_the_signal_comes_all_ranks_end_at_one_step_with_a_whole_checkpoint(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(2, terminated_often, str(tmp_path), range(4), timeout_s=300)
    assert first == second and len(first) == 4
    assert all(at == saved and sent <= at <= sent + 3 for sent, at, saved in first)
