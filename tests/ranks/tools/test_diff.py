"""What the tool says has changed is what was changed. Oracle: torch, on the whole tensors before they were saved."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from lightning_shardckpt.checkpoint_io import ShardCkptIO
from lightning_shardckpt.cli import main
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.tools.diff import diff
from tests.support.faults import flip
from tests.support.pool import run_ranks

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e8m0fnu)
KINDS: dict[str, tuple[tuple[int, ...], torch.dtype, Any]] = {
    "rows": ((13, 7), torch.float32, Shard(0)),
    "half": ((9, 6), torch.float16, Shard(0)),
    "brain": ((9, 6), torch.bfloat16, Shard(1)),
    "double_waves": ((4, 6), torch.complex128, Shard(1)),
    "bytes": ((5, 3), torch.uint8, Shard(1)),
    "flags": ((5, 3), torch.bool, Shard(0)),
    "scalar": ((), torch.float32, Replicate()),
    "none": ((0, 3), torch.float32, Shard(0)),
    "large": ((1500, 1100), torch.float32, Shard(1)),  # more than a window
    **{str(dtype).removeprefix("torch."): ((16, 16), dtype, Shard(1)) for dtype in FLOAT8},
}
SAME = ("half", "large")


def drawn(name: str, is_changed: bool) -> Tensor:
    """A tensor, or the same with every third element changed; NaNs and infinities are among the 8-bit ones."""
    shape, dtype, _ = KINDS[name]
    generator = torch.Generator().manual_seed(len(name))
    if dtype in FLOAT8:
        bits = torch.arange(256, dtype=torch.uint8).view(shape)
        return (bits.flip(0) if is_changed else bits).view(dtype)
    values = torch.randint(0, 2, shape, generator=generator).to(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        values = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    if is_changed and name not in SAME and values.numel():
        flat = values.view(-1)
        flat[::3] = ~flat[::3] if dtype == torch.bool else flat[::3] * 3 + 1
    return values


def save(path: str, is_changed: bool, **state: Any) -> None:
    """On a mesh of all ranks, or alone with whole tensors."""
    ranks, io = Ranks.of_group(timeout_s=60), ShardCkptIO(sync_files=False)
    mesh = init_device_mesh("cpu", (ranks.world,), mesh_dim_names=("shard",))
    drawings = {name: drawn(name, is_changed) for name in KINDS}
    found = {n: distribute_tensor(t, mesh, [KINDS[n][2]], src_data_rank=None) for n, t in drawings.items()}
    io.attach(ranks, torch.nn.Module(), {"shard": ranks.world})
    io.save_checkpoint({"state_dict": found, **state}, path)


def hyper(lr: float) -> dict[str, Any]:
    group = {"lr": lr, "betas": (0.9, 0.99), "params": ["rows"]}
    state = {"rows": {"exp_avg": drawn("rows", False), "step": torch.tensor(7.0)}}
    more = {"width": 3, "name": "a", "nested": {"depth": 2 if lr > 0.1 else 4, 7: "odd"}}
    optimizer = {"state": state, "param_groups": [group]}
    return {"global_step": int(lr * 10), "epoch": 1, "hyper_parameters": more, "optimizer_states": [optimizer]}


def save_two(folder: str) -> None:
    for name in ("a", "same"):
        save(f"{folder}/{name}.ckpt", False, **hyper(0.5))


def save_others(folder: str) -> None:
    save(f"{folder}/alone.ckpt", False, **hyper(0.5))
    save(f"{folder}/changed.ckpt", True, **hyper(0.1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a and same were saved on 2 ranks, alone, with their values, and changed on one."""
    folder = tmp_path_factory.mktemp("diff")
    run_ranks(2, save_two, str(folder))
    run_ranks(1, save_others, str(folder))
    return folder


