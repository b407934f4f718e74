"""Checkpoints of other programs in object stores, through a local copy. Oracle: the same loads from the disk."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn

import lightning_shardckpt
from lightning_shardckpt import ShardCkptIO, load, load_keys, metadata
from lightning_shardckpt.errors import CheckpointNotFoundError
from tests.support import tiny
from tests.support.pool import run_ranks
from tests.support.stores import Bucket

State = dict[str, Any]


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))


def in_dcp(path: Path, state: dict[str, Tensor]) -> None:
    dcp.save(state, checkpoint_id=path, no_dist=True)


def in_olmo_core(path: Path, state: dict[str, Tensor]) -> None:
    dcp.save({"model": state}, checkpoint_id=path / "model_and_optim", no_dist=True)


def in_hugging_face(path: Path, state: dict[str, Tensor]) -> None:
    path.mkdir()
    files = {"model-00001-of-00002.safetensors": 2, "model-00002-of-00002.safetensors": 2}
    weight_map, names = {}, iter(state)
    for file, count in files.items():
        part = {name: state[name] for _, name in zip(range(count), names, strict=False)}
        weight_map |= dict.fromkeys(part, file)
        save_file(part, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (path / "README.md").write_text("not to be copied")


def in_older_hugging_face(path: Path, state: dict[str, Tensor]) -> None:
    path.mkdir()
    torch.save(state, path / "pytorch_model.bin")


def in_safetensors(path: Path, state: dict[str, Tensor]) -> None:
    save_file(state, path)


def in_lightning(path: Path, state: dict[str, Tensor]) -> None:
    torch.save({"state_dict": state, "global_step": 7, "pytorch-lightning_version": "2.6.0"}, path)


WRITERS: dict[str, Callable[[Path, dict[str, Tensor]], None]] = {
    "dcp": in_dcp,
    "olmo": in_olmo_core,
    "hub": in_hugging_face,
    "old-hub": in_older_hugging_face,
    "one.safetensors": in_safetensors,
    "step.ckpt": in_lightning,
}


@pytest.fixture(params=["memory", "s3"])
def store(request: pytest.FixtureRequest) -> Iterator[tuple[str, State]]:
    """A URL to put things below, and the options for it."""
    if request.param == "s3":
        bucket: Bucket = request.getfixturevalue("s3")
        yield bucket.url("others"), dict(bucket.options)
    else:
        yield "memory://others", {}
        fsspec.filesystem("memory").store.clear()


def uploaded(path: Path, url: str, options: State) -> str:
    fs, key = fsspec.core.url_to_fs(f"{url}/{path.name}", **options)
    for file in (path,) if path.is_file() else (found for found in path.rglob("*") if found.is_file()):
        fs.pipe_file(key if path.is_file() else f"{key}/{file.relative_to(path)}", file.read_bytes())
    return f"{url}/{path.name}"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_is_read_at_a_url_as_it_is_on_a_disk(kind: str, store: tuple[str, State], tmp_path: Path) -> None:
    stored, (place, options) = dict(net(1).state_dict()), store
    WRITERS[kind](tmp_path / kind, stored)
    url = uploaded(tmp_path / kind, place, options)
    more: State = {"storage_options": options, "pre_download": tmp_path / "cache"}
    on_disk, at_url = net(2), net(3)
    load(tmp_path / kind, {"model": on_disk})
    load(url, {"model": at_url}, **more)
    for name, tensor in stored.items():
        assert torch.equal(on_disk.state_dict()[name], tensor) and torch.equal(at_url.state_dict()[name], tensor)
    assert metadata(url, **more) == metadata(tmp_path / kind)
    ((_, weight),) = load_keys(url, ["1.weight"], **more)
    assert torch.equal(weight, stored["1.weight"])
    assert not [*tmp_path.glob("cache/**/README.md")]
    with pytest.raises(CheckpointNotFoundError, match="give the folder for it, as pre_download"):
        load(url, {"model": at_url}, storage_options=options)
    with pytest.raises(CheckpointNotFoundError, match="give the folder for it, as pre_download"):
        metadata(url, storage_options=options)


def test_what_was_replaced_at_a_url_is_copied_anew(store: tuple[str, State], tmp_path: Path) -> None:
    place, options = store
    more: State = {"storage_options": options, "pre_download": tmp_path / "cache"}
    for seed in (1, 2):
        stored = net(seed)
        in_lightning(tmp_path / "a.ckpt", dict(stored.state_dict()))
        url = uploaded(tmp_path / "a.ckpt", place, options)
        live = net(3)
        load(url, {"model": live}, **more)
        assert torch.equal(live[0].weight, stored[0].weight)
    copies = list(tmp_path.glob("cache/*/a.ckpt"))
    assert len(copies) == 2
    before = copies[0].stat().st_mtime_ns, copies[1].stat().st_mtime_ns
    load(url, {"model": live}, **more)
    assert before == (copies[0].stat().st_mtime_ns, copies[1].stat().st_mtime_ns)  # found again


def resumed_from_a_url(directory: str) -> None:
    plain = tiny.fit("auto", 3, save=f"{directory}/a.ckpt", plugins=[])
    url = uploaded(Path(directory, "a.ckpt"), "memory://plain", {})
    cache = f"{directory}/cache"
    for strategy in ({}, "auto"):
        found = tiny.fit(strategy, 3, resume=url, seed=2, plugins=[ShardCkptIO(pre_download=cache)])
        assert found["step"] == 3 and tiny.differences(found["state"], plain["state"]) == []
    module = lightning_shardckpt.load_from_checkpoint(tiny.TinyLM, url, pre_download=cache)
    assert torch.equal(module.head.weight, plain["state"]["model/head.weight"])


def test_a_plain_file_of_lightning_at_a_url_resumes(tmp_path: Path) -> None:
    run_ranks(1, resumed_from_a_url, str(tmp_path))


def test_what_is_nothing_at_a_url_is_said_as_ever(tmp_path: Path) -> None:
    fsspec.filesystem("memory").pipe_file("nothing/notes.txt", b"x")
    for url in ("memory://nothing", "memory://nothing/at-all"):
        with pytest.raises(CheckpointNotFoundError, match=r"not a complete checkpoint|nothing at this path"):
            load(url, {"model": net(1)}, pre_download=tmp_path / "cache")
