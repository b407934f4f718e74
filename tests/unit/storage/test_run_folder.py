"""The small files beside the checkpoints of a run: what is evaluated stays, and what was to be deleted goes."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import pytest
import torch

from lightning_shardckpt import ShardCkptIO, save
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.storage.run_folder import EVALUATIONS, RunFolder
from lightning_shardckpt.tools.verify import verify


@pytest.fixture(params=["local", "memory"])
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder with the checkpoints "1", "2" and "3"."""
    folder = str(tmp_path) if request.param == "local" else f"memory://bucket/{uuid.uuid4().hex}"
    for name in ("1", "2", "3"):
        saved(folder, name)
    return folder


def saved(run_dir: str, name: str) -> None:
    save(f"{run_dir}/{name}", {"model": {"w": torch.zeros(3)}, "step": int(name)}, overwrite=True)


def folder_of(run_dir: str) -> RunFolder:
    return RunFolder(run_dir, StorageRouter())


def names(run_dir: str) -> list[str]:
    return sorted(path.rpartition("/")[2] for path in folder_of(run_dir).list_complete())


def remove(run_dir: str, name: str) -> None:
    ShardCkptIO().remove_checkpoint(f"{run_dir}/{name}")


def test_what_is_evaluated_is_deleted_by_the_next_deletion_after_it(run_dir: str) -> None:
    folder = folder_of(run_dir)
    folder.set_follower("another", "1")
    remove(run_dir, "1")
    remove(run_dir, "2")
    assert names(run_dir) == ["1", "3"] and not verify(f"{run_dir}/1").findings
    folder.set_follower("another", "1", hold_s=-1)  # it has not renewed its entry
    remove(run_dir, "3")
    assert names(run_dir) == []


def test_the_follower_deletes_what_was_evaluated_after_the_training(run_dir: str) -> None:
    folder = folder_of(run_dir)
    folder.set_follower("another", "1")
    remove(run_dir, "1")
    folder.set_follower("another", "2")
    assert folder.is_requested(f"{run_dir}/1") and folder.remove_requested() == []
    assert names(run_dir) == ["2", "3"] and not folder.is_requested(f"{run_dir}/1")


def test_a_checkpoint_that_was_saved_after_the_deletion_stays(run_dir: str) -> None:
    folder = folder_of(run_dir)
    folder.set_follower("another", "1")
    remove(run_dir, "1")
    saved(run_dir, "1")
    folder.set_follower(None)
    assert folder.remove_requested() == [] and names(run_dir) == ["1", "2", "3"]


def test_a_request_that_was_written_by_hand_deletes_nothing_outside(tmp_path: Path) -> None:
    saved(str(tmp_path), "1")
    folder = folder_of(str(tmp_path / "run"))
    folder.set_ended(True)
    (tmp_path / "run" / ".follow" / "remove-1").write_text(json.dumps({"checkpoint": "../1", "root": ""}))
    (tmp_path / "run" / ".follow" / "remove-2").write_text("{}")
    folder.remove_requested()
    assert names(str(tmp_path)) == ["1"]


def test_evaluations_are_added_to_earlier_ones_and_lines_of_others_are_skipped(run_dir: str) -> None:
    folder, first, second = folder_of(run_dir), {"save_id": "1", "metrics": {"ä": 1.5}}, {"save_id": "2"}
    folder.add_lines(EVALUATIONS, [first])
    lines, path = json.dumps(first) + '\n{"save_id": "cut\n[]\n', f"{run_dir}/evaluations.jsonl"
    if "://" in run_dir:
        StorageRouter().objects(run_dir).upload(path, [lines.encode()])
    else:
        Path(path).write_text(lines)
    folder_of(run_dir).add_lines(EVALUATIONS, [second, second])
    assert folder.evaluations() == [first, second, second]


def test_a_run_has_ended_until_it_goes_on(run_dir: str) -> None:
    folder = folder_of(run_dir)
    for ended in (False, True, False):
        folder.set_ended(ended)
        assert folder.has_ended() is ended and not folder.is_followed()
