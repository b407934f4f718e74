"""What an optimizer keeps beside the state of parameters is saved and taken back, and what it draws is of one process.

Oracle: torch's on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt import load, save
from lightning_shardckpt.consolidate import consolidate
from lightning_shardckpt.errors import StateError
from tests.support import tiny
from tests.support.pool import run_each, run_ranks
from tests.support.tiny import KINDS
from tests.support.whole_state import differing, whole

KEEPING = ["Counts", "Adds"]
FSDP2 = {"data_parallel_shard_size": 2}


def fit(strategy: Any, steps: int, kind: str, save: str | None = None, resume: str | None = None) -> dict[str, Any]:
    options: dict[str, Any] = {"plugins": []} if strategy == "ddp" else {}
    data = {"shuffle": False, "batch_size": 2 // dist.get_world_size()}
    run = tiny.fit(strategy, steps, model={"optimizer": kind}, data=data, save=save, resume=resume, **options)
    found: dict[str, Any] = run["state"]
    return found


def test_a_run_goes_on_with_all_of_it(tmp_path: Path) -> None:
    two, plain = ({kind: str(tmp_path / f"{name} {kind}.ckpt") for kind in KEEPING} for name in ("two", "plain"))
    expected = run_each({kind: (1, fit, "ddp", 3, kind, plain[kind]) for kind in KEEPING})
    straight = run_each({kind: (2, fit_twice, kind, two[kind]) for kind in KEEPING})
    resumes: dict[tuple[str, str], tuple[Any, ...]] = {}
    for kind in KEEPING:
        file = str(consolidate(two[kind], tmp_path / f"file {kind}.ckpt"))
        for name, strategy, path in (("loaded", {}, plain[kind]), ("back", "ddp", file), ("here", {}, two[kind])):
            resumes[kind, name] = (1, fit, strategy, 3, kind, None, path)
    found = {key: rank for key, (rank,) in run_each(resumes).items()}
    for kind in KEEPING:
        (saved,), back = expected[kind], found[kind, "back"]
        assert tiny.differences(found[kind, "loaded"], saved) == []
        assert [tiny.differences(*states) for states in straight[kind]] == [[], []]
        assert tiny.differences(back, found[kind, "here"]) == []
        own = {key: value for key, value in back.items() if "/own/" in key}
        assert tiny.differences(own, {key: value for key, value in saved.items() if "/own/" in key}) == [] and own


def fit_twice(kind: str, path: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collective: every rank must call it. Returns the state after five steps, and after three and two."""
    straight = fit(FSDP2, 5, kind)
    fit(FSDP2, 3, kind, save=path)
    return straight, fit(FSDP2, 5, kind, resume=path)


def stepped(kind: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Linear(4, 2)
    optimizer = KINDS[kind](model.parameters(), lr=0.1, momentum=0.9)  # type: ignore[call-arg]  # as SGD
    for _ in range(steps):
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("kind", KEEPING)
def test_functions_load_what_torch_would(kind: str, tmp_path: Path) -> None:
    saved, expected, found = stepped(kind, 3), stepped(kind, 0), stepped(kind, 0)
    save(tmp_path / "a", saved)
    load(tmp_path / "a", found)
    for key in ("model", "optimizer"):
        expected[key].load_state_dict(deepcopy(saved[key].state_dict()))
    assert differing(whole(found), whole(expected)) == [] == differing(whole(found), whole(saved))
    assert load(tmp_path / "a")["optimizer"].keys() == saved["optimizer"].state_dict().keys()
    alone = stepped(kind, 0)  # without names
    save(tmp_path / "b", {"optimizer": saved["optimizer"]})
    load(tmp_path / "b", {"optimizer": alone["optimizer"]})
    assert differing(whole(alone["optimizer"]), whole(saved["optimizer"])) == []


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    error = r"Scales has a state_dict that changes the state of parameters and adds \['mean', 'steps', 'warmup'\]"
    with pytest.raises(StateError, match=error):
        save(tmp_path / "a", stepped("Scales", 1))
    with pytest.raises(StateError, match=error):
        save(tmp_path / "a", {"optimizer": stepped("Scales", 1)["optimizer"]})


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
