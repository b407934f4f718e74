"""Modules with lists of layers for the tests of pipelines, their data, and their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from lightning_shardckpt import Pipeline
from tests.support import tiny
from tests.support.nets import LENGTH, VOCABULARY, optimizer_of

WIDTH = 12


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Plain(pl.LightningModule):
    """A language model, of which tests vary one thing each, and what its steps returned.

    Attributes:
        late: whether it is built in `configure_model`.
        sizes: of the batches for training.
    """

    Layer: Any = Layer
    late = False
    sizes: tuple[int, ...] = (12,) * 3

    def __init__(self) -> None:
        super().__init__()
        self.returned: list[Any] = []
        self.kept: Any = None
        if not self.late:
            self.build()

    def configure_model(self) -> None:
        if not self._modules:
            self.build()

    def build(self) -> None:
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers: Any = nn.ModuleList(self.Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def before(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens)  # type: ignore[no-any-return]

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.trunk(self.before(tokens)))  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch[0])

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.returned.append(outputs)

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def train_dataloader(self) -> Any:
        return self.loader(self.sizes, 1)

    def val_dataloader(self) -> Any:
        return self.loader((12, 8), 2)

    test_dataloader = predict_dataloader = val_dataloader

    def loader(self, sizes: tuple[int, ...], seed: int) -> Any:
        """Of the batches that one process has, the rows of this data rank."""
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        rows = self.rows(sum(sizes), torch.Generator().manual_seed(seed))
        batches = [default_collate([next(rows) for _ in range(size)]) for size in sizes]
        parts = [[value[place["rank"] :: place["num_replicas"]] for value in batch] for batch in batches]
        return DataLoader(parts, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset

    def rows(self, count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        for tokens in torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator):
            yield tokens[:-1], tokens[1:]


# ── checkpoints ─────────────────────────────────────────────────────────────────────────────────────────────────────

State = dict[str, Any]
LOOPED = {"pipeline_parallel_size": 2, "pipeline": Pipeline(stages_per_rank=2)}


class Deep(tiny.TinyLM):  # enough layers for four stages
    def _build(self) -> None:
        super()._build()
        self.blocks = nn.ModuleList([tiny.Block() for _ in range(4)])
        if self.hparams["frozen"]:
            self.blocks[1].up.requires_grad_(False)


def train(strategy: State, steps: int, save: str | None, resume: str | None, optimizer: str, seed: int) -> State:
    pl.seed_everything(seed)
    run = tiny.train(module := Deep(optimizer, build_late=True), strategy, steps, save=save, resume=resume)
    return tiny.full_state(module, run.optimizers)


def union(states: list[State]) -> State:
    """What all stages have; what several have must be equal."""
    found: State = {}
    for state in states:
        both = found.keys() & state.keys()
        assert tiny.differences({key: found[key] for key in both}, {key: state[key] for key in both}) == []
        found |= state
    return found
