"""What an optimizer draws is of one process, and what it keeps beside the state of parameters is refused.

Oracle: torch's on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import StateError
from tests.support import tiny
from tests.support.pool import run_ranks
from tests.support.tiny import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_state_of_no_parameter_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = KINDS[kind](model.parameters(), lr=0.1)  # type: ignore[call-arg]  # as SGD
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    state, words = {"model": model, "optimizer": optimizer}, "'k'" if kind == "Counts" else "'base_optimizer'"
    for save in (lambda: ckpt.save(tmp_path / "a", state), lambda: ckpt.save(tmp_path / "a", {"optimizer": optimizer})):
        with pytest.raises(StateError, match=f"{kind} has state of its own, {words}"):
            save()
    torch.save({"optimizer_states": [optimizer.state_dict()], "state_dict": model.state_dict()}, tmp_path / "b.ckpt")
    with pytest.raises(StateError, match="optimizer_states/0"):
        ckpt.load(tmp_path / "b.ckpt", {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})


# ── noise ───────────────────────────────────────────────────────────────────────────────────────────────────────────


TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layer": "colwise_gather_output"}}


class NoisySGD(torch.optim.SGD):  # Langevin dynamics
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's overloads
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
        return found


class Scaled(pl.LightningModule):  # a number as a parameter, which FSDP leaves whole, and a layer that it shards
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.layer = nn.Linear(4, 4)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return (self.layer(batch) * self.scale).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return NoisySGD(self.parameters(), lr=0.125)


def fit_noisy(
    strategy: dict[str, Any],
    steps: int,
    *,
    save: str | None = None,
    resume: str | None = None,
    module: type[pl.LightningModule] = Scaled,
) -> dict[str, Tensor]:
    """Train on samples that are all the same, so that ranks and one process have the same gradients."""
    pl.seed_everything(3)
    ranks = torch.distributed.get_world_size() // strategy.get("tensor_parallel_size", 1)
    data = DataLoader([torch.ones(4)] * 2 * ranks)  # type: ignore[arg-type]  # a list is a dataset
    tiny.train(trained := module(), strategy, steps, data=data, save=save, resume=resume)  # it ends with an epoch
    return {name: tiny.whole(value) for name, value in trained.state_dict().items()}


def train_and_resume(directory: str) -> list[dict[str, Tensor]]:
    """What there is after the first resume, and after one from what that saved."""
    fit_noisy(TP2, 2, save=f"{directory}/tp.ckpt")
    return [
        fit_noisy({}, 6, resume=f"{directory}/tp.ckpt", save=f"{directory}/fsdp.ckpt"),
        fit_noisy({}, 8, resume=f"{directory}/fsdp.ckpt"),
    ]


def resume_alone(path: str) -> list[dict[str, Tensor]]:
    return [fit_noisy({}, steps, resume=path) for steps in (6, 8)]


def test_noise_of_an_optimizer_is_that_of_one_process_after_a_change_of_topology(tmp_path: Path) -> None:
    on_two = run_ranks(2, train_and_resume, str(tmp_path))
    (alone,) = run_ranks(1, resume_alone, str(tmp_path / "tp.ckpt"))
    for rank in on_two:
        assert [tiny.differences(*states) for states in zip(rank, alone, strict=True)] == [[], []]


class ShardNoise(torch.optim.SGD):  # adds noise to the shard that this rank has
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]  # torch's overloads
        found = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                shard = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                shard.add_(torch.randn(shard.shape), alpha=0.01)
        return found


class OneRow(Scaled):  # its parameters have one row, so the second rank has none of them
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ShardNoise(self.layer.parameters(), lr=0.1)


def fit_one_row() -> dict[str, Tensor]:
    return fit_noisy({}, 4, module=OneRow)


def test_a_rank_that_draws_nothing_since_its_shards_are_empty_does_not_hang() -> None:
    on_two, (alone,) = run_ranks(2, fit_one_row), run_ranks(1, fit_one_row)
    assert [tiny.differences(found, alone) for found in on_two] == [[], []]
