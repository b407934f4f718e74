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


def _here() -> list[int]:
    each = EXPERTS // dist.get_world_size()
    return list(range(dist.get_rank() * each, (dist.get_rank() + 1) * each))


def placed(local: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


class Experts(nn.Module):
    """All experts in one tensor, which is cut by expert; or those of this rank alone, by their numbers."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.ones_(self.router.weight)
        stack = torch.stack([of_expert(n)[0] for n in _here()])
        apart = nn.ParameterDict({str(n): nn.Parameter(stack[i].clone()) for i, n in enumerate(_here())})
        self.stacked, self.experts = stacked, nn.Parameter(placed(stack)) if stacked else apart
        self.optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)

    def step(self) -> None:
        gradients = torch.stack([of_expert(n)[1] for n in _here()])
        if self.stacked:
            self.experts.grad = placed(gradients)
        else:
            for expert, gradient in zip(self.experts.values(), gradients, strict=True):
                expert.grad = gradient
        self.optimizer.step()

    def check(self) -> None:
        (weights, moments), state = trained(_here()), self.optimizer.state
        experts = [self.experts] if self.stacked else list(self.experts.values())
        join = (lambda parts: parts[0].to_local()) if self.stacked else torch.stack
        assert torch.equal(join([expert.detach() for expert in experts]), weights)
        for name, expected in moments.items():
            assert torch.equal(join([state[expert][name] for expert in experts]), expected)


def save(path: str) -> None:
    for stacked in (True, False):
        (module := Experts(stacked)).step()
        ckpt.save(f"{path}, {stacked}", {"model": module, "optimizer": module.optimizer})


def load(path: str, again: str) -> None:
    for stacked in (True, False):
        module = Experts(stacked)
        state: dict[str, Any] = {"model": module, "optimizer": module.optimizer}
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        ckpt.load(f"{path}, {stacked}", state, strict=stacked)
        module.check()
        ckpt.save(f"{again}, {stacked}", state)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*differences between")  # those of other ranks, of which no rank can know
def test_experts_move_between_worlds(tmp_path: Path) -> None:
    run_ranks(4, save, str(tmp_path / "4"))
    for world, before, then in ((2, "4", "2"), (1, "2", "1"), (4, "1", "4b")):
        run_ranks(world, load, str(tmp_path / before), str(tmp_path / then))
    for stacked in (True, False):
        names = [set(ckpt.metadata(tmp_path / f"{name}, {stacked}").tensors) for name in ("4", "1", "4b")]
        assert names[0] == names[1] == names[2]
    with ckpt.open(tmp_path / "1, True") as opened:
        assert torch.equal(opened["experts"][...], trained(list(range(EXPERTS)))[0])
    with ckpt.open(tmp_path / "1, False") as opened:
        for number in range(EXPERTS):
            assert torch.equal(opened[f"experts.{number}"][...], trained([number])[0][0])
