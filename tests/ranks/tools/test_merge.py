"""Merges of checkpoints. Oracle: the mean by plain torch of the same models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import lightning_shardckpt
from lightning_shardckpt import load_from_checkpoint, merge, metadata
from lightning_shardckpt.cli import main
from lightning_shardckpt.errors import CorruptionError, MismatchError
from lightning_shardckpt.tools.digest import digest
from lightning_shardckpt.tools.verify import verify
from tests.support import tiny
from tests.support.pool import run_ranks

WEIGHTS = [0.5, 0.25, -0.125, 2.0, 1.0]
FROM_FIRST = ["mask", "norm.num_batches_tracked", "steps"]


class Net(nn.Module):
    """Every kind of tensor, one larger than a window, and a tie."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        self.embed, self.head = nn.Embedding(40, 6), nn.Linear(6, 40, bias=False)
        self.large, self.norm = nn.Linear(1500, 901), nn.BatchNorm1d(3)
        self.low = nn.Parameter(torch.empty(7, 5, dtype=torch.bfloat16))
        self.register_buffer("wide", torch.empty(9, dtype=torch.float64))
        self.register_buffer("phase", torch.empty(4, 2, dtype=torch.complex64))
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.register_buffer("steps", torch.tensor([seed, 3]))
        self.register_buffer("mask", torch.tensor([True, seed % 2 == 0]))
        for tensor in tensors_of(self).values():
            if tensor.is_floating_point() or tensor.is_complex():
                reals = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                reals.copy_(torch.randn(reals.shape, generator=draw))
        self.head.weight = self.embed.weight

    def get_extra_state(self) -> Any:
        return {"drawn": int(self.steps[0])}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def mean(states: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    found = dict[str, Tensor]()
    for name, first in states[0].items():
        if not (first.is_floating_point() or first.is_complex()):
            found[name] = first
            continue
        kind = torch.float64 if first.dtype == torch.float64 else torch.float32
        reals = [torch.view_as_real(s[name]) if first.is_complex() else s[name].to(kind) for s in states]
        total = reals[0] * weights[0]
        for tensor, weight in zip(reals[1:], weights[1:], strict=True):
            total = total.add(tensor, alpha=weight)
        total = total / sum(weights)
        found[name] = torch.view_as_complex(total) if first.is_complex() else total.to(first.dtype)
    return found


def tensors_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in net.state_dict().items() if isinstance(tensor, Tensor)}


def differing(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name in expected if not tiny.same(found[name], expected[name])]


def save_sharded(folder: str) -> None:
    """Seed 0 under FSDP2, seed 1 under tensor parallelism, seed 2 as a directory of torch's distributed checkpoint."""
    mesh = init_device_mesh("cpu", (2,))
    lightning_shardckpt.save(f"{folder}/0", {"model": fully_shard(Net(0), mesh=mesh), "step": 5})
    net = Net(1)
    parallelize_module(net.large, mesh, ColwiseParallel())
    lightning_shardckpt.save(f"{folder}/1", {"model": net}, size_per_shard=1)
    dcp.save({"model": tensors_of(fully_shard(Net(2), mesh=mesh))}, checkpoint_id=f"{folder}/2")


