"""A checkpoint that is replaced while it is read. Oracle: the values of the two saves, never a mix."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_shardckpt
from lightning_shardckpt.errors import CorruptionError
from tests.support.pool import run_ranks
from tests.support.stores import Asked, Bucket, Proxy


@pytest.fixture
def proxy(s3: Bucket) -> Iterator[Proxy]:
    with Proxy(s3.port) as proxy:
        yield proxy


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


class Replacing:
    """Saves another checkpoint to the path, past the proxy, when a file whose name has a part is about to be read.

    With ``turn``, only before the GET of this number.
    """

    def __init__(self, s3: Bucket, part: str, *values: float, turn: int | None = None) -> None:
        self._s3, self._part, self._values, self._turn = s3, part, list(values), turn

    def __call__(self, asked: Asked) -> None:
        is_read = asked.method in ("GET", "HEAD")
        is_turn = is_read if self._turn is None else (asked.method, asked.turn) == ("GET", self._turn)
        if is_turn and self._part in asked.path and self._values:
            save(self._s3, self._values.pop(0))


def save(s3: Bucket, value: float) -> None:
    url, options = s3.url("last"), s3.options
    lightning_shardckpt.save(url, state_of(value), overwrite=True, storage_options=options, size_per_shard=0.1)


def load(s3: Bucket, port: int, state: dict[str, Any], **options: Any) -> set[float]:
    options |= {"storage_options": Bucket(s3.name, port).options}
    lightning_shardckpt.load(s3.url("last"), state, **options)
    return values_of(state)


PARTS = ["model-meta", "optimizer-dist-00000-shard-00002"]
PARTS_OF_SWEEP = ["optimizer-state", "trainer-state", "model-dist"]


@pytest.mark.parametrize("part", [*PARTS, *(pytest.param(p, marks=pytest.mark.sweep) for p in PARTS_OF_SWEEP)])
def test_a_load_starts_again_on_the_new_checkpoint(part: str, s3: Bucket, proxy: Proxy) -> None:
    save(s3, 1.0)
    proxy.harm = Replacing(s3, part, 2.0)
    state = state_of(0.0)
    assert load(s3, proxy.port, state) == {2.0}
    assert state["optimizer"].param_groups[0]["lr"] == 2.0
    state["model"][0](torch.ones(1, 200))  # not refused as partly loaded


def load_on_rank(s3: Bucket, port: int) -> set[float]:
    return load(s3, port, state_of(0.0))


def test_all_ranks_start_again_together(s3: Bucket, proxy: Proxy) -> None:
    save(s3, 1.0)
    proxy.harm = Replacing(s3, "model-dist", 2.0)
    assert run_ranks(2, load_on_rank, s3, proxy.port) == [{2.0}, {2.0}]


def test_a_load_that_meets_a_third_checkpoint_says_that_it_was_replaced(s3: Bucket, proxy: Proxy) -> None:
    save(s3, 1.0)
    proxy.harm = Replacing(s3, "model-dist", 2.0, 3.0)
    with pytest.raises(OSError, match=r"s3://.*/last was replaced or deleted while it was read: open") as error:
        load(s3, proxy.port, state_of(0.0))
    assert error.value.errno == errno.ESTALE
    assert load(s3, proxy.port, state_of(0.0)) == {3.0}


def test_a_load_of_a_part_says_that_it_was_replaced(s3: Bucket, proxy: Proxy) -> None:
    """To start again could leave tensors of the first save that the second one lacks. The last read is of a tensor."""
    save(s3, 1.0)
    part = "model-dist-00000-shard-00002"
    load(s3, proxy.port, state_of(0.0))
    reads = sum(asked.method == "GET" and part in asked.path for asked in proxy.asked)
    proxy.forget()
    proxy.harm = Replacing(s3, part, 2.0, turn=reads)
    state = state_of(0.0)
    state["model"].append(nn.Linear(2, 2))
    with pytest.raises(CorruptionError, match=r"after some tensors were filled: .* was replaced or deleted"):
        load(s3, proxy.port, {"model": state["model"]}, strict=False)


def test_without_a_state_all_is_of_the_new_checkpoint(s3: Bucket, proxy: Proxy) -> None:
    save(s3, 1.0)
    proxy.harm = Replacing(s3, "model-dist-00000-shard-00002", 2.0)
    found = lightning_shardckpt.load(s3.url("last"), storage_options=Bucket(s3.name, proxy.port).options)
    assert {number for tensor in found["model"].values() for number in tensor.unique().tolist()} == {2.0}


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


@pytest.mark.parametrize("marker", ["last/", "last/folder/", "last_$folder$"])
def test_markers_of_folders_are_not_in_the_way(marker: str, s3: Bucket) -> None:
    """As consoles and Hadoop make them; they stay."""
    s3.put(marker)
    for value in (1.0, 2.0):
        save(s3, value)
        assert load(s3, s3.port, state_of(0.0)) == {value}
    assert marker in s3.listed()
    s3.put("other/", b"an object of somebody")
    with pytest.raises(FileExistsError, match="is not empty"):
        lightning_shardckpt.save(s3.url("other"), state_of(1.0), storage_options=s3.options)
