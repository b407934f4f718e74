"""Attributes of Lightning's objects are where `compat.lightning_attributes` looks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.utils.data import DataLoader

from lightning_shardckpt.compat.lightning_attributes import (
    fabric_original,
    loader_of_fabric,
    override_methods,
)
from tests.support.boring import trainer


def test_what_setup_returns_leads_to_the_module_that_it_was_given() -> None:
    module = nn.Linear(2, 2)
    found = Fabric(accelerator="cpu", devices=1).setup(module)
    assert fabric_original(found) is module and fabric_original(module) is None


def test_what_setup_dataloaders_returns_leads_to_the_loader_that_it_was_given() -> None:
    loader = DataLoader([1, 2])  # type: ignore[arg-type]
    found = Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)
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
