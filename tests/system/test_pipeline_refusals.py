"""Code outside the contract of pipelines is refused in words, on every rank, and leaves processes that can train."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_shardckpt import Pipeline
from tests.support.nets import LENGTH
from tests.support.pipes import WIDTH, Layer, Plain
from tests.support.pool import run_ranks, selected
from tests.support.tiny import full_state, trainer

TOGETHER = 10  # cases in the same processes, one after another, before a run that is not refused
BY_MICROBATCH = {"pipeline": Pipeline(loss="microbatch")}
ONE_F_ONE_B = {"pipeline": Pipeline(loss="microbatch", schedule="1f1b")}


class TwoPasses(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(super().forward(tokens).argmax(-1))


class Skips(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[1](self.layers[0](x)))  # type: ignore[no-any-return]


class ReturnsInside(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


class Reduces(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return super().trunk(x)  # type: ignore[no-any-return]


class LongSkip(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x) + first
        return x


class PassesObjects(Plain):
    class Layer(Layer):
        def forward(self, given: UserDict[str, Tensor]) -> UserDict[str, Tensor]:  # type: ignore[override]
            return UserDict(x=super().forward(given["x"]))

    def trunk(self, x: Tensor) -> Tensor:
        return super().trunk(UserDict(x=x))["x"]  # type: ignore[no-any-return]


class RemembersBefore(Plain):
    def before(self, tokens: Tensor) -> Tensor:
        x = super().before(tokens)
        self.last = x.detach()
        return x


class RecomputesReentrant(Plain):
    def trunk(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # torch's, where x has no gradient
            for index, layer in enumerate(self.layers):
                x = checkpoint(layer, x, use_reentrant=True) if index % 2 else layer(x)
        return x


class Noise(Plain):  # as diffusion models do: the loss needs the noise that the layers got
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    def loss(self, batch: Any) -> Tensor:
        noise = torch.randn(*batch[0].shape, WIDTH)
        x = self.trunk(torch.cat([self.before(batch[0]), noise], 1))
        return (x[:, LENGTH:] - noise).square().mean()


class HasGenerator(Plain):
    def build(self) -> None:
        super().build()
        self.generator = torch.Generator().manual_seed(7)


class LayerHasGenerator(Plain):  # which only one stage has
    def build(self) -> None:
        super().build()
        self.layers[0].draws = random.Random(7)


class BatchNorm(Plain):
    class Layer(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.norm: Any = nn.BatchNorm1d(LENGTH)


class Metered(Plain):
    def build(self) -> None:
        super().build()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


class AddedUp(Plain):  # scalars that layers add up: microbatches give other ones than the batch
    class Layer(Layer):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(pair[0]), pair[1] + pair[0].square().mean()

    def forward(self, tokens: Tensor) -> Tensor:
        x, added = self.trunk((self.before(tokens), torch.zeros(())))
        return self.head(x) + added  # type: ignore[no-any-return]


class RankData(Plain):  # the last rank has other batches
    def rows(self, count: int, generator: torch.Generator) -> Iterator[tuple[Tensor, ...]]:
        shift = int(self.global_rank == self.trainer.world_size - 1)
        return ((tokens.roll(shift), targets) for tokens, targets in super().rows(count, generator))


class NoLayers(Plain):
    def build(self) -> None:
        super().build()
        self.layers = None


class Routers(Plain):
    def build(self) -> None:
        super().build()
        self.config = type("Config", (), {"output_router_logits": True})()


class Outside(Plain):
    def on_train_epoch_end(self) -> None:
        self.trunk(torch.zeros(1, LENGTH, WIDTH))


class LayerBreaks(Plain):
    class Layer(Layer):
        broken = False

        def forward(self, x: Tensor) -> Tensor:
            if self.broken and x.sum().isfinite():  # what other stages cannot know
                raise KeyError("in a layer")
            return super().forward(x)

    def build(self) -> None:
        super().build()
        self.layers[1].broken = True


class BackwardBreaks(Plain):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("in a backward")

    def before(self, tokens: Tensor) -> Tensor:
        return self.Broken.apply(super().before(tokens))  # type: ignore[no-untyped-call,no-any-return]


class PredictBreaks(Plain):
    def predict_step(self, batch: Any, index: int) -> Any:
        logits = self(batch[0])
        if index == 1:
            raise KeyError("while predicting")
        return logits


class ScalesLoss(Plain):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class TwoBackwards(Plain):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


class AdaptsParameters(Plain):
    def build(self) -> None:
        from peft import LoraConfig, inject_adapter_in_model  # slow

        super().build()
        config = LoraConfig(target_modules=[], target_parameters=["up.weight"])
        self.layers = nn.ModuleList(inject_adapter_in_model(config, Layer()) for _ in range(4))


@dataclass(frozen=True)
class Case:
    """A run that is refused, with words that the message has on every rank, and the errors' classes over the ranks."""

    module: type[Plain]
    words: tuple[str, ...]
    strategy: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("UnsupportedCodeError",)
    run: str = "fit"


