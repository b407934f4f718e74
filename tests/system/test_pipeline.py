"""An unchanged LightningModule trains over pipeline stages as under Lightning's own strategy on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from lightning_shardckpt import FSDP, Pipeline
from tests.support.nets import LENGTH, PLAN, VOCABULARY, Net, full_state, llama
from tests.support.pipes import WIDTH, Layer, Plain
from tests.support.pool import run_each, run_ranks, selected
from tests.support.tiny import trainer

TOLERANCE = 1e-10  # sums of float64 in another order, through AdamW with eps 1e-3 (see nets.optimizer_of)
RAGGED = (12, 8, 12, 5, 3, 2, 1)  # the default number of microbatches is 4

# ── models ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class OfNet(Plain):  # a transformer with odd sizes, a direct, a 0-dim and a frozen parameter, tied, and built late
    late, blocks = True, 3

    def build(self) -> None:
        self.net: Any = Net(tied=True)
        self.net.blocks.extend(type(self.net.blocks[0])(WIDTH) for _ in range(self.blocks - 3))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


class Ragged(OfNet):
    sizes = RAGGED


class FiveBlocks(Ragged):  # two stages per rank are uneven
    blocks = 5


class Llama(Plain):
    def build(self) -> None:
        self.net = llama(num_hidden_layers=3, tie_word_embeddings=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens).logits  # type: ignore[no-any-return]


class Conditioned(Plain):
    """Layers of a dict take what the first stage computes from parameters, and a parameter, beside the activations."""

    class Layer(Layer):
        def forward(self, x: Tensor, condition: Tensor, bias: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * condition) * gate + torch.einsum("blw,lk->bkw", x, bias)

    def build(self) -> None:
        super().build()
        self.layers = nn.ModuleDict({name: self.Layer() for name in ("first", "second", "third")})
        self.condition, self.bias = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, LENGTH)
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, tokens: Tensor) -> Tensor:
        x, condition, bias = self.embed(tokens), self.condition(tokens[:, :1]), self.bias(torch.arange(LENGTH))
        for layer in self.layers.values():
            x = layer(x, condition=condition, bias=bias, gate=self.gate)
        return self.head(x)  # type: ignore[no-any-return]


class Adapted(Plain):  # registers its head before the layers, and uses one module with parameters between all of them
    def build(self) -> None:
        super().build()
        self._modules = {name: self._modules[name] for name in ("head", "embed", "layers")}
        self.adapter = nn.Linear(WIDTH, WIDTH)

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x = torch.tanh(self.adapter(layer(x))) + x
        return x


class PassesDicts(Plain):  # between layers are dicts, with a tensor that has no gradient
    class Layer(Layer):
        def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            return given | {"x": super().forward(given["x"]) * given["mask"]}

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens > 2).double().unsqueeze(-1)
        given = self.trunk({"x": self.embed(tokens), "mask": mask})
        return self.head(given["x"] * given["mask"])  # type: ignore[no-any-return]


class SecondResult(Plain):  # the loss needs a second result of the last layer, over the whole batch
    class Layer(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x.mean((1, 2))

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x, self.last = layer(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.last.var() + (self.last * batch[0].double().mean(1)).mean()


class Trunk(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class HasNames(Plain):  # has several names of its list, of layers and of their parts, and modules on both sides of them
    def build(self) -> None:
        self.first = nn.Linear(WIDTH, WIDTH)  # on the first stage by its first name, and on the last by the other one
        super().build()
        head = self._modules.pop("head")
        self.net, self.some, self.last = Trunk(self.layers), self.layers[0], self.layers[3]
        self.norm = self.some.norm
        for layer in self.layers:  # of both stages
            layer.norm = self.norm
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})
        self.rest = nn.Sequential(self.heads["a"], nn.Tanh(), self.heads["a"])
        self.second, self.head = self.first, head

    def trunk(self, x: Any) -> Any:
        return self.second(self.rest(self.heads["a"](self.net(self.first(x)))))


# ── steps ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Recomputed(Plain):
    """The user's own gradient checkpointing, and a loss over unmasked tokens, which is no mean of samples' means."""

    sizes = RAGGED

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
        return x

    def rows(self, count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        for tokens, targets in super().rows(count, generator):
            hidden = torch.rand(LENGTH, generator=generator) < 0.5
            hidden[0] = False  # a batch of one sample has a target
            yield tokens, targets.masked_fill(hidden, -100)


class Returns(Plain):  # returns more than the loss, counts in a buffer, and sets plain attributes
    sizes = RAGGED

    def build(self) -> None:
        super().build()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, index: int) -> Any:
        self.seen += 1
        logits = self(batch[0])
        self.kept = [index, round(float(logits.detach().sum()), 8)]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        return {"loss": loss, "logits": logits.detach(), "index": index}


class ReturnsMore(Plain):  # returns all that can be joined from microbatches
    sizes = RAGGED

    def training_step(self, batch: Any, index: int) -> Any:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())
        more = {"logits": logits.detach(), "mean": loss.detach(), "index": index}
        return {"loss": loss, **more}


class Changes(Plain):  # changes learning rates and ends the training, where only the last stage comes
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (index + 1)
        self.trainer.should_stop = index == 1
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3 * loss).backward()


class Draws(Plain):  # draws from two modules with dropout
    def build(self) -> None:
        super().build()
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def loss(self, batch: Any) -> Tensor:
        x, ones = self.trunk(self.embed(batch[0])), torch.ones(100)
        if self.training:
            self.kept = len({tuple(drop(ones).tolist()) for drop in (self.first, self.second, self.first)})
        return self.head(x).square().mean()


class Measured(Plain):  # logs in all the ways there are, and has every stage of the Trainer
    sizes = RAGGED

    def build(self) -> None:
        super().build()
        self.right = MulticlassAccuracy(VOCABULARY, average="micro")
        self.scores = MetricCollection({"top3": MulticlassAccuracy(VOCABULARY, top_k=3), "mean": MeanMetric()})
        self.outputs: list[Tensor] = []

    def training_step(self, batch: Any, index: int) -> Any:
        logits, targets = self(batch[0]).flatten(0, 1), batch[1].flatten()
        loss = nn.functional.cross_entropy(logits, targets)
        self.log_dict({"loss": loss, "index": float(index)}, on_step=True, on_epoch=True, sync_dist=True)
        for name, reduce in {"max": "max", "sum": "sum", "min": torch.min}.items():
            self.log(name, logits.max(), reduce_fx=reduce, on_step=False, on_epoch=True, sync_dist=True)
        self.right(logits, targets)
        self.log("right", self.right, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> None:
        logits, targets = self(batch[0]).flatten(0, 1), batch[1].flatten()
        self.outputs.append(nn.functional.cross_entropy(logits, targets))
        name = "second" if dataloader_idx else "val"
        self.log(name, self.outputs[-1], add_dataloader_idx=dataloader_idx == 0, sync_dist=True)
        self.scores["top3"].update(logits, targets)
        self.scores["mean"].update(self.outputs[-1])
        self.log_dict(dict(self.scores))

    def on_validation_epoch_end(self) -> None:
        self.log("stacked", torch.stack(self.outputs).mean(), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return [self.loader((12, 8, 6), 2), self.loader((8, 4), 3)]


class Decides(OfNet):  # has callbacks and a schedule that act on what was logged
    sizes = (12, 12)

    def configure_callbacks(self) -> list[pl.Callback]:
        return [EarlyStopping("val", patience=2), ModelCheckpoint("saved", monitor="val", filename="{epoch}")]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=4e-2, eps=1e-3)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val"}}


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Case:  # a module, options of its Trainer, and of the strategy that must not change the numbers
    module: type[Plain]
    options: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    world: int = 2


def by_microbatch(schedule: str, stages: int = 1) -> dict[str, Any]:
    return {"pipeline": Pipeline(schedule=schedule, loss="microbatch", stages_per_rank=stages)}


CLIPPED = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 3}
ON_FIRST: Any = {"condition": "first", "bias": "first"}
ONE_MICROBATCH = {"pipeline": Pipeline(microbatches=1)}
AXES = {"fsdp": {"data_parallel_shard_size": 2}, "tensor": {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}}
QUICK = {
    "everything at once": Case(Ragged, CLIPPED),
    "masked loss, recomputed": Case(Recomputed),
    "returns, buffers, attributes": Case(Returns),
    "tied llama": Case(Llama, CLIPPED),
    "returns by microbatch": Case(ReturnsMore, {}, by_microbatch("1f1b")),
    "1f1b": Case(Ragged, CLIPPED, {**by_microbatch("1f1b"), "fsdp": FSDP(activation_checkpointing=True)}),
}
SLOW = {
    "metrics": Case(Measured),
    "callbacks decide": Case(Decides, {"max_epochs": 9, "enable_checkpointing": True}),
    "split by name": Case(Conditioned, {}, {"pipeline": Pipeline(split=["layers.third"], modules=ON_FIRST)}),
    "modules=": Case(Adapted, CLIPPED, {"pipeline": Pipeline(modules={"head": "last", "adapter": "every"})}),
    "dicts between layers": Case(PassesDicts),
    "second result": Case(SecondResult),
    "several names": Case(HasNames),
    "changes the run": Case(Changes),
    "draws": Case(Draws, {}, ONE_MICROBATCH),
    "interleaved_1f1b": Case(FiveBlocks, CLIPPED, by_microbatch("interleaved_1f1b", 2)),
    "tensor": Case(OfNet, CLIPPED, AXES["tensor"] | {"pipeline": Pipeline(microbatches=2)}, 4),
}
SWEPT = {
    "two stages on each": Case(FiveBlocks, CLIPPED, by_microbatch("gpipe", 2)),
    "fsdp": Case(OfNet, CLIPPED, AXES["fsdp"], 4),
    "fsdp and tensor": Case(OfNet, CLIPPED, AXES["fsdp"] | AXES["tensor"], 8),
}
CASES = QUICK | SLOW | SWEPT


@dataclass
class Trained:
    returned: list[Any]
    first: dict[str, Tensor]
    last: dict[str, Tensor]
    metrics: dict[str, float]
    more: list[Any]


def train(name: str, strategy: dict[str, Any] | str) -> Trained:
    case, first = CASES[name], []
    alone = isinstance(strategy, str)
    # Weights that are built early must come from rank 0: only it has the right seed.
    pl.seed_everything(3 if alone or case.module.late or dist.get_rank() == 0 else 99, verbose=False)
    options: dict[str, Any] = {"max_epochs": 1, "precision": "64-true", "use_distributed_sampler": False}
    run = trainer(strategy, **options | case.options)
    module = case.module()
    module.on_train_start = lambda: first.append(full_state(module))  # type: ignore[method-assign]
    run.fit(module)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    more = [module.kept, run.current_epoch, [group["lr"] for group in run.optimizers[0].param_groups]]
    if case.module is Decides:
        (saving,) = run.checkpoint_callbacks
        more += [Path(saving.best_model_path).name, pytest.approx(float(saving.best_model_score))]  # type: ignore[attr-defined]
    predictions = []
    if case.module is Measured:
        metrics |= run.test(module, verbose=False)[0]
        predictions = run.predict(module) or []
    returned = [one | {"loss": run.strategy.reduce(one["loss"])} for one in module.returned]
    return Trained([*returned, *predictions], first[0], full_state(module), metrics, more)


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest) -> dict[Any, list[Trained]]:
    """By case, on one process and on every rank."""
    names = selected(request, "name")
    ranks = {(name, ""): (CASES[name].world, train, name, _strategy(name)) for name in names}
    (alone,) = run_ranks(1, train_alone, names, init_process_group=False)
    return {**run_each(ranks), **{(name, "alone"): [found] for name, found in alone.items()}}


def train_alone(names: list[str]) -> dict[str, Trained]:
    return {name: train(name, "auto") for name in names}


def _strategy(name: str) -> dict[str, Any]:
    return {"pipeline_parallel_size": 2, **CASES[name].strategy}


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.sweep]) for name in SWEPT),
    ],
)
def test_training_over_stages_equals_one_process(name: str, trained: dict[Any, list[Trained]]) -> None:
    (alone,), ranks = trained[name, "alone"], trained[name, ""]
    assert name != "draws" or alone.more[0] == 3  # of its masks differ
    assert name != "callbacks decide" or 3 < alone.more[1] < 9
    for which, tolerance in (("first", 0.0), ("last", TOLERANCE)):
        union = {key: value for rank in ranks for key, value in getattr(rank, which).items()}
        for rank in ranks:  # those that have the same tensor agree to the bit
            different = [key for key, value in getattr(rank, which).items() if not torch.equal(value, union[key])]
            assert different == []
        torch.testing.assert_close(union, getattr(alone, which), rtol=0, atol=tolerance)
    for rank in ranks:
        torch.testing.assert_close(rank.returned, alone.returned, rtol=0, atol=TOLERANCE)
        assert rank.metrics == ranks[0].metrics
        assert rank.metrics == pytest.approx(alone.metrics, rel=0, abs=1e-6)  # torchmetrics sums in float32
        assert rank.more == alone.more
