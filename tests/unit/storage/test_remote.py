"""Checkpoints in stores: who wins, what is left and cleaned up, what a copy elsewhere is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import lightning_shardckpt
from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.save_job import RunInfo, SaveOptions
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.index import ROOT_NAME, RootIndex, root_from_json, root_to_json
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.object_store import machine_upload_lock
from lightning_shardckpt.storage.protocol import Draft
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.strategy.ckpt_path import resolve_ckpt_path
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.verify import verify
from tests.support.stores import IMPATIENT, Bucket
from tests.system.test_ckpt_path import trainer
from tests.unit.storage.test_storage import ID, OTHER_ID, THIRD_ID, root_of

OPTIMIZERS = [{"state": {}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}]


@pytest.fixture
def storage(s3: Bucket) -> StorageRouter:
    return StorageRouter(storage_options=s3.options, tuning=IMPATIENT)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Of a place in memory that nobody else has."""
    return f"memory:/{tmp_path}/a.ckpt"


def save(url: str, value: float, step: int = 1, **options: Any) -> list[str]:
    state = {"state_dict": {"a": torch.full((5_000,), value)}, "optimizer_states": OPTIMIZERS, "global_step": step}
    common: dict[str, Any] = {"ranks": Ranks.alone(), "run": RunInfo(step), "options": SaveOptions(1), **options}
    return checkpoint.save(url, lambda: snapshot(state), **common)


def load(url: str, **options: Any) -> float:
    return float(checkpoint.load_full(url, **options)["state_dict"]["a"].unique())


def draft(storage: StorageRouter, url: str, save_id: str, **files: bytes) -> Draft:
    """A save that is ready to be published."""
    found = storage.draft(url, save_id)
    found.begin()
    for name, content in {**files, ROOT_NAME: root_of(save_id, found.prefix)}.items():
        found.write(name, [content])
    return found


@pytest.mark.slow
def test_of_two_saves_to_one_path_the_first_one_wins_and_the_other_is_told(storage: StorageRouter, s3: Bucket) -> None:
    url = s3.url("a.ckpt")
    for before in (None, THIRD_ID):
        if before is not None:
            draft(storage, url, before).publish()
        first, second = draft(storage, url, ID, a=b"1"), draft(storage, url, OTHER_ID, a=b"2", b=b"2")
        first.publish()
        with pytest.raises(FileExistsError, match=r"another process saved to .*a\.ckpt.*let each job save to paths"):
            second.publish()
        second.discard()
        assert s3.listed() == [f"a.ckpt/{ID[:16]}-a", f"a.ckpt/{ROOT_NAME}"]
        storage.remove(url)
        assert s3.listed() == []


def test_a_save_whose_files_another_one_deleted_is_not_committed(storage: StorageRouter, s3: Bucket) -> None:
    """Nothing was there when it began, and nothing is there when it ends: the condition alone would hold."""
    url = s3.url("a.ckpt")
    first, second = draft(storage, url, ID, a=b"1"), draft(storage, url, OTHER_ID)
    second.publish()
    storage.remove(url)
    with pytest.raises(FileExistsError, match="since this save began, and deleted a of this save"):
        first.publish()
    first.discard()
    assert s3.listed() == []


def test_what_a_killed_save_left_is_invisible_and_removed_by_the_next_one(storage: StorageRouter, s3: Bucket) -> None:
    url, dead = s3.url("runs", "a.ckpt"), THIRD_ID[:16]
    s3.put(f"runs/a.ckpt/{dead}-model-dist-00000-shard-00001.safetensors", b"x" * 2048)
    s3.put(f"runs/b.ckpt/{dead}-of-somebody-else")
    with pytest.raises(CheckpointNotFoundError, match=rf"it has no {ROOT_NAME}"):
        storage.open(url)
    notes = save(url, 1.0, storage=storage)
    assert notes == [f"removed the leftover of an unfinished save at {url!r}: 1 file, 2.00 KiB"]
    assert load(url, storage=storage) == 1.0
    assert [key for key in s3.listed() if dead in key] == [f"runs/b.ckpt/{dead}-of-somebody-else"]


