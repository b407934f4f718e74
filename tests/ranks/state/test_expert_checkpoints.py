"""Experts, stacked in one sharded tensor or each a module of the rank that has it, move between 4, 2 and 1 ranks.

Oracle: weights and moments of each expert, computed from its number alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import lightning_shardckpt as ckpt
from tests.support.pool import run_ranks

EXPERTS, WIDTH = 8, 3


def of_expert(number: int) -> tuple[Tensor, Tensor]:
    """Weight and gradient."""
    generator = torch.Generator().manual_seed(number)
    return torch.randn(WIDTH, WIDTH, generator=generator), torch.randn(WIDTH, WIDTH, generator=generator)


def trained(numbers: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    """The weights of some experts after a step of AdamW, and its moments."""
    weight = nn.Parameter(torch.stack([of_expert(n)[0] for n in numbers]))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.stack([of_expert(n)[1] for n in numbers])
    optimizer.step()
    return weight.detach(), {k: v for k, v in optimizer.state[weight].items() if k != "step"}


class Stacked(nn.Module):
    """All experts in one tensor, which is cut by expert."""

    def __init__(self, *, blank: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.ones_(self.router.weight)
        here = _here()
        local = torch.stack([of_expert(n)[0] for n in here]) * (0 if blank else 1)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.experts = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = torch.stack([of_expert(n)[1] for n in _here()])
        self.experts.grad = DTensor.from_local(gradient, self.experts.device_mesh, [Shard(0)], run_check=False)  # type: ignore[attr-defined]
        optimizer.step()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        weight, moments = trained(_here())
        assert torch.equal(self.experts.to_local(), weight)  # type: ignore[operator]
        for name, expected in moments.items():
            assert torch.equal(optimizer.state[self.experts][name].to_local(), expected)


class Apart(nn.Module):
    """The experts of this rank alone, by their numbers."""

    def __init__(self, *, blank: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.ones_(self.router.weight)
        self.experts = nn.ModuleDict({str(n): nn.Linear(WIDTH, WIDTH, bias=False) for n in _here()})
        with torch.no_grad():
            for number, expert in self.experts.items():
                expert.weight.copy_(of_expert(int(number))[0] * (0 if blank else 1))

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        for number, expert in self.experts.items():
            expert.weight.grad = of_expert(int(number))[1]
        optimizer.step()

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        for number, expert in self.experts.items():
            (weight,), moments = trained([int(number)])
            assert torch.equal(expert.weight, weight)
            for name, (expected,) in moments.items():
                assert torch.equal(optimizer.state[expert.weight][name], expected)


KINDS: dict[str, Any] = {"stacked": Stacked, "apart": Apart}


def _here() -> list[int]:
    each = EXPERTS // dist.get_world_size()
    return list(range(dist.get_rank() * each, (dist.get_rank() + 1) * each))


def save(path: str) -> None:
    for kind in KINDS:
        module = KINDS[kind](blank=False)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        module.step(optimizer)
        ckpt.save(f"{path}, {kind}", {"model": module, "optimizer": optimizer})


def load(path: str, again: str) -> None:
    for kind in KINDS:
        module = KINDS[kind](blank=True)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
        ckpt.load(f"{path}, {kind}", {"model": module, "optimizer": optimizer}, strict=kind == "stacked")
        module.check(optimizer)
        ckpt.save(f"{again}, {kind}", {"model": module, "optimizer": optimizer})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*differences between")  # those of other ranks, of which no rank can know
def test_experts_move_between_worlds(tmp_path: Path) -> None:
    run_ranks(4, save, str(tmp_path / "4"))
    for world, before, then in ((2, "4", "2"), (1, "2", "1"), (4, "1", "4b")):
        run_ranks(world, load, str(tmp_path / before), str(tmp_path / then))
    for kind in KINDS:
        of_4, of_1, again = (set(ckpt.metadata(tmp_path / f"{name}, {kind}").tensors) for name in ("4", "1", "4b"))
        assert of_4 == of_1 == again
    with ckpt.open(tmp_path / "1, stacked") as opened:
        assert torch.equal(opened["experts"][...], trained(list(range(EXPERTS)))[0])
    with ckpt.open(tmp_path / "1, apart") as opened:
        for number in range(EXPERTS):
            assert torch.equal(opened[f"experts.{number}.weight"][...], trained([number])[0][0])
