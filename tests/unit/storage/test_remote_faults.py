"""What a network does to checkpoints in a store: nothing worse than an error. A proxy does it to real requests."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_shardckpt
from lightning_shardckpt.checkpoint import checkpoint
from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.save_job import RunInfo
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.state.trainer import snapshot
from lightning_shardckpt.storage.router import StorageRouter
from tests.support.pool import run_ranks
from tests.support.stores import IMPATIENT, Asked, Bucket, Harm, Proxy

FIRST, SECOND = 1.0, 2.0
LENGTH = 1_600_000  # two parts


@pytest.fixture
def proxy(s3_port: int) -> Iterator[Proxy]:
    with Proxy(s3_port) as found:
        yield found


@pytest.fixture
def storage(s3: Bucket, proxy: Proxy) -> StorageRouter:
    """The bucket behind the proxy; large objects go in parts, which are small here."""
    options = replace(s3, port=proxy.port).options | {"config_kwargs": {"read_timeout": 3, "connect_timeout": 3}}
    tuning = replace(IMPATIENT, upload_part_bytes=5 << 20)  # S3's least
    return StorageRouter(storage_options=options, tuning=tuning)


def save(storage: StorageRouter, url: str, value: float) -> list[str]:
    """A checkpoint of 6 MB, whose tensors are all of one value."""
    state = {"state_dict": {"a": torch.full((LENGTH,), value), "b": torch.full((3,), value)}, "global_step": 1}
    checkpoint.save(url, lambda: snapshot(state), group := SaveGroup(), run=RunInfo(int(value)), storage=storage)
    return group.background.notes()


def load(storage: StorageRouter, url: str) -> float:
    """The value of all tensors."""
    found = checkpoint.load_full(url, storage=storage)["state_dict"]
    (value,) = {value for tensor in found.values() for value in tensor.unique().tolist()}
    return float(value)


def first_times(harm: str | int, times: int, which: Any) -> Harm:
    return lambda asked: harm if which(asked) and asked.turn <= times else None


def anything(asked: Asked) -> bool:
    return True


PASSING: dict[str, Harm] = {"throttled": first_times(503, 2, anything), "answer lost": first_times("lose", 1, anything)}


@pytest.mark.parametrize("kind", PASSING)
def test_a_save_survives_what_passes(kind: str, storage: StorageRouter, proxy: Proxy, s3: Bucket) -> None:
    url = s3.url("a.ckpt")
    save(storage, url, FIRST)
    calm = len(proxy.asked)
    proxy.forget()
    proxy.harm = PASSING[kind]
    save(storage, url, SECOND)
    assert len(proxy.asked) <= 3 * (calm + 5)
    proxy.harm = lambda asked: None
    assert load(storage, url) == SECOND
    assert kind == "answer lost" or s3.uploads() == []  # the answer with an upload's id may be lost, too
    assert len({key.split("/")[-1][:17] for key in s3.listed() if not key.endswith(ROOT_NAME)}) == 1  # of one save


LASTING: dict[str, Harm] = {
    "a part is never taken": lambda asked: 503 if "partNumber=2" in asked.path else None,
    "writing is not permitted": lambda asked: 403 if asked.method == "PUT" else None,
    "the root index is never taken": lambda asked: 500 if asked.method == "PUT" and asked.is_root else None,
}


@pytest.mark.parametrize("kind", LASTING)
def test_a_save_that_fails_leaves_what_was_there(kind: str, storage: StorageRouter, proxy: Proxy, s3: Bucket) -> None:
    url, is_first = s3.url("a.ckpt"), kind == "a part is never taken"
    if not is_first:
        save(storage, url, FIRST)
    keys = s3.listed()
    proxy.forget()
    proxy.harm = LASTING[kind]
    with pytest.raises(OSError, match="permit" if "permitted" in kind else r"a\.ckpt") as raised:
        save(storage, url, SECOND)
    assert isinstance(raised.value, PermissionError) == ("permitted" in kind)
    assert len(proxy.asked) < 60
    proxy.harm = lambda asked: None
    assert s3.listed() == keys and s3.uploads() == []
    if not is_first:
        assert load(storage, url) == FIRST
        return
    with pytest.raises(CheckpointNotFoundError, match="is not a complete checkpoint"):
        load(storage, url)


@pytest.mark.slow
def test_a_store_that_knows_no_conditions_is_saved_to_all_the_same(
    storage: StorageRouter, proxy: Proxy, s3: Bucket
) -> None:
    url = s3.url("a.ckpt")
    proxy.harm = lambda asked: 501 if asked.method == "PUT" and asked.is_root and asked.is_conditional else None
    s3.put(f"a.ckpt/{'2' * 16}-of-a-running-save", b"x")
    assert [note.partition("; ")[0] for note in save(storage, url, FIRST)] == [
        f"the store of {url!r} can't compare and write in one step: of two jobs that save to one path in the same "
        "instant, the later one counts"
    ]
    assert load(storage, url) == FIRST
    assert save(storage, url, SECOND) == []
    assert load(storage, url) == SECOND
    names = {key.split("/")[-1][:17] for key in s3.listed() if not key.endswith(ROOT_NAME)}
    assert len(names) == 2 and f"{'2' * 16}-" in names  # what may be of a running save stays

    running = storage.draft(url, "1" * 32)
    running.begin()
    running.write(ROOT_NAME, [b"{}"])
    save(storage, url, FIRST)
    with pytest.raises(FileExistsError, match="another process saved to"):
        running.publish()
    running.discard()
    assert load(storage, url) == FIRST


def test_a_load_survives_what_passes_and_reads_hardly_more_than_it_needs(
    storage: StorageRouter, proxy: Proxy, s3: Bucket
) -> None:
    url = s3.url("a.ckpt")
    save(storage, url, FIRST)
    harms: tuple[str | int, ...] = (503, "truncate")
    for kind in harms:
        proxy.harm = first_times(kind, 1, lambda asked: asked.method == "GET" and "shard" in asked.path)
        assert load(storage, url) == FIRST
        proxy.forget()
    proxy.harm = lambda asked: None
    assert load(storage, url) == FIRST
    assert proxy.sent_bytes <= 1.1 * (4 * LENGTH + 12)


READS: dict[str, tuple[Harm, str]] = {
    "throttled for good": (lambda asked: 503, r"a\.ckpt"),
    "not permitted": (lambda asked: 403 if asked.method == "GET" else None, r"a\.ckpt.*does not permit it: check"),
    "always short": (
        lambda asked: "truncate" if asked.method == "GET" and "shard" in asked.path else None,
        r"reading bytes .* of s3://.*shard-00001\.safetensors: .*body error",
    ),
    "an expired token": (lambda asked: "expired" if asked.method == "GET" else None, r"a\.ckpt.*ExpiredToken"),
}


@pytest.mark.parametrize("kind", READS)
def test_a_load_that_fails_says_where_and_why(kind: str, storage: StorageRouter, proxy: Proxy, s3: Bucket) -> None:
    url = s3.url("a.ckpt")
    save(storage, url, FIRST)
    proxy.forget()
    proxy.harm, words = READS[kind]
    with pytest.raises(OSError, match=words) as raised:
        load(storage, url)
    assert isinstance(raised.value, PermissionError) == (kind == "not permitted")
    assert max(asked.turn for asked in proxy.asked) <= IMPATIENT.retry_attempts


# ── a checkpoint that is replaced while it is read ────────────────────────────────────────────────────────────────────


def state_of(value: float) -> dict[str, Any]:
    """Two tensors of 200 KB each, and their optimizer."""
    module = nn.ModuleList([nn.Linear(200, 250, bias=False), nn.Linear(250, 200, bias=False)])
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)
    optimizer = torch.optim.SGD(module.parameters(), lr=value, momentum=0.9)
    for parameter in module.parameters():
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, value)
    return {"model": module, "optimizer": optimizer}


def values_of(state: dict[str, Any]) -> set[float]:
    """Every value in a state."""
    tensors = [*state["model"].parameters()]
    tensors += [of["momentum_buffer"] for of in state["optimizer"].state.values()]
    return {number for tensor in tensors for number in tensor.detach().unique().tolist()}


def replacing(s3: Bucket, part: str, *values: float, turn: int | None = None) -> Harm:
    """Save another checkpoint, past the proxy, when a file whose name has a part is about to be read (for a turn)."""
    left = list(values)

    def harm(asked: Asked) -> None:
        is_turn = asked.method in ("GET", "HEAD") if turn is None else (asked.method, asked.turn) == ("GET", turn)
        if is_turn and part in asked.path and left:
            save_last(s3, left.pop(0))

    return harm


def save_last(s3: Bucket, value: float) -> None:
    url, options = s3.url("last"), s3.options
    lightning_shardckpt.save(url, state_of(value), overwrite=True, storage_options=options, size_per_shard=0.1)


def load_last(s3: Bucket, port: int, state: dict[str, Any], **options: Any) -> set[float]:
    options |= {"storage_options": Bucket(s3.name, port).options}
    lightning_shardckpt.load(s3.url("last"), state, **options)
    return values_of(state)


def load_on_rank(s3: Bucket, port: int) -> set[float]:
    state = state_of(0.0)
    found = load_last(s3, port, state)
    assert state["optimizer"].param_groups[0]["lr"] == 2.0
    state["model"][0](torch.ones(1, 200))  # not refused as partly loaded
    return found


@pytest.mark.parametrize("part", ["model-meta", "optimizer-dist-00000-shard-00002"])
def test_all_ranks_start_again_together_on_the_new_checkpoint(part: str, s3: Bucket, proxy: Proxy) -> None:
    save_last(s3, 1.0)
    proxy.harm = replacing(s3, part, 2.0)
    assert run_ranks(2, load_on_rank, s3, proxy.port) == [{2.0}, {2.0}]


def test_a_load_that_meets_a_third_checkpoint_says_that_it_was_replaced(s3: Bucket, proxy: Proxy) -> None:
    save_last(s3, 1.0)
    proxy.harm = replacing(s3, "model-dist", 2.0, 3.0)
    with pytest.raises(OSError, match=r"s3://.*/last was replaced or deleted while it was read: open") as error:
        load_last(s3, proxy.port, state_of(0.0))
    assert error.value.errno == errno.ESTALE
    assert load_last(s3, proxy.port, state_of(0.0)) == {3.0}


def test_a_load_of_a_part_says_that_it_was_replaced(s3: Bucket, proxy: Proxy) -> None:
    """To start again could leave tensors of the first save that the second one lacks. The last read is of a tensor."""
    save_last(s3, 1.0)
    part = "model-dist-00000-shard-00002"
    load_last(s3, proxy.port, state_of(0.0))
    reads = sum(asked.method == "GET" and part in asked.path for asked in proxy.asked)
    proxy.forget()
    proxy.harm = replacing(s3, part, 2.0, turn=reads)
    state = state_of(0.0)
    state["model"].append(nn.Linear(2, 2))
    with pytest.raises(CorruptionError, match=r"after some tensors were filled: .* was replaced or deleted"):
        load_last(s3, proxy.port, {"model": state["model"]}, strict=False)


@pytest.mark.parametrize("prepared", [False, True], ids=["renamed", "filled in place"])
def test_a_load_from_a_disk_starts_again_too(prepared: bool, tmp_path: Path) -> None:
    """The mapping is called when the checkpoint is open and compared, and before a tensor is read."""
    path = tmp_path / "last"
    if prepared:
        path.mkdir()
    values = iter((1.0, 2.0))

    def replace(name: str) -> str:
        for value in values:
            lightning_shardckpt.save(path, state_of(value), overwrite=True, size_per_shard=0.1)
        return name

    lightning_shardckpt.save(path, state_of(next(values)), overwrite=True, size_per_shard=0.1)
    state = state_of(0.0)
    lightning_shardckpt.load(path, state, key_mapping=replace)
    assert values_of(state) == {2.0}
