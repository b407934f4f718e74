"""Parts of a checkpoint without a process group. Oracles: the tensors before the save, and torch's own slicing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

import lightning_shardckpt
from lightning_shardckpt.errors import CheckpointNotFoundError, CorruptionError
from tests.support import zoo
from tests.support.faults import flip
from tests.support.faults import same_bits as same
from tests.support.pool import ROOT


def test_every_tensor_comes_back_whole_in_the_order_of_the_keys(saved: Path) -> None:
    expected = zoo.whole_tensors()
    names = sorted(expected, reverse=True)
    found = list(lightning_shardckpt.load_keys(saved, [*names, "tied.float64", names[0]]))
    assert [name for name, _ in found] == [*names, "tied.float64", names[0]]
    assert [name for name, tensor in found[:-2] if not same(tensor, expected[name])] == []
    assert same(found[-2][1], expected["rows.float64"]) and same(found[-1][1], expected[names[0]])
    assert found[-1][1].data_ptr() != found[0][1].data_ptr()


@pytest.mark.parametrize(
    "index",
    [..., -1, slice(2, 9, 3), slice(5, 2), (slice(1, 4), slice(2, None)), (..., 1), (slice(0, -1, 2), ...)],
    ids=str,
)
def test_a_slice_is_what_torch_would_take(saved: Path, index: Any) -> None:
    expected = {name: t for name, t in zoo.whole_tensors().items() if t.ndim >= 2 and min(t.shape) >= 4}
    assert len(expected) > 5
    with lightning_shardckpt.open(saved) as checkpoint:
        wrong = [name for name, tensor in expected.items() if not same(checkpoint[name][index], tensor[index])]
    assert wrong == []


def test_only_the_blocks_of_a_slice_are_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name, tensor = max(zoo.whole_tensors().items(), key=lambda item: item[1].nbytes)
    rows = tensor.shape[0]
    counted: list[int] = []
    preadv = os.preadv

    def counting(file: int, targets: list[memoryview], offset: int) -> int:
        counted.append(sum(map(len, targets)))
        return preadv(file, targets, offset)

    with lightning_shardckpt.open(saved) as checkpoint:
        lazy = checkpoint[name]
        part = lazy[rows // 2 : rows // 2 + 1]  # opens and checks the files
        monkeypatch.setattr(os, "preadv", counting)
        assert same(lazy[rows // 2 : rows // 2 + 1], part)
    assert same(part, tensor[rows // 2 : rows // 2 + 1])
    assert 0 < sum(counted) <= part.nbytes + 2 * 4096, f"{sum(counted)} bytes for {part.nbytes} of {tensor.nbytes}"


def test_metadata_says_what_was_saved(saved: Path) -> None:
    expected = zoo.whole_tensors()
    expected["tied.float64"] = expected["rows.float64"]
    found = lightning_shardckpt.metadata(saved)
    assert (found.step, found.epoch, found.world_size, found.topology) == (7, 3, 4, {"shard": 2, "tensor": 2})
    assert found.software is not None and torch.__version__.startswith(found.software["torch"])  # without the build
    assert {n: (found.tensors[n].shape, found.tensors[n].nbytes) for n in expected} == {
        n: (tuple(t.shape), t.nbytes) for n, t in expected.items()
    }


def test_names_and_shapes_need_neither_torch_nor_lightning(saved: Path) -> None:
    script = f"""
import sys, lightning_shardckpt
with lightning_shardckpt.open({str(saved)!r}) as checkpoint:
    print(len(checkpoint), checkpoint["rows.float64"], len(lightning_shardckpt.metadata({str(saved)!r}).tensors))
assert not {{"torch", "lightning", "lightning_fabric"}} & sys.modules.keys()
"""
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    with lightning_shardckpt.open(saved) as checkpoint:
        count, lazy = len(checkpoint), checkpoint["rows.float64"]
    assert run.stdout.split() == [str(count), *repr(lazy).split(), str(count)]


def test_names_that_are_not_there_are_told_before_anything_is_read(saved: Path) -> None:
    loading = lightning_shardckpt.load_keys(saved, ["rows.float64", "rows.float6", "nothing"])
    with pytest.raises(KeyError, match=r"does not have 'rows.float6' \(but 'rows.float64'.*\), 'nothing'"):
        next(loading)
    with lightning_shardckpt.open(saved) as checkpoint, pytest.raises(KeyError, match=r"but 'rows\.float64'"):
        checkpoint["row.float64"]
    with pytest.raises(CheckpointNotFoundError, match=f"did you mean .*{saved.name}"):
        lightning_shardckpt.open(saved.parent)
    with pytest.raises(TypeError, match=r"several names, such as \['rows'\]"):
        next(lightning_shardckpt.load_keys(saved, "rows"))


def test_a_flipped_bit_is_found_where_it_is_read_and_only_there(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy.ckpt"))
    indexes = [json.loads(file.read_text())["metadata"] for file in copy.glob("model-meta-*")]
    entries = [index["rows.float64"] for index in indexes if "rows.float64" in index]
    first = next(entry for entry in entries if entry["offsets"] == [0, 0])
    flip(copy / first["file"], first["begin"])
    with lightning_shardckpt.open(copy) as checkpoint:
        with pytest.raises(CorruptionError, match=r"'rows\.float64'.*written by rank"):
            checkpoint["rows.float64"][0]
        assert same(checkpoint["rows.float64"][-1], zoo.whole_tensors()["rows.float64"][-1])
    with lightning_shardckpt.open(copy, verify=False) as checkpoint:
        assert not same(checkpoint["rows.float64"][0], zoo.whole_tensors()["rows.float64"][0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_formats_are_opened_alike(tmp_path: Path) -> None:
    weights = {"a.weight": torch.randn(40, 30), "b": torch.arange(7), "half": torch.ones(3, dtype=torch.bfloat16)}
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    torch.save(weights, tmp_path / "w.pt")
    (tmp_path / "hub").mkdir()
    safetensors.torch.save_file(weights, tmp_path / "hub" / "model.safetensors")
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for name in ("w.safetensors", "w.pt", "hub", "dcp"):
        found = lightning_shardckpt.metadata(tmp_path / name)
        assert {n: (t.dtype, t.shape) for n, t in found.tensors.items()} == {
            "a.weight": ("F32", (40, 30)),
            "b": ("I64", (7,)),
            "half": ("BF16", (3,)),
        }
        assert found.step is None
        loaded = lightning_shardckpt.load_keys(tmp_path / name, weights)
        assert all(same(tensor, weights[key]) for key, tensor in loaded)
        with lightning_shardckpt.open(tmp_path / name) as checkpoint:
            assert same(checkpoint["a.weight"][5:9, ::7], weights["a.weight"][5:9, ::7])
