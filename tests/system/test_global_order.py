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

from lightning_shardckpt.errors import MismatchError
from tests.support import tiny
from tests.support.pool import run_ranks

pytestmark = pytest.mark.slow

SEED = 7
TP2 = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.0": "colwise", "layers.2": "rowwise"}}
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
REPLICAS: dict[str, Any] = {"data_parallel_replicate_size": 2}


class Numbered(Dataset[Any]):  # each sample is its own number
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)] * 4)


class Net(pl.LightningModule):  # notes the samples of each step: (epoch, batch_idx, numbers)
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        self.steps: list[tuple[int, int, list[int]]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if isinstance(batch, dict):  # of two loaders; numbers of the second one are negative
            batch = torch.cat([batch["long"], -1 - batch["short"]])
        self.steps.append((self.trainer.current_epoch, batch_idx, batch[:, 0].int().tolist()))
        torch.rand(1 + self.trainer.global_rank)  # no two ranks have the same random state from now on

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers((batch["long"] if isinstance(batch, dict) else batch) / 100).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def loader(count: int = 53, batch_size: int = 2, sampler: str = "", **more: Any) -> Any:
    """A loader of numbers; what ``sampler`` names draws their order, of all ranks together unless it says otherwise."""
    numbers = Numbered(count)
    if sampler == "own generator":  # in another state in each leg
        drawn = SubsetRandomSampler(range(0, count, 2), generator=torch.Generator().manual_seed(batch_size))
        return DataLoader(numbers, batch_size, sampler=drawn, **more)
    if sampler == "two loaders":
        short = DataLoader(Numbered(24), batch_size, shuffle=True)
        return CombinedLoader({"long": DataLoader(numbers, batch_size, shuffle=True), "short": short}, "max_size_cycle")
    if sampler == "pairs":
        return DataLoader(numbers, batch_sampler=Pairs(SequentialSampler(numbers), batch_size, drop_last=False))
    if sampler == "stream":
        return DataLoader(Stream(), batch_size)
    if sampler == "stateful":
        return Stateful(numbers, batch_size)
    return DataLoader(numbers, batch_size, shuffle=True, **more)


class Pairs(BatchSampler):
    """Makes batches in its own way, for all that is known from outside."""


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((4,), float(i)) for i in range(40))


class Stateful(DataLoader[Any]):  # has a state of its own
    def state_dict(self) -> dict[str, int]:
        return {"given": 3}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


