"""What ``ckpt_path="last"`` finds, and whether the disk is asked before training starts."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shardckpt import ShardedStrategy
from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.checkpoint import save
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.strategy.ckpt_path import find_last
from tests.support import tiny
from tests.support.pool import run_ranks


def saved(path: Path, step: int, *, weights_only: bool = False) -> str:
    content: dict[str, Any] = {"state_dict": {"a": torch.full((3,), float(step))}, "global_step": step}
    if not weights_only:
        content["optimizer_states"] = [{"state": {}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}]
    save(str(path), lambda: snapshot(content), SaveGroup(), run=RunInfo(step))
    return str(path)


def trainer(*callbacks: pl.Callback) -> pl.Trainer:
    options: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "strategy": ShardedStrategy()}
    found = pl.Trainer(accelerator="cpu", devices=1, callbacks=list(callbacks), **options)
    found.state.fn = TrainerFn.FITTING
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def keeper(folder: Path) -> pl.Trainer:
    return trainer(ModelCheckpoint(folder))


def unfinished(path: Path) -> str:
    saved(path, 1000)
    (path / ROOT_NAME).unlink()
    return str(path)


def test_last_is_the_newest_by_step_whatever_the_clock_says(folder: Path, keeper: pl.Trainer) -> None:
    paths = [saved(folder / f"epoch=0-step={step}.ckpt", step) for step in (9, 30, 100)]
    for day, path in enumerate(paths):
        os.utime(path, (10**9 - day * 86400,) * 2)
    os.symlink("epoch=0-step=9.ckpt", folder / "last.ckpt")  # a link counts as what it names
    assert find_last(keeper) == paths[2]
    os.symlink("epoch=0-step=100.ckpt", folder / "last-v1.ckpt")
    assert find_last(keeper) == str(folder / "last-v1.ckpt")


def test_what_is_incomplete_damaged_or_gone_is_passed_over_with_the_reason(folder: Path, keeper: pl.Trainer) -> None:
    good = saved(folder / "a.ckpt", 10)
    half, bad, odd = unfinished(folder / "b.ckpt"), saved(folder / "c.ckpt", 30), folder / "d.ckpt"
    root = bytearray((folder / "c.ckpt" / ROOT_NAME).read_bytes())
    root[-5] ^= 1
    (folder / "c.ckpt" / ROOT_NAME).write_bytes(root)
    odd.write_bytes(b"no checkpoint")
    light = saved(folder / "e.ckpt", 40, weights_only=True)
    os.symlink("gone.ckpt", folder / "last.ckpt")
    with pytest.warns(UserWarning, match="skips checkpoints that are not complete") as said:
        assert find_last(keeper) == good
    expected = (half, "no checkpoint.index.json", bad, "damaged", str(odd), "last.ckpt'", light)
    assert all(text in str(said[0].message) for text in (*expected, "it holds weights only"))
    keeper.state.fn = TrainerFn.VALIDATING
    with pytest.warns(UserWarning, match="skips checkpoints that are not complete"):
        assert find_last(keeper) == light


def test_a_requeued_job_and_a_path_that_was_set_come_before_an_implied_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = trainer(ModelCheckpoint(folder), OnExceptionCheckpoint(tmp_path))
    ended = saved(tmp_path / "on_exception.ckpt", 15)
    assert find_last(keeper, None) == ended
    saved(folder / "epoch=3.ckpt", 100)
    assert find_last(keeper, None) == ended  # only what Lightning would look at
    saved(folder / "last.ckpt", 90)
    assert find_last(keeper, None) == str(folder / "last.ckpt")
    keeper.ckpt_path = "other.ckpt"
    assert find_last(keeper, None) is None
    keeper.ckpt_path = None
    monkeypatch.setattr(SLURMEnvironment, "detect", lambda: True)
    (tmp_path / "hpc_ckpt_1.ckpt").touch()
    monkeypatch.setattr(type(keeper), "default_root_dir", str(tmp_path))
    assert find_last(keeper, None) is None  # Lightning finds it


def test_if_nothing_is_complete_it_is_an_error_and_no_new_beginning(folder: Path, keeper: pl.Trainer) -> None:
    half, other = unfinished(folder / "b.ckpt"), folder / "pretrained.ckpt"
    torch.save({"weights": torch.ones(3)}, other)  # of another program: Lightning would resume from it
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint is complete") as raised:
        find_last(keeper)
    assert half in str(raised.value) and str(other) in str(raised.value)


def test_the_first_run_of_all_starts_from_the_beginning(folder: Path, keeper: pl.Trainer) -> None:
    assert find_last(keeper) is None
    (folder / ".old-logs").mkdir(parents=True)
    assert find_last(keeper) is None
    assert find_last(keeper, None) is None
    assert find_last(keeper, "a/path.ckpt") is None


def run(directory: str, steps: int, resume: str | None, each_own: bool) -> tuple[int, list[str]]:
    if each_own and os.environ["RANK"] == "1":
        directory += "-of-rank-1"
    callback = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, save_last="link")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        options: dict[str, Any] = {"callbacks": [callback], "enable_checkpointing": True}
        tiny.train(module := tiny.TinyLM(), {}, steps, resume=resume, **options)
    return len(module.losses), [str(w.message) for w in said]


def test_all_ranks_go_on_from_the_newest_whole_checkpoint_that_rank_0_finds(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, run, str(folder), 4, None, False)
    (folder / "epoch=0-step=4.ckpt" / ROOT_NAME).unlink()
    found = run_ranks(2, run, str(folder), 5, "last", True)
    assert [losses for losses, _ in found] == [3, 3]
    assert any("step=4.ckpt" in line and "skips checkpoints" in line for line in found[0][1])
