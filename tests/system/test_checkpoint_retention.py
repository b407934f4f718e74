"""``CheckpointRetention``: what no rule keeps is deleted, and nothing else. Oracle: the rules by brute force."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from lightning_shardckpt import CheckpointRetention, ShardCkptIO
from lightning_shardckpt.callbacks import SavedCheckpoint
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local.local_storage import LocalStorage
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.pool import run_ranks

HOUR_S, DAY_S = 3600, 86400
MONDAY_S = 1_700_000_000 // DAY_S * DAY_S  # midnight


def after_each_save(rules: CheckpointRetention, count: int, every_s: float) -> list[SavedCheckpoint]:
    """What is left of a run whose clock goes on by so many seconds from one save to the next."""
    there: list[SavedCheckpoint] = []
    for step in range(1, count + 1):
        there.append(SavedCheckpoint(f"{step}.ckpt", step, MONDAY_S + step * every_s))
        gone = rules.select_expired(there)
        assert there[-1] not in gone
        there = [one for one in there if one not in gone]
    return there


def test_a_ladder_of_hours_and_days_is_left_of_a_run_of_days() -> None:
    """A save every ten minutes for four days and half an hour."""
    left = after_each_save(CheckpointRetention(last=3, hourly=5, daily=7), 4 * 144 + 3, 600)
    minutes = [round((one.saved_at_s - MONDAY_S) / 60) for one in left]
    days = [day * 1440 - 10 for day in (1, 2, 3, 4)]
    hours = [4 * 1440 - 10 - 60 * n for n in (3, 2, 1)]
    newest = [4 * 1440 + n for n in (10, 20, 30)]
    assert minutes == sorted({*days, *hours, *newest})


def test_every_nth_step_and_the_last_ones_are_left() -> None:
    left = after_each_save(CheckpointRetention(last=2, every_n_steps=10), 47, 60)
    assert [one.step for one in left] == [10, 20, 30, 40, 46, 47]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_superfluous_is_kept_by_no_rule(seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randrange(60)
    times = [draw.uniform(0, 9 * DAY_S) for _ in range(count)]
    found = [SavedCheckpoint(f"{n}", draw.randrange(300), MONDAY_S + at) for n, at in enumerate(times)]
    last, every = draw.randint(1, 5), draw.choice([None, 7])
    hourly, daily = draw.choice([-1, 0, 4]), draw.randint(-1, 3)
    protected = {one.path for one in found if draw.random() < 0.1}
    gone = CheckpointRetention(last, every, hourly, daily).select_expired(found, protected)

    def is_last_of(one: SavedCheckpoint, period_s: int, most: int) -> bool:
        number = one.saved_at_s // period_s
        later = {int(other.saved_at_s // period_s) for other in found if other.saved_at_s > one.saved_at_s}
        return number not in later and (most == -1 or len(later) < most)

    for one in found:
        newer = sum(other.saved_at_s > one.saved_at_s for other in found)
        kept = newer < last or one.path in protected or (every is not None and one.step % every == 0)
        kept = kept or is_last_of(one, HOUR_S, hourly) or is_last_of(one, DAY_S, daily)
        assert (one not in gone) == kept


@pytest.mark.parametrize("wrong", [{"last": 0}, {"every_n_steps": 0}, {"hourly": -2}, {"daily": -2}])
def test_a_rule_that_cannot_be_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CheckpointRetention(**wrong)


def fit(folder: str, steps: int, rules: dict[str, Any], *, io: ShardCkptIO | None = None, **more: Any) -> pl.Trainer:
    resume = more.pop("resume", None)
    saving = {"save_top_k": -1, "every_n_train_steps": 1, **more}
    callbacks = [CheckpointRetention(**rules), ModelCheckpoint(folder, "{step}", **saving)]
    trainer = tiny.trainer(
        {}, max_steps=steps, limit_val_batches=0, callbacks=callbacks, enable_checkpointing=True,
        plugins=[io or ShardCkptIO()],
    )  # fmt: skip
    pl.seed_everything(1)
    trainer.fit(tiny.TinyLM(), tiny.loader(), ckpt_path=resume)
    return trainer


def names(folder: Path | str) -> set[str]:
    return set(os.listdir(folder))


def trained(folder: str, options: dict[str, Any]) -> tuple[set[str], str]:
    trainer = fit(folder, 7, {"last": 2, "every_n_steps": 3}, io=ShardCkptIO(**options), monitor="loss", mode="max")
    return names(folder), os.path.basename(trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "options",
    [pytest.param({}, marks=pytest.mark.sweep), {"use_async": True, "max_pending": 7}],
    ids=["", "asynchronous"],
)
def test_a_run_keeps_what_the_rules_say_and_its_best(tmp_path: Path, options: dict[str, Any]) -> None:
    (found, best), _ = run_ranks(2, trained, str(tmp_path), options)
    assert found == {*(f"step={n}.ckpt" for n in (3, 6, 7)), best}
    assert all(verify(tmp_path / name).findings == () for name in found)


def resumed(folder: str) -> set[str]:
    """A run with a ladder in a directory that has a past, and things that are nobody's to delete."""
    fit(folder, 1, {})
    first = f"{folder}/step=1.ckpt"
    noon = MONDAY_S + DAY_S / 2
    for name, at in {"a": noon - 1, "b": noon, "c": noon + 4 * DAY_S - 1, "d": noon + 4 * DAY_S, "e": noon - 2}.items():
        path = f"{folder}/{name}.ckpt"
        shutil.copytree(first, path)
        os.utime(f"{path}/{ROOT_NAME}", (at, at))
    os.mkdir(f"{folder}/unfinished.ckpt")
    Path(folder, "plain.ckpt").write_bytes(b"of another program")
    os.symlink(f"{folder}/e.ckpt", f"{folder}/name.ckpt")
    with_reader = LocalStorage().open(f"{folder}/a.ckpt")
    fit(folder, 3, {"last": 1, "daily": -1}, resume=first, save_last="link")
    size = with_reader.size("model-meta-dist-00000.index.json")
    with_reader.read_into("model-meta-dist-00000.index.json", 0, memoryview(bytearray(size)))
    with_reader.close()
    return {name for name in names(folder) if not name.startswith(".tmp-")}