@pytest.mark.parametrize("what", ["an object", "objects of somebody"])
def test_what_is_not_ours_is_never_replaced(what: str, storage: StorageRouter, s3: Bucket) -> None:
    key = "a.ckpt" if what == "an object" else "a.ckpt/thesis.tex"
    s3.put(key, b"x")
    with pytest.raises(FileExistsError, match=r"a\.ckpt.*use another path"):
        save(s3.url("a.ckpt"), 1.0, storage=storage)
    with pytest.raises(CheckpointNotFoundError):
        storage.remove(s3.url("a.ckpt"))
    assert s3.listed() == [key]


def test_what_lies_beside_and_below_a_checkpoint_stays(storage: StorageRouter, s3: Bucket) -> None:
    draft(storage, s3.url("run"), ID, a=b"1").publish()
    draft(storage, s3.url("run/epoch=1.ckpt"), THIRD_ID, a=b"1").publish()
    s3.put("run/config.yaml")
    others = {f"run/epoch=1.ckpt/{THIRD_ID[:16]}-a", f"run/epoch=1.ckpt/{ROOT_NAME}", "run/config.yaml"}
    draft(storage, s3.url("run"), OTHER_ID, a=b"2").publish()
    assert set(s3.listed()) == others | {f"run/{OTHER_ID[:16]}-a", f"run/{ROOT_NAME}"}
    storage.remove(s3.url("run"))
    assert set(s3.listed()) == others


def test_a_copy_in_a_directory_is_a_checkpoint_and_so_is_one_that_was_uploaded(url: str, tmp_path: Path) -> None:
    save(url, 1.0)
    fs = fsspec.filesystem("memory")
    fs.get(url, str(tmp_path / "down.ckpt"), recursive=True)
    down = str(tmp_path / "down.ckpt")
    assert load(down) == 1.0
    assert verify(down).findings == verify(url).findings == ()
    assert inspect(down)["files"] == inspect(url)["files"]

    save(str(tmp_path / "b.ckpt"), 2.0)
    fs.put(str(tmp_path / "b.ckpt"), f"{url}2", recursive=True)
    assert load(f"{url}2") == 2.0
    save(f"{url}2", 3.0)  # replaces files that have no prefix
    assert load(f"{url}2") == 3.0
    assert verify(f"{url}2").findings == ()
    save(down, 4.0)
    assert load(down) == 4.0
    assert not any(name.startswith("0") for name in os.listdir(down) if ROOT_NAME in name)


def test_the_prefix_of_a_root_index_is_of_its_save_id() -> None:
    root = RootIndex(ID, 1, {}, {}, prefix=f"{ID[:16]}-")
    assert root_from_json(root_to_json(root), "here") == root
    for wrong in ("../", f"{OTHER_ID[:16]}-", ID[:16], "/"):
        with pytest.raises(FormatError, match="prefix"):
            root_from_json(root_to_json(RootIndex(ID, 1, {}, {}, prefix=wrong)), "here")


