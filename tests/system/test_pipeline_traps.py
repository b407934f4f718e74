"""Code that is easy to get wrong over pipeline stages: trained over two of them, it equals Lightning in one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.warnings import PossibleUserWarning
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate
from torchmetrics import MeanMetric, MetricTracker

from lightning_shardckpt import Pipeline, load
from tests.support.nets import full_state
from tests.support.pool import run_ranks, selected
from tests.support.tiny import trainer

pytestmark = pytest.mark.slow

WIDTH, LENGTH, VOCABULARY, BATCH, STEPS = 8, 4, 11, 8, 3
TOLERANCE = 1e-10  # sums of float64 in another order, through AdamW with eps 1e-3

# ── modules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Plain(pl.LightningModule):
    """What the others differ from; trains the parameters whose names start with ``trained``."""

    Layer: Any = Layer
    trained = ""
    strategy: tuple[tuple[str, Any], ...] = ()
    collate: Any = staticmethod(default_collate)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers: Any = nn.ModuleList(self.Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.build()
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.startswith(self.trained))
        self.returned: list[float] = []
        self.kept: Any = None

    def build(self) -> None:
        """For what a case adds."""

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def loss(self, batch: Any) -> Tensor:
        return entropy(self.head(self.trunk(self.embed(batch[0]))), batch[1])

    def training_step(self, batch: Any, index: int) -> Any:
        loss = self.loss(batch)
        self.log("train", loss, on_step=False, on_epoch=True, batch_size=BATCH)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.returned.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(rows(BATCH * STEPS, 1), BATCH, collate_fn=self.collate)  # type: ignore[arg-type]


def rows(count: int, seed: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(row[:-1], row[1:]) for row in torch.randint(VOCABULARY, (count, LENGTH + 1), generator=generator)]


def entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class ChangesBatch(Plain):
    def loss(self, batch: Any) -> Tensor:
        batch[0].add_(1).remainder_(VOCABULARY)
        return super().loss(batch)


class MetricsOfEpochs(Plain):
    """Metrics that come while the module trains, one for each epoch."""

    def build(self) -> None:
        self.tracker = MetricTracker(MeanMetric(), maximize=False)

    def on_train_epoch_start(self) -> None:
        self.tracker.increment()

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        self.tracker.update(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        self.log("tracked", self.tracker.compute())


class DictLayers(Plain):
    class Layer(Layer):
        def forward(self, given: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            return given | {"x": super().forward(given["x"]) * given["mask"]}

    def loss(self, batch: Any) -> Tensor:
        mask = (batch[0] > 2).double().unsqueeze(-1)
        found = self.trunk({"x": self.embed(batch[0]), "mask": mask})
        return entropy(self.head(found["x"] * found["mask"]), batch[1])


class SharedBias(Plain):
    """What all layers get has no dim of samples, and gradients from all: a bias, computed, and a parameter."""

    strategy = (("pipeline", Pipeline(modules={"bias": "first"})),)

    class Layer(Layer):
        def forward(self, x: Tensor, bias: Tensor, gate: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * gate + torch.einsum("blw,lk->bkw", x, bias)

    def build(self) -> None:
        self.bias, self.gate = nn.Embedding(LENGTH, LENGTH), nn.Parameter(torch.ones(WIDTH))

    def trunk(self, x: Any) -> Any:
        bias = self.bias(torch.arange(LENGTH))
        for layer in self.layers:
            x = layer(x=x, bias=bias, gate=self.gate)
        return x


class TwoResults(Plain):
    class Layer(Layer):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x.mean((1, 2))

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x, self.last = layer(x)
        return x


class UsesSecondResult(TwoResults):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.last.var() + (self.last * batch[0].double().mean(1)).mean()


class AddsInPlace(Plain):
    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.clone())  # so that autograd does not need what is overwritten

    def trunk(self, x: Any) -> Any:
        for layer in self.layers:
            x += layer(x)
            x *= 0.9
        return x


class BuiltForEvaluation(Plain):
    """Its layers do something only in training, which begins after the strategy has looked at the module."""

    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x

    def build(self) -> None:
        self.eval()

    def on_train_start(self) -> None:
        self.train()


class Shifted(Layer):
    """Looks up its buffer and its parameter as containers do, such as PEFT's."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self._buffers["shift"]) * self.down._parameters["bias"].cos()


