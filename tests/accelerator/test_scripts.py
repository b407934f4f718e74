"""Scripts of Fabric and of plain torch on pretend GPUs. Oracles: the same on CPUs, and the state that was saved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_shardckpt import load
from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy
from tests.accelerator.ranks import run_on_gpus
from tests.accelerator.topologies import REPLICAS, ROUNDING
from tests.support.pool import run_ranks
from tests.support.tiny import differences, whole

pytestmark = pytest.mark.gpu

SAVED, LAST = 2, 4
State = dict[str, Any]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 37)
        self.gate = nn.Parameter(torch.ones(3, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x).relu()
        return nn.functional.cross_entropy(self.head(x * self.gate.mean(0)).flatten(0, 1), tokens[:, 1:].flatten())


def _net() -> _Net:
    torch.manual_seed(3)
    return _Net()


def _batches() -> TensorDataset:
    return TensorDataset(torch.randint(37, (16, 9), generator=torch.Generator().manual_seed(1)))


def _state(model: nn.Module) -> State:
    return {name: whole(tensor).cpu() for name, tensor in model.state_dict().items()}


def _fabric(strategy: Mapping[str, Any], accelerator: str, path: str, resume: bool) -> tuple[list[float], State]:
    """Train on, with an asynchronous save in the middle, or from it; return the losses and the weights of the save."""
    sharded, io = ShardedStrategy(**strategy), ShardCkptIO(use_async=True)
    fabric = Fabric(accelerator=accelerator, devices=int(os.environ["WORLD_SIZE"]), strategy=sharded, plugins=[io])
    fabric.launch()
    net = _net()
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True))
    if resume:
        fabric.load(path, {"model": model, "optimizer": optimizer})
    losses, then = [], _state(model)
    for number, (tokens,) in enumerate(fabric.setup_dataloaders(DataLoader(_batches(), batch_size=2)), 1):
        if number > LAST or (resume and number <= SAVED):
            continue
        loss = model(tokens)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach())))
        if number == SAVED and not resume:
            then = _state(model)
            fabric.save(path, {"model": model, "optimizer": optimizer})
    io.wait()
    return losses, then


def _weights(path: str) -> State:
    model = _Net()
    load(path, {"model": model})
    return _state(model)


def test_a_script_of_fabric_trains_as_on_cpus_and_resumes_on_another_topology(tmp_path: Path) -> None:
    path = str(tmp_path / "middle.ckpt")
    (losses, then), _ = run_on_gpus(2, _fabric, {}, "cuda", path, False)
    on_cpus = run_ranks(2, _fabric, {}, "cpu", str(tmp_path / "cpus.ckpt"), False)[0][0]
    resumed, _ = run_on_gpus(2, _fabric, REPLICAS, "cuda", path, True)[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(on_cpus), rtol=ROUNDING, atol=0)
    torch.testing.assert_close(torch.tensor(resumed), torch.tensor(losses[SAVED:]), rtol=ROUNDING, atol=0)
    (loaded,) = run_ranks(1, _weights, path, init_process_group=False)
    assert differences(then, loaded) == []
