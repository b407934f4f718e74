"""DataLoaders that Lightning makes again with a sampler for each rank. Oracle: what one process reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn
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
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support import tiny
from tests.support.pool import run_each, run_ranks


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: Any) -> Tensor:
        return torch.arange(16.0).repeat(4, 1).T[index]


class Net(pl.LightningModule):
    """Notes the rows of its batches."""

    def __init__(self, kind: str = "few") -> None:
        super().__init__()
        self.kind = kind
        self.layers, self.seen = nn.ModuleList(nn.Linear(4, 4) for _ in range(2)), list[list[float]]()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.seen.append(batch[..., 0].tolist())
        for layer in self.layers:
            batch = layer(batch)
        return batch.mean()

    validation_step = test_step = training_step

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.layers[0](batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return LOADERS[self.kind](4 // self.trainer.world_size)


def drawn() -> RandomSampler:
    return RandomSampler(Rows(), True, 40, torch.Generator().manual_seed(5))


LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "rows": lambda size: DataLoader(Rows(), batch_sampler=BatchSampler(range(3, 11), size, drop_last=False)),
    "few": lambda size: DataLoader(
        Rows(), batch_sampler=BatchSampler(SequentialSampler(range(8)), size, drop_last=False)
    ),
    "drawn": lambda size: DataLoader(Rows(), batch_size=size, sampler=drawn()),
    "shuffled": lambda size: DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(Rows()), 4, drop_last=False)),
}
"""By the size of the batches of a rank."""


def see_each(strategy: Any) -> dict[str, list[list[float]]]:
    found = {}
    for kind in LOADERS:
        pl.seed_everything(3, verbose=False)
        tiny.trainer(strategy, max_epochs=1, limit_val_batches=0).fit(module := Net(kind))
        found[kind] = module.seen
    return found


def test_samplers_that_a_loader_was_given_give_on_ranks_what_they_give_on_one_process() -> None:
    (alone,) = run_ranks(1, see_each, "auto")
    for rank, found in enumerate(run_ranks(2, see_each, {})):
        for kind in ("rows", "few"):
            assert found[kind] == [batch[rank::2] for batch in alone[kind]], kind
        assert [len(batch) for batch in found["drawn"]] == [2] * len(alone["drawn"]) == [2] * 10, "as many as are drawn"
        rows = [row for batch in found["shuffled"] for row in batch]
        assert rows == [*DistributedSampler(range(16), 2, rank, shuffle=True, seed=3)]


# ── ranks with other numbers of batches ─────────────────────────────────────────────────────────────────────────────


def predict(rows: int, batch_size: int) -> int:
    return len(tiny.trainer({}).predict(Net(), DataLoader(Subset(Rows(), range(rows)), batch_size)))


def predict_odd() -> None:
    with pytest.raises(UnsupportedCodeError, match=r"different numbers of batches, here \[\[8.0\], \[7.0\]\]"):
        predict(15, 1)
    assert predict(15, 4) == 2


class Stream(IterableDataset[Any]):
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(torch.ones(self.rows, 4))


class Uneven(Net):
    """Has twice as many batches on the second half of the data-parallel ranks."""

    def val_dataloader(self) -> Any:
        meshes = self.trainer.strategy.meshes
        half = meshes.data_parallel_rank * 2 // meshes.topology.data_parallel
        return DataLoader(Stream(4 + 4 * half), batch_size=2)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(), batch_size=4)

    test_dataloader = predict_dataloader = val_dataloader


def evaluate(stage: str, strategy: dict[str, int], is_refused: bool) -> int:
    run, module = tiny.trainer(strategy, max_epochs=1), Uneven()
    if is_refused:
        with pytest.raises(UnsupportedCodeError, match="which has no length"):
            getattr(run, stage)(module)
    else:
        getattr(run, stage)(module)
    return len(module.seen)


def test_streams_of_unequal_length_are_refused_where_ranks_step_together_and_replicas_test_them() -> None:
    replicas = {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2}
    pipelines = {**replicas, "pipeline_parallel_size": 2}
    calls: dict[str, tuple[Any, ...]] = {stage: (2, evaluate, stage, {}, True) for stage in ("fit", "test", "predict")}
    calls |= {"fit replicas": (2, evaluate, "fit", replicas, True), "odd": (2, predict_odd)}
    calls |= {"pipelines": (4, evaluate, "test", pipelines, True), "replicas": (2, evaluate, "test", replicas, False)}
    calls["hsdp"] = (4, evaluate, "test", {**replicas, "data_parallel_shard_size": 2}, False)
    found = run_each(calls)
    assert (found["replicas"], found["hsdp"]) == ([2, 4], [2, 2, 4, 4])


class LoadsBatches(DataLoader[Any]):
    """Reads a batch at once, as loaders of scvi-tools do; another sampler is one of samples."""

    def __init__(self, dataset: Any, batch_size: int = 4, sampler: Any = None, **options: Any) -> None:
        if sampler is None:
            sampler, options["batch_size"] = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False), None
        super().__init__(dataset, sampler=sampler, **options)


def train_on_batches_of_batches() -> list[Any]:
    with pytest.raises(UnsupportedCodeError, match="puts the batches of its sampler into batches of 1"):
        tiny.trainer({}, max_epochs=1).fit(Net(), LoadsBatches(Rows()))
    module = Net()
    tiny.trainer({}, max_epochs=1, use_distributed_sampler=False).fit(module, LoadsBatches(Rows()))
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(data_parallel_shard_size=2))
    fabric.launch()
    with pytest.raises(UnsupportedCodeError, match="puts the batches of its sampler"):
        fabric.setup_dataloaders(LoadsBatches(Rows()))
    return module.seen


def test_a_loader_that_would_batch_its_batches_is_refused() -> None:
    """Its batches would have another shape than on one process, of which a loss that is a mean tells nothing."""
    batches = [[float(4 * n + k) for k in range(4)] for n in range(4)]
    assert run_ranks(2, train_on_batches_of_batches) == [batches, batches]