# ── the comparison ────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("b", ["same", "alone"])
def test_equal_bytes_are_the_same_on_any_topology(saved: Path, b: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(saved / "a.ckpt"), str(saved / f"{b}.ckpt")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"{len(KINDS) + 1} tensors the same"


def test_every_changed_tensor_is_found_with_the_size_of_the_change(saved: Path) -> None:
    found = diff(saved / "a.ckpt", saved / "changed.ckpt")
    different = {t["name"]: t for t in found["tensors"]}
    assert {t["kind"] for t in found["tensors"]} == {"different"}
    assert different.keys() == KINDS.keys() - {*SAME, "none"}
    for name, one in different.items():
        before, after = drawn(name, False), drawn(name, True)
        if before.dtype in FLOAT8:
            assert (one["largest"], one["relative"]) == (None, None), name
            continue
        kind = torch.complex128 if before.is_complex() else torch.float64
        a, b_ = (t.to(kind).flatten() for t in (before, after))
        largest = float((b_ - a).abs().max())
        assert one["largest"] == pytest.approx(largest, rel=1e-12), name
        assert one["relative"] == pytest.approx(largest / float(a.abs().max()), rel=1e-12), name


def test_every_byte_is_verified_and_trouble_has_its_own_status(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(shutil.copytree(saved / "alone.ckpt", tmp_path / "damaged.ckpt"))
    file = path / "model-dist-00000-shard-00001.safetensors"
    flip(file, -1)
    assert main(["diff", str(saved / "a.ckpt"), str(path)]) == 2
    error = capsys.readouterr().err
    assert "corrupted data of" in error and file.name in error and "Traceback" not in error
    assert main(["diff", str(saved / "a.ckpt"), str(saved / "nothing.ckpt")]) == 2
    assert "there is nothing at this path" in capsys.readouterr().err
    assert main(["diff", str(saved / "a.ckpt"), str(saved / "same.ckpt"), "--tensors", "duoble_*"]) == 2
    assert "neither checkpoint has a tensor whose name matches 'duoble_*'" in capsys.readouterr().err


# ── what is not the values ────────────────────────────────────────────────────────────────────────────────────────


def alone(path: Path, state: dict[str, Tensor]) -> Path:
    ShardCkptIO(sync_files=False).save_checkpoint({"state_dict": state}, path)
    return path


def test_tensors_that_came_went_or_have_another_shape_or_dtype_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = {"kept": torch.ones(3), "gone": torch.ones(2, 2), "shape": torch.ones(3), "dtype": torch.ones(3)}
    b = {"kept": torch.ones(3), "new": torch.ones(4), "shape": torch.ones(1, 3), "dtype": torch.ones(3).half()}
    paths = [str(alone(tmp_path / "a", a)), str(alone(tmp_path / "b", b))]
    assert main(["diff", *paths]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    for row in (
        ["shape", "F32", "3", "F32", "1", "×", "3", "changed"],
        ["dtype", "F32", "3", "F16", "3", "changed"],
        ["gone", "F32", "2", "×", "2", "–", "removed"],
        ["new", "–", "F32", "4", "added"],
    ):
        assert row in lines
    assert lines[-1] == ["1", "tensor", "the", "same,", "2", "changed,", "1", "removed,", "1", "added"]


def test_step_topology_and_values_are_compared(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = diff(saved / "a.ckpt", saved / "changed.ckpt", tensors="none")
    assert found["tensors"] == [], "only tensors decide"
    values = diff(saved / "a.ckpt", saved / "changed.ckpt")["values"]
    assert values["trainer/hyper_parameters/nested/depth"] == ["2", "4"]
    assert values["optimizer/0/param_groups/0/lr"] == ["0.5", "0.1"]
    assert not values.keys() & {"trainer/hyper_parameters/width", "optimizer/0/param_groups/0/betas"}
    assert found["about"] == {"step": ["5", "1"], "ranks": ["2", "1"], "topology/shard": ["2", "1"]}
    assert main(["diff", str(saved / "a.ckpt"), str(saved / "changed.ckpt")]) == 1
    out = capsys.readouterr().out
    assert re.search("optimizer/0/param_groups/0/lr +0.5 +0.1", out) and max(map(len, out.splitlines())) < 120
