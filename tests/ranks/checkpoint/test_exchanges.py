"""How often ranks exchange something in a load: to open, to match, to read and to finish."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_shardckpt import load, save
from lightning_shardckpt.distributed.ranks import Ranks
from tests.support.fabrics import fabric_of
from tests.support.pool import run_ranks


def exchanges(call: Callable[[], Any]) -> list[str]:
    """Return the phase of each step of ranks in a call."""
    phases = list[str]()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is Ranks.step.__code__:
            phases.append(frame.f_locals["phase"].split(" ")[0])

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(before)
    return phases


def trained(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(6, 4)).square().mean().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": seed, "mean": torch.ones(2) * seed}


def loads(path: str) -> list[list[str]]:
    save(path, trained(1))
    fabric = fabric_of("32-true")
    net = nn.Linear(3, 2)
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), 0.1))
    fabric.save(path + "-fabric", {"model": model, "optimizer": optimizer})
    return [
        exchanges(lambda: load(path, trained(2))),
        exchanges(lambda: load(path, {"model": trained(3)["model"]})),
        exchanges(lambda: fabric.load(path + "-fabric", {"model": model, "optimizer": optimizer})),
    ]


def test_a_load_has_four_exchanges(tmp_path: Path) -> None:
    for found in run_ranks(2, loads, str(tmp_path / "a")):
        assert found == [["opening", "comparing", "reading", "loading"]] * 3