def test_checkpoints_of_earlier_runs_follow_the_rules_and_nothing_else_is_touched(tmp_path: Path) -> None:
    (found,) = run_ranks(1, resumed, str(tmp_path))
    kept = {"b.ckpt", "d.ckpt", "step=3.ckpt"}
    protected = {"step=1.ckpt", "last.ckpt", "name.ckpt", "e.ckpt", "unfinished.ckpt", "plain.ckpt"}
    assert found - {"step=2.ckpt"} == kept | protected  # which stays if the day ends just after it


def refused() -> list[str]:
    found = []
    for options in ({"plugins": []}, {"callbacks": [ModelCheckpoint("memory://x", save_top_k=-1)]}):
        callbacks = [CheckpointRetention(), *options.pop("callbacks", [])]
        trainer = tiny.trainer("auto", max_steps=1, callbacks=callbacks, enable_checkpointing=True, **options)
        with pytest.raises((TypeError, MisconfigurationException)) as error:
            trainer.fit(tiny.TinyLM(), tiny.loader())
        found.append(str(error.value))
    return found


def test_what_it_cannot_do_is_refused() -> None:
    (words,) = run_ranks(1, refused)
    assert "deletes checkpoints of ShardCkptIO" in words[0] and "memory://x" in words[1]


def test_it_is_configured_by_yaml() -> None:
    parser = ArgumentParser()
    parser.add_argument("--callbacks", type=list[Callback])
    given = "[{class_path: lightning_shardckpt.CheckpointRetention, init_args: {last: 3, hourly: 24, daily: 7}}]"
    (found,) = parser.instantiate(parser.parse_args(["--callbacks", given])).callbacks
    assert (found.last, found.every_n_steps, found.hourly, found.daily) == (3, None, 24, 7)