Leg = tuple[int, dict[str, Any], int, dict[str, Any], dict[str, Any]]
FSDP: dict[str, Any] = {}
ONE_EPOCH = {"max_epochs": 1}
# Legs of a run, one after another: ranks, strategy, step of the save (0: it ends with its last epoch), loader,
# options of the Trainer, which is for two epochs. In epoch 1, 53 samples are left to the last of them.
RUNS: dict[str, list[Leg]] = {
    "2, 3, 4 ranks": [
        (2, FSDP, 2, {"batch_size": 6}, {}),
        (3, FSDP, 3, {"batch_size": 4}, {}),
        (4, FSDP, 0, {"batch_size": 3}, {}),
    ],
    "fsdp2 x tp2, one process, pp2 x fsdp2": [
        (4, TP2, 2, {"batch_size": 4}, {}),
        (1, FSDP, 5, {"batch_size": 8, "num_workers": 1}, {}),
        (4, PP2, 0, {"batch_size": 4}, {}),
    ],
    "accumulated": [
        (2, REPLICAS, 1, {"batch_size": 6}, {"accumulate_grad_batches": 2}),
        (3, FSDP, 2, {"batch_size": 4}, {"accumulate_grad_batches": 2}),
        (2, TP2, 0, {"batch_size": 12}, {"accumulate_grad_batches": 2}),
    ],
    "drop_last": [
        (2, FSDP, 2, {"batch_size": 3, "drop_last": True}, {}),
        (3, FSDP, 0, {"batch_size": 2, "drop_last": True}, {}),
    ],
    "few samples left": [
        (2, FSDP, 8, {"batch_size": 3, "count": 50}, {}),
        (3, FSDP, 0, {"batch_size": 2, "count": 50}, ONE_EPOCH),
    ],
    "own generator": [
        (2, FSDP, 2, {"batch_size": 3, "sampler": "own generator"}, {}),
        (3, FSDP, 0, {"batch_size": 2, "sampler": "own generator"}, {}),
    ],
    "own generator, straight": [(2, FSDP, 0, {"batch_size": 3, "sampler": "own generator"}, {})],
    "two loaders": [
        (2, FSDP, 3, {"batch_size": 6, "sampler": "two loaders"}, {}),
        (3, FSDP, 0, {"batch_size": 4, "sampler": "two loaders"}, ONE_EPOCH),
    ],
    "pairs": [
        (2, FSDP, 3, {"sampler": "pairs"}, {"use_distributed_sampler": False}),
        (1, FSDP, 0, {"sampler": "pairs", "batch_size": 4}, ONE_EPOCH),
    ],
    "stream": [
        (2, FSDP, 3, {"sampler": "stream"}, {}),
        (1, FSDP, 0, {"batch_size": 4, "sampler": "stream"}, ONE_EPOCH),
    ],
    "stateful": [(2, FSDP, 3, {"sampler": "stateful"}, {}), (1, FSDP, 0, {"sampler": "stateful"}, ONE_EPOCH)],
    "another kind": [(2, FSDP, 3, {"sampler": "stateful"}, {}), (2, FSDP, 0, {}, ONE_EPOCH)],
    "more samples": [(2, FSDP, 3, {}, {}), (1, FSDP, 0, {"count": 60, "batch_size": 4}, ONE_EPOCH)],
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
    run = tiny.trainer(strategy, callbacks=saving, **limits | options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(net := Net(), loader(**data), ckpt_path=f"{directory}/{number - 1}.ckpt" if number else None)
    said = [str(each.message) for each in caught if "samples" in str(each.message) or "divide" in str(each.message)]
    return Found(run.strategy.distributed_sampler_kwargs["rank"], net.steps, said)


def run_some(directory: str, number: int, some: dict[str, Leg]) -> dict[str, Found]:
    return {name: run_leg(f"{directory}/{name}", number, leg) for name, leg in some.items()}


@dataclass(frozen=True)
class GlobalLeg:  # what all ranks saw: (epoch, batch_idx, samples of all ranks in the order of the ranks) of each step
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
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def seen(directory: str) -> dict[str, list[GlobalLeg]]:
    """The legs of all runs; those on as many ranks run in the same processes."""
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


STRAIGHT = list(RUNS)[:3]


@pytest.mark.parametrize("name", STRAIGHT)
def test_every_sample_comes_once_in_the_order_of_the_run_that_began(
    name: str, seen: dict[str, list[GlobalLeg]]
) -> None:
    legs = seen[name]
    assert in_epoch(legs, 0) == permutation(0)
    assert in_epoch(legs, 1) == permutation(1)
    assert not any(leg.warnings for leg in legs)


def test_steps_are_global_batches_and_the_last_one_takes_the_rest(seen: dict[str, list[GlobalLeg]]) -> None:
    assert [leg.sizes(0) for leg in seen["2, 3, 4 ranks"]] == [[12, 12], [12], [12, 5]]
    indices = [[index for _, index, _ in leg.steps] for leg in seen["2, 3, 4 ranks"]]
    assert indices == [[0, 1], [2], [3, 4, 0, 1, 2, 3, 4]]
    accumulated = [[index for _, index, _ in leg.steps][:4] for leg in seen["accumulated"]]
    assert accumulated == [[0, 1], [2, 3], [4, 0, 1, 2]]  # counted on between optimizer steps


def test_drop_last_leaves_out_the_end_of_the_order(seen: dict[str, list[GlobalLeg]]) -> None:
    legs = seen["drop_last"]
    assert [leg.sizes(0) for leg in legs] == [[6, 6], [6] * 6]
    assert in_epoch(legs, 0) == permutation(0)[:48] and in_epoch(legs, 1) == permutation(1)[:48]


def test_ranks_without_a_sample_repeat_one_and_this_is_told(seen: dict[str, list[GlobalLeg]]) -> None:
    """50 samples, 48 of them used: two samples are left for three ranks."""
    legs = seen["few samples left"]
    order = permutation(0, 50)
    assert in_epoch(legs, 0) == [*order, order[48]]
    assert any("1 of 3 data-parallel ranks repeat a sample" in said for said in legs[1].warnings)


def refused(path: str, data: dict[str, Any]) -> str:
    with pytest.raises(MismatchError) as caught:
        tiny.trainer(FSDP, max_epochs=1).fit(Net(), loader(**data), ckpt_path=path)
    return str(caught.value)


def test_another_global_batch_in_the_middle_of_an_epoch_is_refused_with_the_remedy(
    directory: str, seen: dict[str, list[GlobalLeg]]
) -> None:
    assert "more samples" in seen
    for said in run_ranks(2, refused, f"{directory}/more samples/0.ckpt", {"batch_size": 6}):
        assert "had 4 samples (batch_size 2 on 2" in said and "and has 12 (6 on 2" in said
        assert said.endswith("or resume from a checkpoint of an epoch's end")


def test_order_of_a_random_sampler_of_the_user_goes_on(seen: dict[str, list[GlobalLeg]]) -> None:
    """Ranks have random states of their own. Oracle: the run that did not stop, which reads each sample once."""
    (straight,) = seen["own generator, straight"]
    for epoch in (0, 1):
        assert sorted(straight.samples(epoch)) == list(range(0, 53, 2))
        assert in_epoch(seen["own generator"], epoch) == straight.samples(epoch)
    assert straight.samples(0) != straight.samples(1)
    assert not any(leg.warnings for leg in seen["own generator"])


def test_several_loaders_go_on_where_they_were(seen: dict[str, list[GlobalLeg]]) -> None:
    """The longer one gives five batches of 12, the shorter one begins again after two."""
    read = in_epoch(seen["two loaders"], 0)
    assert [number for number in read if number >= 0] == permutation(0)
    short = [-1 - number for number in read if number < 0]
    assert short[:48] == permutation(0, 24) * 2 and set(short[48:]) == set(permutation(0, 24)[:12])
    assert not any(leg.warnings for leg in seen["two loaders"])


ANOTHER_WORLD = ("can't be continued exactly", "was 2, and is 1", "Resume from the end of an epoch")


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("pairs", ANOTHER_WORLD),
        ("stream", (*ANOTHER_WORLD, "by DataLoader of Stream")),
        ("more samples", ANOTHER_WORLD),
        ("stateful", (*ANOTHER_WORLD, "by Stateful of")),
        ("another kind", ("can't be continued exactly",)),
    ],
)
def test_what_cannot_be_continued_is_told_with_what_to_do(
    name: str, reasons: tuple[str, ...], seen: dict[str, list[GlobalLeg]]
) -> None:
    (said,) = seen[name][1].warnings
    assert [reason for reason in reasons if reason not in said] == []
