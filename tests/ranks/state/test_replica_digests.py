"""Replicas that differ are noticed at a save, named, and not mixed. Oracle: who was changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import lightning_shardckpt as ckpt
from lightning_shardckpt.checkpoint.checkpoint_options import Replicas
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.replica_digests import differing, replica_digests
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from tests.support.pool import run_ranks


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _trained(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return optimizer


@torch.no_grad()
def save_changed(path: str, what: str, replicas: Replicas, background: bool) -> str:
    """As after training without a reduction of gradients: rank 1 differs in one thing."""
    rank = torch.distributed.get_rank()
    with torch.enable_grad():
        module = _net()
        optimizer = _trained(module)
    if rank == 1 and what == "an element":
        module[0].weight[4, 5] += 1e-7
    elif rank == 1 and what == "a moment":
        optimizer.state[module[2].weight]["exp_avg"].neg_()
    elif rank == 1 and what == "a statistic":
        module[1].running_mean.add_(1)  # type: ignore[union-attr, operator]
    elif rank == 1 and what == "everything":
        for parameter in module.parameters():
            parameter.add_(1)
    try:
        state = {"model": module, "optimizer": optimizer}
        if background:
            ckpt.save_async(path, state, replicas=replicas)
            ckpt.wait()
        else:
            ckpt.save(path, state, replicas=replicas)
    except MismatchError as error:
        return str(error)
    return ""


CHANGES = {
    "an element": "model/0.weight  ranks [0, 2] | [1]",
    "a moment": "optimizer/0/2.weight/exp_avg  ranks [0, 2] | [1]",
    "everything": "6 tensors, by the ranks that hold the same",
    "a statistic": "",  # of buffers, rank 0's are stored
    "nothing": "",
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "said"), CHANGES.items(), ids=CHANGES)
def test_a_replica_that_differs_is_an_error_that_names_it(what: str, said: str, tmp_path: Path) -> None:
    for background in (False, True):
        for found in run_ranks(3, save_changed, str(tmp_path / f"c{background}"), what, "same", background):
            assert said in found if said else not found
            assert not said or 'replicas="first"' in found
        assert (tmp_path / f"c{background}" / "checkpoint.index.json").exists() == (not said)


@pytest.mark.slow
def test_the_first_replica_is_stored_where_that_is_asked_for(tmp_path: Path) -> None:
    assert run_ranks(3, save_changed, str(tmp_path / "c"), "everything", "first", False) == ["", "", ""]
    module, expected = _net(), _net()
    optimizer = torch.optim.AdamW(module.parameters())
    _trained(expected)
    ckpt.load(tmp_path / "c", {"model": module, "optimizer": optimizer})
    for key, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)


def save_on_mesh(path: str) -> list[str]:
    """On 2 × 2 ranks, replicas of shards: of the first row, of the second row, or none that differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row, column = mesh.get_coordinate() or (0, 0)
    said = []
    for changed in (None, 0, 1):
        local = torch.full((2, 3), float(column))
        if row == 1 and column == changed:
            local[1, 2] += 1
        module = nn.Module()
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False))
        try:
            ckpt.save(f"{path}/{changed}", {"model": module})
            said.append("")
        except MismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_replicas_of_shards_are_compared_with_those_of_the_same_shard(tmp_path: Path) -> None:
    for none, first, second in run_ranks(4, save_on_mesh, str(tmp_path)):
        assert none == ""
        assert "model/weight  ranks [0] | [2]" in first
        assert "model/weight  ranks [1] | [3]" in second


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(7, 5),
    "bytes": lambda: torch.randint(255, (13,), dtype=torch.uint8),
    "bool": lambda: torch.rand(9) > 0.5,
    "bfloat16": lambda: torch.randn(11).bfloat16(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.randn(4, 6).T,
    "in the middle": lambda: torch.randn(9)[1:8],
    "number": lambda: torch.tensor(3.0),
    "not a number": lambda: torch.full((3,), torch.nan),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_is_of_the_bits_wherever_they_lie(kind: str) -> None:
    torch.manual_seed(0)
    tensor = KINDS[kind]()

    def digest(value: torch.Tensor) -> Any:
        leaves = Leaves({"x": value})
        return replica_digests({"model": leaves}, {"model": Component(specs_of("model", leaves, ((0, 1),)))}, 0)

    assert digest(tensor) == digest(tensor.clone()) == {"": {"model/x": digest(tensor)[""]["model/x"]}}
    raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for place in (0, len(raw) - 1):
        raw[place] ^= 1
        other = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
        assert differing({0: digest(tensor), 1: digest(other)}) == {"model/x": [[0], [1]]}
        raw[place] ^= 1
