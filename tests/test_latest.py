"""What ``ckpt_path="last"`` and ``"best"`` find, and whether the disk is asked before training starts."""

from __future__ import annotations

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from lightning_shardckpt import preflight
from lightning_shardckpt.checkpoint import save
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.index import ROOT_NAME
from lightning_shardckpt.latest import resolved
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.saving import About
from lightning_shardckpt.state.trainer import snapshot
from tests import tiny
from tests.pool import run_ranks


def saved(path: Path, step: int) -> str:
    content = {"state_dict": {"a": torch.full((3,), float(step))}, "global_step": step}
    save(str(path), lambda: snapshot(content), ranks=Ranks.alone(), about=About(step), size_per_shard=1)
    return str(path)


def trainer(*callbacks: pl.Callback) -> pl.Trainer:
    found = pl.Trainer(accelerator="cpu", logger=False, callbacks=list(callbacks), enable_progress_bar=False)
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
    assert resolved(keeper, "last") == paths[2]


def test_a_link_counts_as_what_it_names(folder: Path, keeper: pl.Trainer) -> None:
    newest = saved(folder / "b.ckpt", 20)
    saved(folder / "a.ckpt", 10)
    os.symlink("a.ckpt", folder / "last.ckpt")
    assert resolved(keeper, "last") == newest


def test_what_is_incomplete_damaged_or_gone_is_passed_over_with_the_reason(folder: Path, keeper: pl.Trainer) -> None:
    good = saved(folder / "a.ckpt", 10)
    half, bad, odd = unfinished(folder / "b.ckpt"), saved(folder / "c.ckpt", 30), folder / "d.ckpt"
    root = bytearray((folder / "c.ckpt" / ROOT_NAME).read_bytes())
    root[-5] ^= 1
    (folder / "c.ckpt" / ROOT_NAME).write_bytes(root)
    odd.write_bytes(b"no checkpoint")
    os.symlink("gone.ckpt", folder / "last.ckpt")
    with pytest.warns(UserWarning, match="passes over") as said:
        assert resolved(keeper, "last") == good
    for text in (half, "no checkpoint.index.json", bad, "damaged", str(odd), "last.ckpt': a link to nothing"):
        assert text in str(said[0].message)


def test_if_nothing_is_complete_it_is_an_error_and_no_new_beginning(folder: Path, keeper: pl.Trainer) -> None:
    half = unfinished(folder / "b.ckpt")
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint is complete") as raised:
        resolved(keeper, "last")
    assert half in str(raised.value)


def test_the_first_run_of_all_starts_from_the_beginning(folder: Path, keeper: pl.Trainer) -> None:
    assert resolved(keeper, "last") == "last"  # which Lightning turns into a warning
    folder.mkdir()
    assert resolved(keeper, "last") == "last"
    assert resolved(keeper, None) is None
    assert resolved(keeper, "a/path.ckpt") == "a/path.ckpt"


def test_one_that_an_interrupted_save_moved_aside_counts(folder: Path, keeper: pl.Trainer) -> None:
    saved(folder / "a.ckpt", 10)
    aside = saved(folder / ".old-0123456789abcdef", 20)
    assert resolved(keeper, "last") == aside


def test_a_plain_file_of_lightning_counts_by_its_step(folder: Path, keeper: pl.Trainer) -> None:
    saved(folder / "a.ckpt", 10)
    torch.save({"state_dict": {}, "global_step": 20}, folder / "last.ckpt")
    assert resolved(keeper, "last") == str(folder / "last.ckpt")


def test_a_checkpoint_behind_an_exception_counts_without_being_asked_for(folder: Path, tmp_path: Path) -> None:
    keeper = trainer(ModelCheckpoint(folder), OnExceptionCheckpoint(tmp_path))
    saved(folder / "a.ckpt", 10)
    ended = saved(tmp_path / "on_exception.ckpt", 15)
    assert resolved(keeper, None) == resolved(keeper, "last") == ended
    keeper.state.fn = TrainerFn.VALIDATING
    assert resolved(keeper, None) is None


@pytest.mark.parametrize(("mode", "expected"), [("min", "b"), ("max", "c")])
def test_best_is_the_best_one_that_is_complete(mode: str, expected: str, folder: Path) -> None:
    callback = ModelCheckpoint(folder, monitor="x", mode=mode, save_top_k=3)
    paths = {name: saved(folder / f"{name}.ckpt", 1) for name in "abc"}
    scores = {"min": (1.0, 2.0, 3.0), "max": (3.0, 1.0, 2.0)}[mode]
    callback.best_k_models = {path: torch.tensor(s) for path, s in zip(paths.values(), scores, strict=True)}
    callback.best_model_path = paths["a"]
    assert resolved(trainer(callback), "best") == paths["a"]
    shutil.rmtree(paths["a"])
    with pytest.warns(UserWarning, match="nothing at this path"):
        assert resolved(trainer(callback), "best") == paths[expected]


