"""A resumed run continues the order of the data on another number of data-parallel ranks.

Oracle: the permutation that torch draws from the seed and the epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
)

from tests.support import tiny
from tests.support.pool import run_ranks

SEED = 7
TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.0": "colwise", "layers.2": "rowwise"}}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
HSDP: dict[str, Any] = {"data_parallel_replicate_size": 2}


class Numbered(Dataset[Any]):
    """Each sample is its own number; what was read in this process is kept."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)] * 4)


class Net(pl.LightningModule):
    """Notes the samples of each step: (epoch, batch_idx, numbers)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.steps: list[tuple[int, int, list[int]]] = []

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.steps.append((self.trainer.current_epoch, batch_idx, batch[:, 0].int().tolist()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch / 100).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader(count: int = 53, batch_size: int = 2, sampler: str = "", **more: Any) -> Any:
    """A loader of numbers; what ``sampler`` names draws their order, of all ranks together unless it says otherwise."""
    numbers = Numbered(count)
    if sampler == "subset":
        return DataLoader(numbers, batch_size, sampler=SubsetRandomSampler(range(0, count, 2)), **more)
    if sampler == "own generator":
        drawn = SubsetRandomSampler(range(0, count, 2), generator=torch.Generator().manual_seed(5))
        return DataLoader(numbers, batch_size, sampler=drawn, **more)
    if sampler == "two loaders":
        return CombinedLoader({"long": DataLoader(numbers, batch_size), "short": DataLoader(Numbered(24), batch_size)})
    if sampler == "pairs":
        return DataLoader(numbers, batch_sampler=Pairs(SequentialSampler(numbers), batch_size, drop_last=False))
    if sampler == "stream":
        return DataLoader(Stream(), batch_size)
    return DataLoader(numbers, batch_size, shuffle=True, **more)


class Pairs(BatchSampler):
    """Makes batches in its own way, for all that is known from outside."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(i)) for i in range(40))


Leg = tuple[int, dict[str, Any], int, dict[str, Any], dict[str, Any]]
FSDP: dict[str, Any] = {}
# Legs of a run, one after another: ranks, strategy, step of the save (0: it ends with its second epoch), loader,
# options of the Trainer. In epoch 1, 53 samples are left to the last of them.
RUNS: dict[str, list[Leg]] = {
    "4, 3, 5 ranks": [(4, FSDP, 2, {}, {}), (3, FSDP, 5, {}, {}), (5, FSDP, 0, {}, {})],
    "fsdp2 x tp2, fsdp3, pp2 x fsdp2": [
        (4, TP2, 4, {"batch_size": 3}, {}),
        (3, FSDP, 7, {}, {}),
        (4, PP2, 0, {"batch_size": 4}, {}),
    ],
    "pp2 x fsdp2, one process, hsdp": [(4, PP2, 1, {}, {}), (1, FSDP, 4, {"num_workers": 1}, {}), (4, HSDP, 0, {}, {})],
}


@dataclass(frozen=True)
class Found:
    """What one rank saw: its data-parallel rank, (epoch, batch_idx, samples) of each step, warnings at the resume."""

    rank: int
    steps: list[tuple[int, int, list[int]]]
    warnings: list[str]


def run_leg(directory: str, number: int, leg: Leg) -> Found:
    _, strategy, stop, data, options = leg
    pl.seed_everything(SEED if number == 0 else 100 + number)
    limits: dict[str, Any] = {"max_steps": stop} if stop else {"max_epochs": 2}
    saving = [tiny.SaveAt(stop, f"{directory}/{number}.ckpt")] if stop else []
    run = tiny.trainer(strategy, callbacks=saving, **limits, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(net := Net(), loader(**data), ckpt_path=f"{directory}/{number - 1}.ckpt" if number else None)
    said = [str(each.message) for each in caught if "samples" in str(each.message) or "divide" in str(each.message)]
    return Found(run.strategy.distributed_sampler_kwargs["rank"], net.steps, said)


def run_some(directory: str, number: int, some: dict[str, Leg]) -> dict[str, Found]:
    return {name: run_leg(f"{directory}/{name}", number, leg) for name, leg in some.items()}


@dataclass(frozen=True)
class GlobalLeg:
    """What all ranks saw: (epoch, batch_idx, samples of all ranks in the order of the ranks) of each step."""

    steps: list[tuple[int, int, list[int]]]
    warnings: set[str]

    def samples(self, epoch: int) -> list[int]:
        return [sample for in_epoch, _, samples in self.steps if in_epoch == epoch for sample in samples]

    def sizes(self, epoch: int) -> list[int]:
        return [len(samples) for in_epoch, _, samples in self.steps if in_epoch == epoch]


def joined(ranks: list[Found]) -> GlobalLeg:
    by_rank = {found.rank: found.steps for found in ranks}
    assert all(by_rank[found.rank] == found.steps for found in ranks), "ranks of one data-parallel rank differ"
    steps = []
    for parts in zip(*(by_rank[rank] for rank in sorted(by_rank)), strict=True):
        ((epoch, index),) = {part[:2] for part in parts}
        width = max(len(part[2]) for part in parts)
        steps.append((epoch, index, [part[2][i] for i in range(width) for part in parts if i < len(part[2])]))
    return GlobalLeg(steps, {said for found in ranks for said in found.warnings})


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[GlobalLeg]]:
    """The legs of all runs; those on as many ranks run in the same processes."""
    directory = str(tmp_path_factory.mktemp("runs"))
    found: dict[str, list[GlobalLeg]] = {name: [] for name in RUNS}
    for number in range(3):
        legs = {name: run[number] for name, run in RUNS.items() if number < len(run)}
        for world in sorted({leg[0] for leg in legs.values()}):
            some = {name: leg for name, leg in legs.items() if leg[0] == world}
            ranks = run_ranks(world, run_some, directory, number, some)
            for name in some:
                found[name].append(joined([rank[name] for rank in ranks]))
    return found


def permutation(epoch: int, count: int = 53) -> list[int]:
    return torch.randperm(count, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def in_epoch(legs: list[GlobalLeg], epoch: int) -> list[int]:
    return [sample for leg in legs for sample in leg.samples(epoch)]


TOPOLOGIES = list(RUNS)[:3]


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_sample_comes_once_in_the_order_of_the_run_that_began(
    name: str, seen: dict[str, list[GlobalLeg]]
) -> None:
    legs = seen[name]
    assert in_epoch(legs, 0) == permutation(0)
    assert in_epoch(legs, 1) == permutation(1)
    assert not any(leg.warnings for leg in legs)


def test_steps_are_global_batches_and_the_last_one_takes_the_rest(seen: dict[str, list[GlobalLeg]]) -> None:
    assert [leg.sizes(0) for leg in seen["4, 3, 5 ranks"]] == [[8, 8], [6, 6, 6], [10, 9]]
    indices = [[index for _, index, _ in leg.steps] for leg in seen["4, 3, 5 ranks"]]
    assert indices == [[0, 1], [2, 3, 4], [4, 5, 0, 1, 2, 3, 4, 5]]
