"""Directories of torch's HuggingFaceStorageWriter with each rank's slices. Oracle: its HuggingFaceStorageReader."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError, MismatchError
from tests.support import tiny
from tests.support.pool import run_ranks

STATE = {
    "rows": torch.arange(35.0).view(7, 5),
    "columns": torch.arange(18.0).view(3, 6).bfloat16(),
    "plain": torch.arange(4),
    "scalar": torch.tensor(2.5),
}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "plain": Replicate(), "scalar": Replicate()}


def save(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(tensor, mesh, [PLACEMENTS[name]]) for name, tensor in STATE.items()}
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(path, save_distributed=True))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slices") / "a"
    run_ranks(2, save, str(path))
    return path


def load_slices(path: str) -> dict[str, torch.Tensor]:
    """On each rank: slices along the other dim than at the save."""
    mesh = init_device_mesh("cpu", (2,))
    turned = {"rows": Shard(1), "columns": Shard(0), "plain": Shard(0), "scalar": Replicate()}
    live = {n: distribute_tensor(torch.zeros_like(t), mesh, [turned[n]]) for n, t in STATE.items()}
    ckpt.load(path, {"model": live})
    return {name: tensor.full_tensor() for name, tensor in live.items()}


def test_slices_of_all_ranks_become_whole_tensors_and_other_slices(saved: Path) -> None:
    expected = {name: torch.zeros_like(tensor) for name, tensor in STATE.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is not distributed here
        dcp.load(expected, storage_reader=HuggingFaceStorageReader(str(saved)))
    assert tiny.differences(STATE, expected) == []
    assert {name: tensor.shape for name, tensor in ckpt.metadata(saved).tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in STATE.items()
    }
    assert tiny.differences(STATE, ckpt.load(saved)["state_dict"]) == []
    for found in run_ranks(2, load_slices, str(saved)):
        assert tiny.differences(STATE, found) == []


def test_one_of_the_files_is_not_taken_for_the_whole(saved: Path, tmp_path: Path) -> None:
    first, second = sorted(saved.iterdir())
    for file in (first, second):
        with pytest.raises(CheckpointNotFoundError, match=r"one rank's slices of tensors: give the path of its dir"):
            ckpt.metadata(file)
    renamed = tmp_path / "x.safetensors"
    renamed.write_bytes(second.read_bytes())
    with pytest.raises(FormatError, match=r"one rank's slices of tensors"):
        ckpt.load(renamed)


def test_a_directory_that_lacks_a_file_is_refused(saved: Path, tmp_path: Path) -> None:
    first, second = sorted(saved.iterdir())
    (tmp_path / first.name).write_bytes(first.read_bytes())
    with pytest.raises(MismatchError, match=r"rows  shape \(4, 5\) in checkpoint, \(7, 5\)"):
        ckpt.load(tmp_path, {"model": torch.nn.ParameterDict({"rows": torch.zeros(7, 5)})})
    os.unlink(tmp_path / first.name)
    (tmp_path / second.name).write_bytes(second.read_bytes())
    with pytest.raises(FormatError, match=r"'rows', F32 \(7, 5\): 15 of 35 elements are covered"):
        ckpt.load(tmp_path)