# ── with a Trainer on several ranks ───────────────────────────────────────────────────────────────────────────────


def run(directory: str, steps: int, resume: str | None, each_own: bool) -> tuple[int, list[str]]:
    if each_own and os.environ["RANK"] == "1":
        directory += "-of-rank-1"
    callback = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, save_last="link")
    module = tiny.TinyLM()
    fits = tiny.trainer({}, max_steps=steps, limit_val_batches=0, callbacks=[callback], enable_checkpointing=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        fits.fit(module, tiny.loader(), ckpt_path=resume)
    return len(module.losses), [str(w.message) for w in said]


def test_a_run_that_lost_its_link_and_its_newest_save_goes_on_from_the_one_before(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, run, str(folder), 6, None, False)
    (folder / "epoch=0-step=6.ckpt" / ROOT_NAME).unlink()
    found = run_ranks(2, run, str(folder), 8, "last", False)
    assert [losses for losses, _ in found] == [4, 4]
    assert any("step=6.ckpt" in line and "passes over" in line for line in found[0][1])


def test_ranks_that_see_different_last_checkpoints_all_raise(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(2, run, str(folder), 2, None, False)
    for outcome in run_ranks(2, run, str(folder), 4, "last", True, expect_errors=True, grace_s=30):
        assert outcome.error.type.endswith("MismatchError")
        assert "rank 0" in outcome.error.message and "rank 1" in outcome.error.message


# ── room ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def free_bytes(path: Path) -> int:
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def test_room_for_what_is_kept_is_asked_of_the_real_disk(tmp_path: Path) -> None:
    third = free_bytes(tmp_path) // 3
    keeps_five = ModelCheckpoint(tmp_path / "not" / "yet", monitor="x", save_top_k=5)
    preflight.check_room([keeps_five], third // 3)
    with pytest.warns(UserWarning, match="keeps up to 5 checkpoints of at least .* GB each"):
        preflight.check_room([keeps_five], third)
    with pytest.raises(OSError, match=r"No space|one checkpoint of this model takes at least") as raised:
        preflight.check_room([keeps_five], 4 * third)
    assert raised.value.errno == 28 and str(tmp_path) in str(raised.value)
    preflight.check_room([ModelCheckpoint(tmp_path, save_top_k=0)], 4 * third)


def test_checkpoints_that_are_there_need_no_more_room(tmp_path: Path) -> None:
    keeps_two = ModelCheckpoint(tmp_path, monitor="x", save_top_k=2)
    share = int(free_bytes(tmp_path) / 2.5)
    with pytest.warns(UserWarning, match="keeps up to 2"):
        preflight.check_room([keeps_two], share)
    saved(tmp_path / "a.ckpt", 1)
    preflight.check_room([keeps_two], share)


@pytest.mark.parametrize(
    ("kind", "options", "copies"),
    [("AdamW", {}, 3), ("Adam", {}, 3), ("SGD", {}, 1), ("SGD", {"momentum": 0.9}, 2), ("Adagrad", {}, 2)],
)
def test_the_least_size_of_a_checkpoint_is_what_it_takes(kind: str, options: dict[str, Any], copies: int) -> None:
    weight = torch.nn.Parameter(torch.ones(10, 7))
    optimizer = getattr(torch.optim, kind)([weight], lr=0.1, **options)
    estimate = preflight.state_bytes([weight], [optimizer])
    weight.grad = torch.ones(10, 7)
    optimizer.step()
    tensors = [t for t in optimizer.state[weight].values() if isinstance(t, torch.Tensor) and t.ndim]
    assert estimate == 280 * (1 + len(tensors)) == 280 * copies


def too_large(directory: str) -> None:
    real = os.statvfs

    def nearly_full(path: Any) -> Any:
        found = list(real(path))
        found[4] = 1  # free blocks
        return os.statvfs_result(found)

    os.statvfs = nearly_full
    callback = ModelCheckpoint(directory)
    fits = tiny.trainer({"pipeline_parallel_size": 2}, max_steps=1, callbacks=[callback], enable_checkpointing=True)
    fits.fit(tiny.TinyLM(), tiny.loader())


def test_a_run_whose_checkpoints_cannot_fit_does_not_start(tmp_path: Path) -> None:
    for outcome in run_ranks(2, too_large, str(tmp_path), expect_errors=True, grace_s=30):
        assert outcome.error.type == "OSError"
        assert "one checkpoint of this model takes at least" in outcome.error.message