class LooksUpWeights(Plain):
    Layer = Shifted


class ThawsAtStart(Plain):
    """A step thaws a layer of each stage before it runs them; each microbatch goes back at once."""

    trained = "head"
    strategy = (("pipeline", Pipeline(loss="microbatch", schedule="1f1b")),)

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 1:
            self.layers[0].requires_grad_(True)
            self.layers[3].requires_grad_(True)
        return super().training_step(batch, index)


class DetachedBetween(Plain):
    def trunk(self, x: Any) -> Any:
        for index, layer in enumerate(self.layers):
            x = layer(x.detach() if index == 2 else x)
        return x


class NoGradLayers(Plain):
    def trunk(self, x: Any) -> Any:
        for index, layer in enumerate(self.layers):
            with torch.set_grad_enabled(index % 2 == 1):
                y = layer(x)
            x = y if index % 2 else x + y
        return x


class ScalesLoss(Plain):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (3 * loss).backward()


class StopsTraining(Plain):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.trainer.should_stop = index == 1  # after the layers: where only the last stage comes
        return loss


class SetsLearningRate(Plain):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-3 * (index + 1)
        return loss


class OwnGenerator(Plain):
    strategy = (("pipeline", Pipeline(microbatches=1)),)  # others are refused: they would draw other numbers

    def build(self) -> None:
        self.generator = torch.Generator().manual_seed(7)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch[0])
        noise = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        x = self.trunk(x + noise)
        return nn.functional.mse_loss(x, noise) + self.head(x).mean()


class TwoDropouts(Plain):
    """Keeps how many of three masks differ."""

    strategy = (("pipeline", Pipeline(microbatches=1)),)

    def build(self) -> None:
        self.first, self.second = nn.Dropout(0.5), nn.Dropout(0.5)

    def loss(self, batch: Any) -> Tensor:
        loss, ones = super().loss(batch), torch.ones(100)
        self.kept = len({tuple(drop(ones).tolist()) for drop in (self.first, self.second, self.first)})
        return loss


class LogsInManyWays(Plain):
    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.log_dict({"loss": loss, "index": float(index)}, on_step=True, on_epoch=True)
        for name, reduce in {"max": "max", "sum": "sum", "min": torch.min}.items():
            self.log(name, loss, reduce_fx=reduce, on_step=False, on_epoch=True)
        return loss


class TwoLoaders(Plain):
    def val_dataloader(self) -> Any:
        return [DataLoader(rows(11, 2), size) for size in (8, 4)]  # type: ignore[arg-type]  # a list is a dataset

    def validation_step(self, batch: Any, index: int, dataloader_idx: int = 0) -> Any:
        loss = self.loss(batch)
        self.log("val", loss)
        if dataloader_idx:
            self.log("second", loss * 2, add_dataloader_idx=False)
        self.kept = [*(self.kept or []), (dataloader_idx, round(float(loss), 9))]


# --- modules that have several names, and layers of several classes ---


class Named(Plain):
    """The checkpoint of such a module is loaded into one that is whole, too."""


class TwiceBefore(Named):
    def build(self) -> None:
        layers, head = self.layers, self.head
        del self.layers, self.head
        self.first = self.second = nn.Linear(WIDTH, WIDTH)
        self.layers, self.head = layers, head

    def trunk(self, x: Any) -> Any:
        return super().trunk(self.second(self.first(x)))


class OnBothSides(TwiceBefore):
    def build(self) -> None:
        super().build()
        self.third = self.first

    def trunk(self, x: Any) -> Any:
        return self.third(super().trunk(x))


