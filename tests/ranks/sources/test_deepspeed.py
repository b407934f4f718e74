"""Directories that DeepSpeed itself wrote are read. Oracles: its own converter, and training that it continued itself.

``golden/deepspeed-0.19.zip`` was made once, by ``golden/make_deepspeed.py``, and is never made again. DeepSpeed is
not installed here.
"""

from __future__ import annotations

import hashlib
import pickle
import shutil
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_shardckpt import load
from lightning_shardckpt import open as open_checkpoint
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import ShardCkptError
from tests.support import tiny
from tests.support.pool import ROOT, run_ranks

PACKED = ROOT / "tests" / "golden" / "deepspeed-0.19.zip"
MADE = "4faa6000b7ba635637f5718b30dcb6a2be9ba42606da7c1e77e03045fef85b94"
STAGES = ("zero1", "zero2", "zero3", "half", "several")
MASTERS = {name: name for name in STAGES} | {f"universal-{name}": name for name in ("zero1", "zero3", "several")}
"""The name of the expected tensors, by directory."""


class Net(nn.Module):
    """As ``golden/make_deepspeed.py`` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.frozen = nn.Embedding(33, 8), nn.Linear(8, 33), nn.Linear(8, 5)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 33, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(3))
        self.frozen.requires_grad_(False)


class Lit(pl.LightningModule):
    """As ``golden/make_deepspeed.py`` has it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 33), nn.ReLU(), nn.LayerNorm(33), nn.Linear(33, 5))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def train_dataloader(self) -> DataLoader[Any]:
        random = torch.Generator().manual_seed(1)
        data = TensorDataset(torch.randn(32, 7, generator=random), torch.randint(5, (32,), generator=random))
        return DataLoader(data, 4, sampler=DistributedSampler(data, shuffle=False))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=7.0)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert hashlib.sha256(PACKED.read_bytes()).hexdigest() == MADE
    folder = tmp_path_factory.mktemp("deepspeed")
    with zipfile.ZipFile(PACKED) as archive:
        archive.extractall(folder)
    return folder


def whole(tensor: Tensor) -> Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach()


def loaded(path: str, shard: bool) -> dict[str, Tensor]:
    """The tensors that a load gives, by the names of DeepSpeed's converter, and the settings of the param groups."""
    torch.manual_seed(5)
    net = Net()
    if shard:
        for part in (net.up, net.norm):
            fully_shard(part)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim == 1]}]
    optimizer = torch.optim.AdamW(groups, lr=7.0, weight_decay=7.0)
    load(path, {"model": net, "optimizer": optimizer})  # frozen parameters of bf16
    assert net.head.weight is net.embed.weight and net.seen.tolist() == [0.0, 1.0, 2.0]
    # StepLR halves the rate after two steps
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(5e-3, 0.1), (2.5e-3, 0.0)]
    found = {f"{name}/fp32": whole(parameter) for name, parameter in net.named_parameters()}
    for name, parameter in net.named_parameters():
        found |= {f"{name}/{key}": whole(value) for key, value in optimizer.state[parameter].items()}
    return found


def differing(golden: Path, name: str, found: dict[str, Tensor]) -> list[str]:
    """The tensors that differ from those that DeepSpeed's converter found; it writes those of ZeRO 3 flat."""
    expected = safetensors.torch.load_file(golden / f"{name}.safetensors")
    expected = {key: value for key, value in expected.items() if not key.startswith(("head.", "frozen.", "seen/"))}
    steps = {key for key in found if key.endswith("/step")}
    missing = {key for key in found if key.startswith("frozen.")} | steps
    assert len(steps) == 5 and all(found[key] == 3 for key in steps)
    assert expected.keys() - steps == found.keys() - missing
    return [key for key, value in expected.items() if not torch.equal(found[key].view(value.shape), value)]


@pytest.mark.parametrize("name", MASTERS)
def test_weights_and_optimizer_state_are_those_that_deepspeeds_converter_finds(golden: Path, name: str) -> None:
    found = loaded(str(golden / name), shard=False)
    assert differing(golden, MASTERS[name], found) == []
    frozen = loaded(str(golden / "zero0"), shard=False)["frozen.weight/fp32"]
    low = {"zero2": torch.bfloat16, "half": torch.float16, "several": torch.bfloat16}
    kept = frozen.to(low.get(name.removeprefix("universal-"), torch.float32)).float()
    assert torch.equal(found["frozen.weight/fp32"], kept)