ORDER = ("calls each layer once, in the order layers.0 … layers.3", "pipeline_parallel_size=1", "Pipeline(layers=")
OWN = ("KeyError", "RankError")
QUICK = {
    "two passes": Case(TwoPasses, ("layers.0 was called a second time", *ORDER)),
    "returns inside": Case(ReturnsInside, ("returned after 2 of the 4 layers", "before layers.2")),
    "all_reduce": Case(Reduces, ("all_reduce", "inside a pipelined step", "self.all_gather", "sync_dist=True")),
    "long skip": Case(LongSkip, ("layer layers.3 depends on", "doesn't have", "Pipeline(modules=")),
    "noise": Case(Noise, ("draws random numbers", 'Pipeline(loss="microbatch")', "microbatches=1")),
    "batch norm": Case(BatchNorm, ("layers.0.norm is a batch norm", "Pipeline(microbatches=1)")),
    "other data": Case(RankData, ("different batches for training_step", "distributed_sampler_kwargs")),
    "no layers": Case(NoLayers, ("NoLayers has no list of layers", "Pipeline(layers=["), kinds=("TopologyError",)),
    "layer breaks": Case(
        LayerBreaks, ("in a layer", "of the batch's 12 samples", "Pipeline(microbatches=1)"), ONE_F_ONE_B, kinds=OWN
    ),
}
SLOW = {
    "skips a layer": Case(Skips, ("layers.3 was called before layers.2", *ORDER)),
    "object between layers": Case(PassesObjects, ("in tuples, lists, dicts", "not in objects of other classes")),
    "remembers": Case(RemembersBefore, ("last of RemembersBefore", "keeps embed.weight", "after the layers")),
    "reentrant": Case(RecomputesReentrant, ("layer layers.1 is called in", "use_reentrant=False")),
    "metric of steps": Case(Metered, ("metric object 'mean' for each step", "on_step=False"), ONE_F_ONE_B),
    "sum of layers": Case(AddedUp, ("layers.3 cannot be joined from microbatches", 'Pipeline(loss="microbatch")')),
    "generator": Case(HasGenerator, ("generator of HasGenerator is or holds a random generator",)),
    "generator of a layer": Case(LayerHasGenerator, ("draws of Layer is or holds a random generator",)),
    "router logits": Case(Routers, ("output_router_logits", "Switch that off")),
    "outside of a step": Case(Outside, ("is on another pipeline stage", "outside of a training")),
    "backward breaks": Case(BackwardBreaks, ("in a backward",), ONE_F_ONE_B, kinds=OWN),
    "predict breaks": Case(PredictBreaks, ("while predicting",), kinds=OWN, run="predict"),
    "scales the loss": Case(ScalesLoss, ("gradient of the loss is 2", 'Pipeline(schedule="gpipe")'), ONE_F_ONE_B),
    "two backwards": Case(TwoBackwards, ("exactly one backward, found 2",)),
    "adapters of parameters": Case(AdaptsParameters, ("layers.0.up is an adapter of PEFT", "Use target_modules")),
}
CASES = QUICK | SLOW
Trained = tuple[list[Any], dict[str, Tensor]]
"""What steps returned, and weights."""


def train(kind: type[Plain], strategy: dict[str, Any]) -> Trained:
    pl.seed_everything(1, verbose=False)
    module = kind()
    run_of(strategy, limit_val_batches=0).fit(module)
    return module.returned, full_state(module, [])


def run_of(strategy: dict[str, Any], **options: Any) -> pl.Trainer:
    return trainer({"pipeline_parallel_size": 2, **strategy}, max_epochs=1, use_distributed_sampler=False, **options)


def refuse_all(names: list[str]) -> tuple[dict[str, tuple[str, str]], Trained]:
    """Return the class and message of the error of each case, and a good run after them."""
    found = {}
    for name in names:
        case = CASES[name]
        pl.seed_everything(1, verbose=False)
        try:
            getattr(run_of(case.strategy), case.run)(case.module())
            found[name] = "", "no error"
        except Exception as error:
            found[name] = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return found, train(Plain, {})


Found = tuple[dict[str, list[tuple[str, str]]], list[list[Trained]]]  # errors by case and rank; good runs by rank


@pytest.fixture(scope="module")
def refused(request: pytest.FixtureRequest) -> Found:
    """All selected cases, one after another, several in the same processes."""
    names, found, after = selected(request, "case"), dict[str, list[tuple[str, str]]](), []
    for start in range(0, len(names), TOGETHER):
        together = names[start : start + TOGETHER]
        ranks = run_ranks(2, refuse_all, together, timeout_s=480)
        found |= {name: [cases[name] for cases, _ in ranks] for name in together}
        after.append([trained for _, trained in ranks])
    return found, after


@pytest.mark.parametrize("case", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_rank_is_told_what_is_wrong_and_what_to_do(case: str, refused: Found) -> None:
    for rank, (kind, message) in enumerate(refused[0][case]):
        assert [word for word in CASES[case].words if word not in message] == [], f"rank {rank}: {kind}: {message}"
    assert {kind for kind, _ in refused[0][case]} == {*CASES[case].kinds}


def test_the_same_processes_train_afterwards_as_fresh_ones(refused: Found) -> None:
    fresh = run_ranks(2, train, Plain, {})
    for ranks in refused[1]:
        torch.testing.assert_close(ranks, fresh, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("remedy", [{"pipeline": Pipeline(microbatches=1)}, BY_MICROBATCH], ids=["one", "microbatch"])
def test_a_loss_on_noise_trains_by_either_remedy(remedy: dict[str, Any]) -> None:
    """In the first step the layers return what they got, so that the loss is 0 if it has the same noise."""
    for returned, _ in run_ranks(2, train, Noise, remedy):
        assert float(returned[0]["loss"]) == 0.0