class Trunk(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class OfAll(Named):
    """Of the network, of its list, of layers and of parts of these."""

    def build(self) -> None:
        head = self.head
        del self.head
        self.net = Trunk(self.layers)
        del self.layers
        self.backbone, self.blocks, self.head = self.net, self.net.layers, head
        self.first, self.last = self.blocks[0], self.blocks[3]
        self.first_norm, self.last_linear = self.blocks[0].norm, self.blocks[3].down

    def trunk(self, x: Any) -> Any:
        return self.backbone(x)


class PartsInCommon(Named):
    """One norm in the layers of both stages, one linear in two modules after them."""

    def build(self) -> None:
        for layer in self.layers:
            layer.norm = self.layers[0].norm
        last = nn.Linear(WIDTH, WIDTH)
        self.heads, self.rest = nn.ModuleDict({"a": last, "b": last}), nn.Sequential(last, nn.Tanh(), last)

    def trunk(self, x: Any) -> Any:
        return self.rest(self.heads["a"](self.heads["b"](super().trunk(x))))


class Gated(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(x)


class Hybrid(Named):
    def build(self) -> None:
        self.layers = nn.ModuleList(kind() for kind in (Layer, Gated, Layer, Gated))


# ── tests ───────────────────────────────────────────────────────────────────────────────────────────────────────────

BASES = (Named, TwoResults, TwiceBefore)  # of which others are a kind
NAMED = (*Named.__subclasses__(), OnBothSides)
ALL = (*(kind for kind in (*Plain.__subclasses__(), UsesSecondResult, *NAMED) if kind not in BASES),)
KINDS = {kind.__name__: kind for kind in ALL}
class Trained(NamedTuple):
    returned: list[float]
    kept: Any
    metrics: dict[str, float]
    state: dict[str, Tensor]


Pairs = dict[str, tuple[Trained, list[Trained]]]


def train_all(names: list[str], pipelined: bool, folder: str) -> dict[str, Trained]:
    return {name: train(KINDS[name], pipelined, f"{folder}/{name}") for name in names}


def train(kind: type[Plain], pipelined: bool, path: str) -> Trained:
    pl.seed_everything(3, verbose=False)
    module = kind()
    chosen = {"pipeline_parallel_size": 2, **dict(kind.strategy)} if pipelined else "auto"
    run = trainer(chosen, max_epochs=1, precision="64-true", use_distributed_sampler=False)
    with warnings.catch_warnings(action="ignore", category=PossibleUserWarning):  # of modules in eval mode
        run.fit(module)
    if pipelined and issubclass(kind, Named):
        run.save_checkpoint(path)
    metrics = {name: float(value) for name, value in run.callback_metrics.items()}
    return Trained(module.returned, module.kept, metrics, full_state(module))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, folder: Path) -> Pairs:
    """Each selected module alone, and on every rank of a pipeline."""
    names = selected(request, "kind")
    (alone,) = run_ranks(1, train_all, names, False, "", init_process_group=False)
    ranks = run_ranks(2, train_all, names, True, str(folder))
    return {name: (alone[name], [rank[name] for rank in ranks]) for name in names}


@pytest.mark.parametrize("kind", KINDS)
def test_training_over_two_stages_equals_one_process(kind: str, trained: Pairs, folder: Path) -> None:
    alone, ranks = trained[kind]
    state = {name: value for rank in ranks for name, value in rank.state.items()}
    assert len(alone.returned) == (2 if kind == "StopsTraining" else STEPS)
    assert kind != "TwoDropouts" or alone.kept == 3  # of its masks
    for rank in ranks:
        assert rank.returned == pytest.approx(alone.returned, rel=0, abs=TOLERANCE)
        assert rank.kept == alone.kept
        assert rank.metrics == pytest.approx(alone.metrics, rel=0, abs=TOLERANCE)
        assert [name for name, value in rank.state.items() if not torch.equal(value, state[name])] == []
    torch.testing.assert_close(state, alone.state, rtol=0, atol=TOLERANCE)
    if issubclass(KINDS[kind], Named):
        module = KINDS[kind]().double()
        load(folder / kind, {"model": module, "optimizer": module.configure_optimizers()})
        torch.testing.assert_close(module.state_dict(), state, rtol=0, atol=0)
