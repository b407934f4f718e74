"""DataLoaders that Lightning makes again with a sampler for each rank."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
)

from lightning_shardckpt.errors import UnsupportedCodeError
from tests.support import tiny
from tests.support.pool import run_each

Found = dict[Any, list[Any]]


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: Any) -> Tensor:
        return torch.arange(16.0).repeat(4, 1).T[index]


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.seen = torch.nn.Linear(4, 1), list[list[float]]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch[..., 0].tolist())
        return self.linear(batch).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4)


class Given(Net):
    """Has samplers and batch samplers of torch that are not those of a DataLoader's own arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        size = 4 // self.trainer.world_size
        some: dict[str, Any] = {"rows": range(3, 11), "all": SequentialSampler(Rows())}
        some["few"] = SequentialSampler(range(8))
        if self.kind == "drawn":
            drawn = RandomSampler(Rows(), True, 40, torch.Generator().manual_seed(5))
            return DataLoader(Rows(), batch_size=size, sampler=drawn)
        return DataLoader(Rows(), batch_sampler=BatchSampler(some[self.kind], size, drop_last=False))


def see_given(strategy: Any) -> dict[str, list[list[float]]]:
    found = {}
    for kind in ("rows", "all", "few", "drawn"):
        module = Given(kind)
        tiny.trainer(strategy, max_epochs=1).fit(module)
        found[kind] = module.seen
    return found


def test_samplers_and_batch_samplers_that_a_loader_was_given_give_what_they_do_on_one_process(found: Found) -> None:
    (alone,) = found["given, alone"]
    for rank, given in enumerate(found[see_given]):
        for kind in ("rows", "all", "few"):
            assert given[kind] == [batch[rank::2] for batch in alone[kind]], kind
        assert [len(batch) for batch in given["drawn"]] == [2] * 10, "as many as are drawn"
        assert set(map(len, alone["drawn"])) == {4} and len(alone["drawn"]) == 10


class Predicts(Net):
    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.linear(batch)


def predict_odd() -> tuple[str, int]:
    rows = Subset(Rows(), range(15))
    with pytest.raises(UnsupportedCodeError) as error:
        tiny.trainer({}).predict(Predicts(), DataLoader(rows, batch_size=1))
    return str(error.value), len(tiny.trainer({}).predict(Predicts(), DataLoader(rows, batch_size=4)) or ())


def test_predict_refuses_other_numbers_of_batches_on_ranks_that_share_parameters(found: Found) -> None:
    for error, batches in found[predict_odd]:
        assert "different numbers of batches, here [[8.0], [7.0]]" in error
        assert batches == 2


class Stream(IterableDataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(torch.ones(self.rows, 4))


class Evaluates(Net):
    """Has twice as many batches on the second half of the data-parallel ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
        self.batches = 0

    def validation_step(self, batch: Tensor, index: int) -> Tensor:
        self.batches += 1
        for layer in self.layers:
            batch = layer(batch)
        return batch

    test_step = predict_step = validation_step

    def val_dataloader(self) -> Any:
        meshes: Any = self.trainer.strategy.meshes
        half = meshes.data_parallel_rank * 2 // meshes.topology.data_parallel
        return DataLoader(Stream(4 + 4 * half), batch_size=2)

    test_dataloader = predict_dataloader = val_dataloader


def evaluate_uneven(stage: str, strategy: dict[str, int]) -> str | int:
    run, module = tiny.trainer(strategy, max_epochs=1), Evaluates()
    try:
        getattr(run, stage)(module)
    except UnsupportedCodeError as error:
        return str(error)
    return module.batches


REPLICAS = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}
PIPELINES = {**REPLICAS, "pipeline_parallel_size": 2}
HSDP = {"data_parallel_shard_size": 2, "data_parallel_replicate_size": 2}


UNEVEN: dict[str, tuple[Any, ...]] = {
    "fit": (2, evaluate_uneven, "fit", {}),
    "fit replicas": (2, evaluate_uneven, "fit", REPLICAS),
    "test": (2, evaluate_uneven, "test", {}),
    "predict": (2, evaluate_uneven, "predict", {}),
    "test pipelines": (4, evaluate_uneven, "test", PIPELINES),
}
OF_REPLICAS: dict[str, tuple[Any, ...]] = {
    "replicas": (2, evaluate_uneven, "test", REPLICAS),
    "hsdp": (4, evaluate_uneven, "test", HSDP),
}


@pytest.mark.parametrize("case", UNEVEN)
def test_streams_of_unequal_length_are_refused_where_ranks_step_together(case: str, found: Found) -> None:
    assert all("which has no length" in str(error) for error in found[case]), found[case]


def test_replicas_test_different_numbers_of_batches(found: Found) -> None:
    assert (found["replicas"], found["hsdp"]) == ([2, 4], [2, 2, 4, 4])


class Shuffles(Net):
    """Shuffles by a batch sampler: the sampler of the loader itself is torch's default then, in order."""

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 4, drop_last=False))


def see_shuffled() -> list[float]:
    pl.seed_everything(3, verbose=False)
    module = Shuffles()
    tiny.trainer({}, max_epochs=1).fit(module)
    return [row for batch in module.seen for row in batch]


@pytest.fixture(scope="module")
def found() -> Found:
    """What each rank saw of all these, one after another."""
    calls: dict[Any, tuple[Any, ...]] = {fn: (2, fn) for fn in (see_shuffled, predict_odd)}
    calls |= {see_given: (2, see_given, {}), "given, alone": (1, see_given, "auto")}
    return run_each({**calls, **OF_REPLICAS, **UNEVEN})


def test_a_random_sampler_in_a_batch_sampler_shuffles(found: Found) -> None:
    for rank, rows in enumerate(found[see_shuffled]):
        assert rows == [*DistributedSampler(range(16), 2, rank, shuffle=True, seed=3)]
