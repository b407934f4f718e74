"""Parts of a checkpoint without a process group. Oracles: the tensors before the save, and torch's own slicing."""

from __future__ import annotations

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
from lightning_shardckpt.read import Checkpoint
from lightning_shardckpt.storage.local import LocalReader, LocalStorage
from lightning_shardckpt.whole import Wholes
from tests import zoo
from tests.pool import ROOT, run_ranks


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 4 ranks; tests must not change it."""
    path = tmp_path_factory.mktemp("saved") / "zoo.ckpt"
    run_ranks(4, zoo.save, str(path))
    return path


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    as_bytes = [t.contiguous().flatten().view(torch.uint8) if t.numel() else t for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*as_bytes)


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
    [
        ...,
        3,
        -1,
        slice(2, 9, 3),
        slice(5, 2),
        (slice(1, 4), slice(2, None)),
        (..., 1),
        (slice(None), -2),
        (slice(0, -1, 2), ..., slice(1, 100, 2)),
    ],
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
    read_into = LocalReader.read_into

    def counting(reader: LocalReader, file: str, offset: int, target: memoryview) -> None:
        if file.endswith(".safetensors") and len(target) > 8:
            counted.append(len(target))
        read_into(reader, file, offset, target)

    with lightning_shardckpt.open(saved) as checkpoint:
        lazy = checkpoint[name]
        part = lazy[rows // 2 : rows // 2 + 1]  # opens and checks the files
        monkeypatch.setattr(LocalReader, "read_into", counting)
        assert same(lazy[rows // 2 : rows // 2 + 1], part)
    assert same(part, tensor[rows // 2 : rows // 2 + 1])
    assert 0 < sum(counted) <= part.nbytes + 2 * 4096, f"{sum(counted)} bytes for {part.nbytes} of {tensor.nbytes}"


def test_metadata_says_what_was_saved(saved: Path) -> None:
    expected = zoo.whole_tensors()
    found = lightning_shardckpt.metadata(saved)
    assert (found.step, found.epoch, found.world_size, found.topology) == (7, 3, 4, {"shard": 2, "tensor": 2})
    assert found.software is not None and found.software["torch"] == torch.__version__
    model = {name: t for name, t in found.tensors.items() if not name.startswith(("optimizer/", "trainer/"))}
    assert {n: (t.shape, t.nbytes) for n, t in model.items()} == {
        n: (tuple(t.shape), t.nbytes) for n, t in (expected | {"tied.float64": expected["rows.float64"]}).items()
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


def test_a_name_of_the_model_that_is_like_another_one_is_the_models(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("trainer/x", torch.zeros(500))
    lightning_shardckpt.save(tmp_path / "a", {"model": model, "x": torch.ones(500)})
    ((name, found),) = lightning_shardckpt.load_keys(tmp_path / "a", ["trainer/x"])
    assert name == "trainer/x" and same(found, torch.zeros(500))


@pytest.mark.parametrize(
    ("index", "says"),
    [
        (10**9, "dim 0: 1000000000 is out of range"),
        (slice(None, None, -1), "steps must be positive"),
        ((0, 0, 0, 0), "too many indices"),
        ("name", "only integers"),
        (True, "only integers"),
        (torch.tensor(True), "only integers"),
        ((..., ...), "too many indices"),
    ],
    ids=str,
)
def test_an_index_that_is_not_in_the_tensor_is_refused(saved: Path, index: Any, says: str) -> None:
    with lightning_shardckpt.open(saved) as checkpoint, pytest.raises(IndexError, match=says):
        checkpoint["rows.float64"][index]


def test_a_flipped_bit_is_found_where_it_is_read_and_only_there(saved: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(saved, tmp_path / "copy.ckpt"))
    with Checkpoint(LocalStorage(), str(copy)) as checkpoint:
        entry = Wholes(checkpoint).boxes("model", "rows.float64")[0].entry
    file = copy / entry.file
    content = bytearray(file.read_bytes())
    content[entry.begin] ^= 1
    file.write_bytes(content)
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
