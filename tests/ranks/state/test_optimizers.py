"""Optimizer state survives save and load whatever the optimizer and its groups. Oracle: the state before the save."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_shardckpt as ckpt
from tests.support import tiny
from tests.support.pool import run_ranks


class Groups(tiny.TinyLM):
    """Uneven groups, an empty one, a parameter without gradient, two optimizers, hyper-parameters of odd types."""

    def __init__(self) -> None:
        super().__init__(frozen=False)
        self.automatic_optimization = False
        self.unused = nn.Parameter(torch.randn(5, 3))

    def configure_optimizers(self) -> Any:
        groups = [
            {"params": [self.unused, *self.blocks.parameters()], "lr": 3e-3, "note": ("any", {"thing": 1})},
            {"params": [], "lr": 7.0},
            {"params": [self.gate], "betas": (0.5, 0.6)},
        ]
        rest = [*self.embed.parameters(), *self.head.parameters(), self.scale]
        return [torch.optim.AdamW(groups, lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    def training_step(self, batch: Any, index: int) -> None:
        loss = super().training_step(batch, index)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()


class Unfrozen(tiny.TinyLM):
    """With ``frozen`` as at the save, or not: then what is new begins without state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


class Adafactored(tiny.TinyLM):
    """torch's Adafactor keeps a row and a column per matrix; it does not run on DTensors."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor(self.parameters(), lr=1e-2)


def train(
    module: tiny.TinyLM, strategy: Any, steps: int, save: str | None = None, resume: str | None = None
) -> dict[str, Any]:
    pl.seed_everything(4 if resume is None else 5)
    told = resume is not None and not module.strict_loading and dist.get_rank() == 0
    with pytest.warns(UserWarning, match="blocks.0.up.weight") if told else nullcontext():
        run = tiny.train(module, strategy, steps, save=save, resume=resume)
    return tiny.full_state(module, run.optimizers)


def train_groups(*paths: str | None) -> dict[str, Any]:
    return train(Groups(), {}, 4, *paths)  # Lightning counts a step per optimizer


def test_two_optimizers_with_uneven_and_empty_groups(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(3, train_groups, path)[0]
    assert not any("unused/state" in key for key in expected)
    for found in run_ranks(2, train_groups, None, path):
        assert tiny.differences(expected, found) == []


def save_before_the_first_step(path: str) -> dict[str, Any]:
    return train(tiny.TinyLM(), {}, 0, path)


def test_saving_before_the_first_step_takes_no_step(tmp_path: Path) -> None:
    for found in run_ranks(2, save_before_the_first_step, str(tmp_path / "a.ckpt")):
        assert found and not any("/state/" in key for key in found)


def train_unfrozen(frozen: bool, *paths: str | None) -> dict[str, Any]:
    module = Unfrozen(frozen=frozen)
    module.strict_loading = frozen
    return train(module, {}, 2, *paths)


def test_changed_set_of_trainable_parameters(tmp_path: Path) -> None:
    """Without strict loading, what was trained before keeps its state, and what is new begins without one."""
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(2, train_unfrozen, True, path)[0]
    for found in run_ranks(3, train_unfrozen, False, None, path):
        kept = {k: v for k, v in found.items() if "blocks.0.up" not in k or k.startswith("model/")}
        assert tiny.differences(expected, kept) == []
        assert not any("blocks.0.up" in k and "/state/" in k for k in found)


def train_adafactor(*paths: str | None) -> dict[str, Any]:
    return train(Adafactored(frozen=False), "ddp", 2, *paths)


def test_state_that_is_not_shaped_like_its_parameter(tmp_path: Path) -> None:
    path = str(tmp_path / "a.ckpt")
    expected = run_ranks(2, train_adafactor, path)[0]
    assert any(k.endswith("state/row_var") for k in expected)
    for found in run_ranks(2, train_adafactor, None, path):
        assert tiny.differences(expected, found) == []


def halves(*, tied: bool) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if tied:
        module[1].weight = module[0].weight
    return module, torch.optim.AdamW(module.parameters())


def test_what_was_tied_and_is_not_any_more_has_state_of_its_own(tmp_path: Path) -> None:
    (saved, before), (found, after) = halves(tied=True), halves(tied=False)
    saved(torch.ones(2, 4)).sum().backward()
    before.step()
    ckpt.save(tmp_path / "a", {"model": saved, "optimizer": before})
    for _ in range(2):  # into new memory, then into what is there
        ckpt.load(tmp_path / "a", {"model": found, "optimizer": after})
        first, second = (after.state[layer.weight] for layer in found)
        for key, value in before.state[saved[0].weight].items():
            assert torch.equal(first[key], value) and torch.equal(second[key], value)
            assert first[key].data_ptr() != second[key].data_ptr(), key