def load_sharded(path: str) -> tuple[list[str], Any]:
    net = Net(9)
    fully_shard(net, mesh=init_device_mesh("cpu", (2,)))
    lightning_shardckpt.load(path, {"model": net})
    whole = {name: tiny.whole(tensor) for name, tensor in tensors_of(net).items()}
    return differing(whole, mean([tensors_of(Net(seed)) for seed in range(5)], WEIGHTS)), net.extra


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Five models in five topologies and formats; the tie of seed 3 has one name."""
    folder = tmp_path_factory.mktemp("inputs")
    run_ranks(2, save_sharded, str(folder))
    named = {name: tensor for name, tensor in tensors_of(Net(3)).items() if name != "head.weight"}
    save_file(named, folder / "3.safetensors")
    torch.save({"state_dict": Net(4).state_dict()}, folder / "4.ckpt")
    return [str(folder / name) for name in ("0", "1", "2", "3.safetensors", "4.ckpt")]


def test_the_mean_of_any_topologies_and_formats_is_that_of_plain_torch(inputs: list[str], tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    assert merge(inputs, out, weights=WEIGHTS) == FROM_FIRST
    assert verify(out).findings == ()
    assert run_ranks(2, load_sharded, out)[0] == ([], {"drawn": 0})
    net = Net(9)
    rest = lightning_shardckpt.load(out, {"model": net})
    assert rest == {"merged": {"paths": inputs, "weights": WEIGHTS, "from_first": FROM_FIRST}}
    assert net.head.weight is net.embed.weight
    for seed in range(5):  # how its inputs were sharded does not matter
        lightning_shardckpt.save(tmp_path / str(seed), {"model": Net(seed)})
    merge([tmp_path / str(seed) for seed in range(5)], tmp_path / "alone", weights=WEIGHTS)
    assert digest(tmp_path / "alone")["components"] == digest(out)["components"]
    assert metadata(out).step == 5


def test_differences_are_one_error_and_leave_nothing(inputs: list[str], tmp_path: Path) -> None:
    other, out = Net(1), tmp_path / "out"
    other.wide = other.wide.int()
    other.low = nn.Parameter(torch.zeros(5, 7))
    other.added, other.head.weight = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(40, 6))
    del other.scale
    lightning_shardckpt.save(tmp_path / "other", {"model": other})
    with pytest.raises(MismatchError) as raised:
        merge([inputs[0], inputs[1], tmp_path / "other"], out)
    lines = sorted(line.split(": ", 1)[1] for line in str(raised.value).splitlines()[1:])
    assert lines == [
        "added is unexpected",
        "embed.weight and head.weight differ, expected one tied tensor",
        "low is F32 (5, 7), expected BF16 (7, 5)",
        "scale is missing",
        "wide is I32 (9,), expected F64 (9,)",
    ]
    for paths, weights in (([inputs[0]], None), (inputs[:2], [1.0]), (inputs[:2], [1, -1]), (inputs[:2], [1, 1e400])):
        with pytest.raises(ValueError, match="weight"):
            merge(paths, out, weights=weights)
    assert not out.exists()


def test_damage_is_found_and_leaves_what_was_there(inputs: list[str], tmp_path: Path) -> None:
    lightning_shardckpt.save(tmp_path / "damaged", {"model": Net(1)})
    merge(inputs[:2], tmp_path / "out")
    before = digest(tmp_path / "out")
    with pytest.raises(FileExistsError):
        merge(inputs[:2], tmp_path / "out", weights=[1, 2])
    with (tmp_path / "damaged" / "model-dist-00000-shard-00001.safetensors").open("r+b") as file:
        file.seek(100_000)
        byte = file.read(1)
        file.seek(100_000)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(CorruptionError, match="damaged"):
        merge([inputs[0], tmp_path / "damaged"], tmp_path / "out", overwrite=True)
    assert digest(tmp_path / "out") == before
    merge(inputs[:2], tmp_path / "out", weights=[1, 2], overwrite=True)
    assert digest(tmp_path / "out")["whole"] != before["whole"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "out"]


class Fitted(tiny.TinyLM):
    """Has hyper-parameters."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


def test_the_last_checkpoints_of_a_run_become_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the command. The result has the hyper-parameters, and starts another training."""
    run = tmp_path / "run"
    saver = ModelCheckpoint(run, every_n_train_steps=1, save_top_k=-1, save_last="link")
    tiny.train(Fitted(width=7), {}, 4, callbacks=[saver], enable_checkpointing=True)
    assert main(["merge", str(run), "--last", "3", "--output", str(run / "merged")]) == 0
    paths = [str(run / f"epoch=0-step={step}.ckpt") for step in (4, 3, 2)]
    assert ", ".join(paths) in capsys.readouterr().out
    states = [tensors_of(load_from_checkpoint(Fitted, path)) for path in paths]
    merged = load_from_checkpoint(Fitted, run / "merged")
    assert differing(tensors_of(merged), mean(states, [1, 1, 1])) == [] and merged.hparams["width"] == 7
    again = Fitted()
    tiny.train(again, {"pretrained": str(run / "merged")}, 0)
    assert differing(tensors_of(again), tensors_of(merged)) == []
    assert main(["merge", str(run), "--last", "5", "--output", str(run / "b")]) == 1  # results of merges don't count
    assert "has 4 complete checkpoints" in capsys.readouterr().err


def test_urls(inputs: list[str]) -> None:
    lightning_shardckpt.save("memory://merge/a", {"model": Net(0)})
    assert merge(["memory://merge/a", inputs[1]], "memory://merge/out", weights=[1, 3]) == FROM_FIRST
    net = Net(9)
    lightning_shardckpt.load("memory://merge/out", {"model": net})
    assert differing(tensors_of(net), mean([tensors_of(Net(0)), tensors_of(Net(1))], [1, 3])) == []