def test_each_rank_of_another_topology_gets_its_parts(golden: Path) -> None:
    for name in ("zero2", "several"):
        for found in run_ranks(3, loaded, str(golden / name), True):
            assert differing(golden, name, found) == []


def continued(path: str) -> dict[str, Tensor]:
    trainer = tiny.trainer({"data_parallel_shard_size": 2}, max_epochs=2)
    trainer.fit(module := Lit(), ckpt_path=path)
    assert (trainer.current_epoch, trainer.global_step) == (2, 8)
    return {f"{name}/fp32": whole(parameter) for name, parameter in module.named_parameters()}


def test_a_run_of_lightnings_strategy_ends_as_deepspeed_would_have_ended_it(golden: Path) -> None:
    expected = safetensors.torch.load_file(golden / "lightning.safetensors")
    for found in run_ranks(2, continued, str(golden / "lightning.ckpt")):
        torch.testing.assert_close(found, {key: value for key, value in expected.items() if key in found})


def test_commands_read_it_too(golden: Path, tmp_path: Path) -> None:
    with open_checkpoint(golden / "zero3") as checkpoint:
        assert torch.equal(checkpoint["up.weight"][30:], loaded(str(golden / "zero3"), False)["up.weight/fp32"][30:])
    state = torch.load(consolidate(golden / "lightning.ckpt", tmp_path / "out.pt"), weights_only=False)
    assert state["global_step"] == 4 and state["optimizer_states"][0]["state"] and len(state["state_dict"]) == 6


def damage(golden: Path, path: Path, name: str) -> Path:
    return Path(shutil.copytree(golden / name, path / name)) / "step3"


@pytest.mark.parametrize(
    ("name", "renamed", "said"),
    [
        ("zero1", ("zero_pp_rank_1_mp_rank_00_optim_states.pt", "kept"), "1 files of an optimizer on 2"),
        ("zero1", ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "kept"), r"the files of ranks \[0\] are missing"),
        ("zero1", ("mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"), "is of model parallelism"),
        ("zero3", ("zero_pp_rank_1_mp_rank_00_model_states.pt", "layer_01-model_00-model.pt"), "is of .*a pipeline"),
        ("zero3", ("zero_pp_rank_1_mp_rank_00_model_states.pt", "expert_0_model_states.pt"), "is of .*experts"),
    ],
)
def test_what_is_not_whole_or_not_read_is_refused_by_name(
    golden: Path, tmp_path: Path, name: str, renamed: tuple[str, str], said: str
) -> None:
    folder = damage(golden, tmp_path, name)
    (folder / renamed[0]).rename(folder / renamed[1])
    with pytest.raises(ShardCkptError, match=said):
        load(str(tmp_path / name), {"model": Net()})


def test_a_file_that_would_execute_code_is_not_read(golden: Path, tmp_path: Path) -> None:
    folder = damage(golden, tmp_path, "zero1")
    (folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(pickle.dumps(subprocess.Popen))
    with pytest.raises(ShardCkptError, match="optim_states"):
        load(str(tmp_path / "zero1"), {"model": Net()})


def test_vectors_of_another_length_are_refused(golden: Path, tmp_path: Path) -> None:
    """Parameters would be cut from other places of the vectors."""
    folder = damage(golden, tmp_path, "zero3")
    classes: list[Any] = [
        (nn.Module, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
        (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    ]
    for file in folder.glob("*_optim_states.pt"):
        with torch.serialization.safe_globals(classes):
            content = torch.load(file, weights_only=True)
        state = content["optimizer_state_dict"]
        del state["loss_scaler"]
        state["fp32_flat_groups"][0] = nn.functional.pad(state["fp32_flat_groups"][0], (0, 6))
        torch.save(content, file)
    with pytest.raises(ShardCkptError, match="vector 0 have 264 of its 270 elements"):
        load(str(tmp_path / "zero3"), {"model": Net()})