@pytest.mark.parametrize("name", ["a.ckpt", "hub/model.safetensors"])
def test_what_another_program_wrote_is_refused_with_what_to_do(url: str, name: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/{name}", b"x")
    place = f"{url}/{name}" if name == "a.ckpt" else f"{url}/hub"
    for read in (lightning_shardckpt.load, lightning_shardckpt.metadata):
        with pytest.raises(CheckpointNotFoundError, match="can't be read at a URL: download it first"):
            read(place)


def test_a_download_is_kept_and_used_again(url: str, tmp_path: Path) -> None:
    cached = StorageRouter(pre_download=tmp_path / "cache")
    save(url, 1.0)
    assert load(url, storage=cached) == 1.0
    fs = fsspec.filesystem("memory")
    (shard,) = [name for name in fs.find(url) if name.endswith("model-dist-00000-shard-00001.safetensors")]
    good = fs.cat_file(shard)
    fs.pipe_file(shard, bytes(len(good)))
    assert load(url, storage=cached) == 1.0  # nothing was read again but the root index
    save(url, 2.0)
    assert load(url, storage=cached) == 2.0
    folders = list((tmp_path / "cache").iterdir())
    assert len(folders) == 2 and all(len(list(f.iterdir())) >= 2 for f in folders)


UPLOAD = """
import os, sys
from lightning_shardckpt.storage.object_store import machine_upload_lock
for i in range(50):
    with machine_upload_lock():
        os.mkdir("inside")
        os.rmdir("inside")
        open(f"{sys.argv[1]}-{i}", "x").close()
"""


def test_processes_of_a_machine_take_turns(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UPLOAD]
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    others = [subprocess.Popen([*command, str(number)], cwd=tmp_path, env=env) for number in range(2)]
    assert [other.wait(60) for other in others] == [0, 0]  # mkdir would fail if two were in
    assert len(os.listdir(tmp_path)) == 100


def test_an_upload_waits_for_its_turn(url: str) -> None:
    throttled = StorageRouter(storage_options={"throttle_uploads": True}).draft(url, ID)
    throttled.begin()
    seen = list[str]()

    def parts() -> Iterator[bytes]:
        with pytest.raises(TimeoutError), machine_upload_lock(wait_s=0):
            raise AssertionError("unreachable")
        seen.append("locked")
        yield b"1"

    throttled.write("a", parts())
    assert seen == ["locked"]
    with machine_upload_lock(wait_s=0):
        throttled.discard()


def test_last_and_best_are_found_in_a_store(url: str) -> None:
    folder = url.removesuffix("/a.ckpt")
    for step in (9, 30, 100):
        save(f"{folder}/epoch=0-step={step}.ckpt", 1.0, step=step)
    fsspec.filesystem("memory").rm_file(f"{folder}/epoch=0-step=100.ckpt/{ROOT_NAME}")  # a save that was killed
    from lightning.pytorch.callbacks import ModelCheckpoint

    assert resolve_ckpt_path(trainer(ModelCheckpoint(folder)), "last") == f"{folder}/epoch=0-step=30.ckpt"
    assert resolve_ckpt_path(trainer(ModelCheckpoint(f"{folder}/none")), "last") == "last"


def test_what_is_no_checkpoint_is_not_removed_but_told(url: str) -> None:
    fsspec.filesystem("memory").pipe_file(f"{url}/thesis.tex", b"x")
    with pytest.warns(UserWarning, match="not removed: .*not a complete checkpoint"):
        ShardCkptIO().remove_checkpoint(url)
    fsspec.filesystem("memory").pipe_file(f"{url}2", b"")
    ShardCkptIO().remove_checkpoint(f"{url}2")  # a plain file, as Lightning would
    assert not fsspec.filesystem("memory").exists(f"{url}2")


def test_a_protocol_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="nowhere"):
        StorageRouter().backend("nowhere://a/b")


WITHOUT = """
import sys
sys.modules["obstore"] = sys.modules["obstore.store"] = None
from lightning_shardckpt.storage.router import StorageRouter
StorageRouter().backend("s3://bucket/a")
"""


def test_a_package_that_is_missing_is_named() -> None:
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True)
    assert re.search(r"ImportError: 's3://bucket/a' can't be opened: .*obstore.*shardckpt\[s3\]", done.stderr)


def test_a_bucket_that_is_not_there_is_an_error(s3: Bucket, storage: StorageRouter) -> None:
    url = f"{s3.url()}-not/a.ckpt"
    for call in (lambda: save(url, 1.0, storage=storage), lambda: load(url, storage=storage)):
        with pytest.raises(OSError, match=rf"{url}.*NoSuchBucket"):
            call()


def test_a_bucket_alone_is_no_path_and_an_error_says_so(s3: Bucket, storage: StorageRouter) -> None:
    for url in ("s3:///a.ckpt", s3.url(), s3.url("")):
        with pytest.raises(ValueError, match="no path of a checkpoint, such as"):
            save(url, 1.0, storage=storage)
        with pytest.raises(ValueError, match="no path of a checkpoint, such as"):
            load(url, storage=storage)
