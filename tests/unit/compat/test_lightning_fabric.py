"""What Fabric keeps to itself still means what we take it for."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_shardckpt.compat import lightning_fabric as compat
from lightning_shardckpt.compat.torch_modules import fabric_original, loader_of_fabric, override_methods
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support.boring import trainer
from tests.support.pool import run_ranks


def group_made(before: dict[str, str]) -> tuple[set[str], dict[str, str]]:
    names = ("MASTER_ADDR", "MASTER_PORT")
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(before)
    found = set()
    for _ in range(2):
        compat.init_process_group(LightningEnvironment(), torch.device("cpu"), timeout_s=30)
        found.add(f"{dist.get_backend()} {id(dist.group.WORLD)}")
    return found, {name: os.environ[name] for name in names if name in os.environ}


@pytest.mark.parametrize("before", [{}, {"MASTER_ADDR": "127.0.0.1"}], ids=["nothing", "an address"])
def test_a_process_group_is_made_once_and_the_environment_of_a_process_alone_stays(before: dict[str, str]) -> None:
    ((groups, after),) = run_ranks(1, group_made, before, init_process_group=False)
    assert len(groups) == 1 and groups.pop().startswith("gloo") and after == before


def test_optimizer_state_moves_but_for_the_steps() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.ones(3)
    optimizer.step()
    compat.optimizer_to_device(optimizer, torch.device("meta"))
    state = optimizer.state[weight]
    assert state["exp_avg"].device.type == "meta" and weight.device.type == "cpu"


class OwnBackward(SingleDeviceStrategy):
    """Fabric lets backward passes run anywhere under strategies that have no backward of their own."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        super().backward(*args, **kwargs)


def test_a_backward_is_allowed_only_within() -> None:
    model = Fabric(accelerator="cpu", devices=1, strategy=OwnBackward()).setup_module(torch.nn.Linear(2, 1))
    with compat.disable_backward_guard():
        assert compat.is_in_backward()
        model(torch.ones(1, 2)).sum().backward()
    assert not compat.is_in_backward()
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        model(torch.ones(1, 2)).sum().backward()


def test_fabric_is_what_it_was_when_the_last_strategy_is_gone() -> None:
    before, first, second = Fabric._setup_dataloader, ShardedStrategy(), ShardedStrategy()
    compat.keep_samplers_of(first)
    compat.keep_samplers_of(second)
    del first
    gc.collect()
    assert Fabric._setup_dataloader is not before
    del second
    gc.collect()
    assert Fabric._setup_dataloader is before


# ── attributes of Lightning's objects are where `compat.torch_modules` looks for them ──────────────────────────


def test_what_fabric_returns_leads_to_what_it_was_given() -> None:
    fabric, module, loader = Fabric(accelerator="cpu", devices=1), nn.Linear(2, 2), DataLoader([1, 2])  # type: ignore[arg-type]
    assert fabric_original(fabric.setup(module)) is module and fabric_original(module) is None
    found = fabric.setup_dataloaders(loader)
    assert found is not loader and loader_of_fabric(found) is loader and loader_of_fabric(loader) is loader


def test_a_trainer_clips_as_it_is_told_until_the_undo(tmp_path: Path) -> None:
    for name in ("norm", "value"):
        clipped: list[Any] = []
        run = trainer(tmp_path, max_steps=1, gradient_clip_val=0.5, gradient_clip_algorithm=name)
        clip = {f"clip_grad_by_{name}": lambda *args, c=clipped: c.append(args[1])}
        undo = override_methods(run.precision_plugin, **clip)
        run.fit(BoringModel())
        undo()
        undo()
        assert clipped == [0.5] and not vars(run.precision_plugin).keys() & clip.keys()
