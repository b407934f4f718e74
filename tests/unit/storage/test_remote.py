"""Checkpoints in stores: who wins, what is left and cleaned up, what a copy elsewhere is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import lightning_shardckpt
from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.cli import main
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.local_files import locked
from lightning_shardckpt.storage.object_store import UPLOAD_LOCK
from lightning_shardckpt.storage.protocol import Draft
from lightning_shardckpt.storage.router import StorageRouter
from lightning_shardckpt.tools.diff import diff
from lightning_shardckpt.tools.inspect import inspect
from lightning_shardckpt.tools.map import write_map
from lightning_shardckpt.tools.verify import verify
from tests.support.published import ID, OTHER_ID, THIRD_ID, root_of
from tests.support.stores import IMPATIENT, Bucket

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
    checkpoint.save(url, lambda: snapshot(state), group := SaveGroup(), run=RunInfo(step), **options)
    return group.background.notes()


def load(url: str, **options: Any) -> float:
    return float(checkpoint.load_full(url, **options)["state_dict"]["a"].unique())


def draft(storage: StorageRouter, url: str, save_id: str, **files: bytes) -> Draft:
    """A save that is ready to be published."""
    found = storage.draft(url, save_id)
    found.begin()
    for name, content in {**files, ROOT_NAME: root_of(save_id, found.prefix)}.items():
        found.write(name, [content])
    return found


def test_of_two_saves_to_one_path_the_first_one_wins_and_the_other_is_told(storage: StorageRouter, s3: Bucket) -> None:
    url = s3.url("a.ckpt")
    first, second = draft(storage, url, ID, a=b"1"), draft(storage, url, OTHER_ID, a=b"2", b=b"2")
    first.publish()
    with pytest.raises(FileExistsError, match=r"another process saved to .*a\.ckpt.*let each job save to paths"):
        second.publish()
    second.discard()
    assert s3.listed() == [f"a.ckpt/{ID[:16]}-a", f"a.ckpt/{ROOT_NAME}"]


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


def test_what_a_killed_save_left_is_removed_by_the_next_one_and_nothing_else_is(
    storage: StorageRouter, s3: Bucket
) -> None:
    url, dead = s3.url("runs", "a.ckpt"), THIRD_ID[:16]
    s3.put(f"runs/a.ckpt/{dead}-model-dist-00000-shard-00001.safetensors", b"x" * 2048)
    others = [f"runs/b.ckpt/{dead}-of-somebody-else", "runs/c.ckpt", "runs/d.ckpt/thesis.tex"]
    for key in others:
        s3.put(key, b"x")
    assert save(url, 1.0, storage=storage) == [f"removed the leftover of an unfinished save at {url!r}"]
    assert load(url, storage=storage) == 1.0
    for name in ("c.ckpt", "d.ckpt"):
        with pytest.raises(FileExistsError, match=rf"{name}.*use another path"):
            save(s3.url("runs", name), 1.0, storage=storage)
        with pytest.raises(CheckpointNotFoundError):
            storage.remove(s3.url("runs", name))
    assert [key for key in s3.listed() if not key.startswith("runs/a")] == others


def test_a_copy_in_a_directory_is_a_checkpoint_and_so_is_one_that_was_uploaded(url: str, tmp_path: Path) -> None:
    save(url, 1.0)
    fs, down = fsspec.filesystem("memory"), str(tmp_path / "down.ckpt")
    fs.get(url, down, recursive=True)
    assert load(down) == 1.0 and verify(down).findings == ()
    fs.put(down, f"{url}2", recursive=True)
    for value, path in ((2.0, down), (3.0, f"{url}2")):
        save(path, value)  # over files that have another prefix, or none
        assert load(path) == value and verify(path).findings == ()


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


def test_an_upload_waits_for_its_turn(url: str) -> None:
    throttled = StorageRouter(storage_options={"throttle_uploads": True}).draft(url, ID)
    throttled.begin()
    seen, lock = list[str](), os.path.join(tempfile.gettempdir(), UPLOAD_LOCK)

    def parts() -> Iterator[bytes]:
        with pytest.raises(TimeoutError), locked(lock, wait_s=0):
            raise AssertionError("unreachable")
        seen.append("locked")
        yield b"1"

    throttled.write("a", parts())
    assert seen == ["locked"]
    with locked(lock, wait_s=0):
        throttled.discard()


WITHOUT = """
import sys
sys.modules["obstore"] = sys.modules["obstore.store"] = None
from lightning_shardckpt.storage.router import StorageRouter
StorageRouter().objects("s3://bucket/a")
"""


def test_a_url_that_cannot_be_used_is_an_error_that_says_why(s3: Bucket, storage: StorageRouter) -> None:
    wrong = {f"{s3.url()}-not/a.ckpt": r"NoSuchBucket", "no://a/b": "no path of a checkpoint"}
    for url, said in wrong.items():
        for call in (lambda url=url: save(url, 1.0, storage=storage), lambda url=url: load(url, storage=storage)):
            with pytest.raises((OSError, ValueError), match=said):
                call()
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run([sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True)
    assert re.search(r"ImportError: 's3://bucket/a' can't be opened: .*obstore.*shardckpt\[s3\]", done.stderr)


# ── tools and functions reach a store that only their options name ────────────────────────────────────────────────────


@pytest.fixture
def saved(s3: Bucket) -> str:
    """A checkpoint in the bucket, saved with plain functions."""
    url = s3.url("a.ckpt")
    state = {"model": torch.nn.Linear(4, 2), "step": 7}
    lightning_shardckpt.save(url, state, storage_options=s3.options)
    with pytest.raises(FileExistsError, match="overwrite=True"):
        lightning_shardckpt.save(url, state, storage_options=s3.options)
    lightning_shardckpt.save_async(url, state, overwrite=True, storage_options=s3.options).result()
    return url


def test_functions_take_them(saved: str, s3: Bucket, tmp_path: Path) -> None:
    options: dict[str, Any] = {"storage_options": s3.options}
    assert lightning_shardckpt.metadata(saved, **options).step == 7
    ((_, weight),) = lightning_shardckpt.load_keys(saved, ["weight"], **options)
    module = torch.nn.Linear(4, 2)
    assert lightning_shardckpt.load(saved, {"model": module}, **options) == {"step": 7}
    assert torch.equal(module.weight, weight)
    assert torch.equal(lightning_shardckpt.load(saved, **options)["model"]["weight"], weight)
    assert inspect(saved, **options)["step"] == 7
    assert verify(saved, **options).findings == ()
    assert diff(saved, saved, **options)["same"] == 2
    assert "weight" in write_map(saved, tmp_path / "map.html", **options).read_text()
    assert torch.equal(torch.load(consolidate(saved, tmp_path / "a.pt", **options))["model"]["weight"], weight)


def test_every_tool_takes_them(saved: str, s3: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [f"--storage_options.{name}={value}" for name, value in s3.options.items()]
    given += ['--storage_options.config_kwargs={"read_timeout": 5}']  # values are YAML
    tools = {
        "inspect": [saved],
        "verify": [saved],
        "diff": [saved, saved],
        "map": [saved, "-o", str(tmp_path / "map.html")],
        "consolidate": [saved, "--output_file", str(tmp_path / "out.pt")],
    }
    for tool, arguments in tools.items():
        assert main([tool, *arguments, *given]) == 0, capsys.readouterr().err
    assert (tmp_path / "out.pt").is_file()
    assert main(["inspect", saved, "--storage_options", json.dumps(s3.options)]) == 0
    assert main(["inspect", saved, *given, "--storage_options.anon=true"]) == 1
    assert "check the credentials" in capsys.readouterr().err


@pytest.mark.parametrize("given", [{"kye": "test"}, {"client_kwargs": {"kye": "test"}}])
def test_an_unknown_one_is_a_type_error_that_names_it(given: dict[str, Any], s3: Bucket) -> None:
    options = {**s3.options, **given}
    for url in (s3.url("a.ckpt"), "gs://bucket/a.ckpt", "az://bucket/a.ckpt"):
        with pytest.raises(TypeError, match=rf"unknown storage_options for '{url}': .*kye.*; known are .*token"):
            lightning_shardckpt.save(url, {"step": 1}, storage_options=options)
