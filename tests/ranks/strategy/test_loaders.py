"""DataLoaders on ranks. Oracle: what one process reads without a strategy."""

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

    def __init__(self, kind: str = "rows") -> None:
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
        if self.kind == "dealt":
            dealt = DistributedSampler(Rows(), shuffle=False, **self.trainer.distributed_sampler_kwargs)
            return DataLoader(Rows(), batch_sampler=BatchSampler(dealt, 2, drop_last=False))
        return LOADERS[self.kind]()


def drawn(**options: Any) -> RandomSampler:
    return RandomSampler(Rows(), generator=torch.Generator().manual_seed(5), **options)


class LoadsBatches(DataLoader[Any]):
    """Reads a batch at once, as loaders of scvi-tools do; another sampler is one of samples."""

    def __init__(self, dataset: Any, batch_size: int = 4, sampler: Any = None, **options: Any) -> None:
        if sampler is None:
            sampler, options["batch_size"] = BatchSampler(SequentialSampler(dataset), batch_size, drop_last=False), None
        super().__init__(dataset, sampler=sampler, **options)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "rows": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(range(3, 11), 4, drop_last=False)),
    "drawn": lambda: DataLoader(Rows(), batch_size=4, sampler=drawn(replacement=True, num_samples=40)),
    "shuffled": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(drawn(), 4, drop_last=False)),
    "batches": lambda: LoadsBatches(Rows()),
}
"""Of each of these, Lightning would make one with other samples or batches."""


def see(strategy: Any, kind: str, **options: Any) -> list[list[float]]:
    pl.seed_everything(3, verbose=False)
    tiny.trainer(strategy, max_epochs=1, limit_val_batches=0, **options).fit(module := Net(kind))
    return module.seen


def see_each(strategy: Any) -> dict[str, list[list[float]]]:
    return {kind: see(strategy, kind) for kind in LOADERS}


def test_a_loader_with_samples_of_its_own_reads_on_one_process_what_it_reads_without_a_strategy() -> None:
    alone, sharded = run_ranks(1, see_each, "auto"), run_ranks(1, see_each, {})
    assert alone == sharded and len(alone[0]["drawn"]) == 10
    assert alone[0]["batches"] == [[float(4 * n + k) for k in range(4)] for n in range(4)]


def see_on_ranks() -> list[list[list[float]]]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(data_parallel_shard_size=2))
    fabric.launch()
    for kind, make in LOADERS.items():
        with pytest.raises(UnsupportedCodeError, match="cannot divide among 2 ranks"):
            see({}, kind)
        with pytest.raises(UnsupportedCodeError, match="cannot divide among 2 ranks"):
            fabric.setup_dataloaders(make())
        fabric.setup_dataloaders(make(), use_distributed_sampler=False)
    return [see({}, "dealt"), see({}, "batches", use_distributed_sampler=False)]


def test_on_several_ranks_it_is_refused_unless_each_rank_has_its_samples() -> None:
    (alone,) = run_ranks(1, see, "auto", "batches")
    for rank, (dealt, same) in enumerate(run_ranks(2, see_on_ranks)):
        assert dealt == [batch[rank::2] for batch in alone] and same == alone


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
