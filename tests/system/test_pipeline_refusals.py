"""What cannot be pipelined is refused in words, on every rank, and leaves processes that can train."""

from __future__ import annotations

import time
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
from torch.distributed.tensor import distribute_tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset
from torchmetrics import MeanMetric

from lightning_shardckpt import Pipeline
from tests.support.pool import run_each, run_ranks, selected
from tests.support.tiny import full_state, trainer

WIDTH, LENGTH, VOCABULARY, BATCH = 6, 3, 11, 8
PROMPT_S = 30  # from the start of a run to its error on the last rank; a test machine may be busy
TOGETHER = 9  # cases in the same processes, one after another, before a run that is not refused

# ── modules ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Good(pl.LightningModule):
    """What the refused ones differ from."""

    Layer: Any = Layer

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.losses: list[float] = []

    def layer(self) -> nn.Module:
        return self.Layer()  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.after(self.trunk(self.before(tokens)))

    def before(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embed(tokens)
        return x

    def trunk(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def after(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits

    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self(batch), batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, index: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch: Any, index: int) -> Any:
        self.log("val", loss_of(self(batch), batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Any:
        return self(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader(Rows(shift=self.shift()), batch_size=None)

    val_dataloader = predict_dataloader = train_dataloader

    def shift(self) -> int:
        return 0


class Rows(IterableDataset[Tensor]):
    """Batches of tokens, the same on all ranks but for ``shift``."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(2):
            yield (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) + self.shift) % VOCABULARY


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


# --- layers that a step does not call once each, in order ---


class TwoPasses(Good):
    def training_step(self, batch: Any, index: int) -> Any:
        return loss_of(self(self(batch).argmax(-1)), batch)


class Skips(Good):
    def trunk(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[1](self.layers[0](x)))  # type: ignore[no-any-return]


class ReturnsInside(Good):
    def trunk(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))  # type: ignore[no-any-return]


# --- communication ---


class Reduces(Good):
    def trunk(self, x: Tensor) -> Tensor:
        dist.all_reduce(torch.ones(1))
        return super().trunk(x)


# --- glue that other stages would have to know more for ---


class LongSkip(Good):
    def trunk(self, x: Tensor) -> Tensor:
        first = x
        for layer in self.layers:
            x = layer(x) + first
        return x


class HeadFirst(Good):
    def __init__(self) -> None:
        super().__init__()
        self._modules = {name: self._modules[name] for name in ("head", "embed", "layers")}


class PassesObjects(Good):
    class Layer(Layer):
        def forward(self, given: UserDict[str, Tensor]) -> UserDict[str, Tensor]:  # type: ignore[override]
            return UserDict(x=super().forward(given["x"]))

    def trunk(self, x: Tensor) -> Tensor:
        given = UserDict(x=x)
        for layer in self.layers:
            given = layer(given)
        return given["x"]


class SumOfAuxiliary(Good):
    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            self.auxiliary = x.square().mean()
            return super().forward(x)

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self(batch), batch)
        auxiliary: Any = [layer.auxiliary for layer in self.layers]
        return loss + sum(auxiliary)


class LogsBefore(Good):
    def before(self, tokens: Tensor) -> Tensor:
        x = super().before(tokens)
        self.log("norm", x.norm())
        return x


class RemembersBefore(Good):
    def before(self, tokens: Tensor) -> Tensor:
        x = super().before(tokens)
        self.last = x.detach()
        return x


class RecomputesReentrant(Good):
    """Every other layer."""

    def trunk(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = recomputed(layer, x) if index % 2 else layer(x)
        return x


def recomputed(layer: nn.Module, x: Tensor) -> Tensor:
    # torch warns where ``x`` has no gradient: when the strategy looks at the step
    with warnings.catch_warnings(action="ignore", category=UserWarning):
        return checkpoint(layer, x, use_reentrant=True)  # type: ignore[no-any-return]


# --- values that only one stage has ---


class Branches(Good):
    def before(self, tokens: Tensor) -> Tensor:
        x = super().before(tokens)
        return x if x.mean() > 0 else -x


# --- microbatches ---


class Scale(nn.Module):
    """Its result tells what it got."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Noise(Good):
    """As diffusion models do: the loss needs the noise that the layers got."""

    Layer = Scale

    def training_step(self, batch: Any, index: int) -> Any:
        noise = torch.randn(*batch.shape, WIDTH)
        x = self.trunk(torch.cat([self.before(batch), noise], 1))
        return (x[:, batch.shape[1] :] - noise).square().mean()


class BatchNorm(Good):
    def layer(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(LENGTH), Layer())


class Metered(Good):
    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Any:
        loss = super().training_step(batch, index)
        self.mean(loss)
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        return loss


class Opaque:
    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


class OpaqueBatch(Good):
    def train_dataloader(self) -> Any:
        return map(Opaque, Rows(0))

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch.tokens if isinstance(batch, Opaque) else batch[0].tokens, index)


class Uneven(Good):
    def train_dataloader(self) -> Any:
        return ({"tokens": tokens, "anchors": torch.ones(5)} for tokens in Rows(0))

    def training_step(self, batch: Any, index: int) -> Any:
        return super().training_step(batch["tokens"], index)


class AddedUp(Good):
    """Scalars that layers add up: microbatches give other ones than the batch."""

    class Layer(Layer):
        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(pair[0]), pair[1] + pair[0].square().mean()

    def training_step(self, batch: Any, index: int) -> Any:
        pair: Any = (self.before(batch), torch.zeros(()))
        for layer in self.layers:
            pair = layer(pair)
        return loss_of(self.after(pair[0]), batch) + pair[1]


# --- ranks that differ ---


class RankData(Good):
    def shift(self) -> int:
        return self.global_rank


# --- modules that cannot be split ---


class NoLayers(Good):
    def __init__(self) -> None:
        super().__init__()
        self.layers = None  # type: ignore[assignment]


class Compiled(Good):
    def __init__(self) -> None:
        super().__init__()
        self.net: Any = torch.compile(Good(), backend="eager")


class ShardsItself(Good):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        self.head.weight = nn.Parameter(distribute_tensor(self.head.weight.detach(), mesh))


class Routers(Good):
    def __init__(self) -> None:
        super().__init__()
        self.config = type("Config", (), {"output_router_logits": True})()


# --- outside of steps, and failures of the user's own ---


class Outside(Good):
    def on_train_epoch_end(self) -> None:
        self.trunk(torch.zeros(1, LENGTH, WIDTH))


class Breaks(Layer):
    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken and x.sum().isfinite():  # what other stages cannot know
            raise KeyError("in a layer")
        return super().forward(x)


class LayerBreaks(Good):
    Layer, index = Breaks, 1

    def __init__(self) -> None:
        super().__init__()
        broken: Any = self.layers[self.index]
        broken.broken = True


class BackwardBreaks(Good):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise KeyError("in a backward")

    def before(self, tokens: Tensor) -> Tensor:
        return self.Broken.apply(super().before(tokens))  # type: ignore[no-untyped-call,no-any-return]


class PredictBreaks(Good):
    def predict_step(self, batch: Any, index: int) -> Any:
        logits = self(batch)
        if index == 1:
            raise KeyError("while predicting")
        return logits


class ScalesLoss(Good):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class TwoBackwards(Good):
    def backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=True)
        loss.backward()


# --- what only one process would do with a batch ---


class Centering(Good):
    class Layer(Layer):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x - x.mean(0)


class HooksNode(Good):
    def before(self, tokens: Tensor) -> Tensor:
        x = super().before(tokens)
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: (gradients[0] / gradients[0].norm(),))
        return x


class StepsByLBFGS(Good):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class AdaptsParameters(Good):
    def layer(self) -> nn.Module:
        from peft import LoraConfig, inject_adapter_in_model  # slow

        config = LoraConfig(target_modules=[], target_parameters=["0.weight"])
        return inject_adapter_in_model(config, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))


# ── cases ───────────────────────────────────────────────────────────────────────────────────────────────────────────

ORDER = ("calls each layer once, in the order layers.0 … layers.3", "pipeline_parallel_size=1", "Pipeline(layers=")
COLLECTIVE = ("inside a pipelined step", "self.all_gather", "sync_dist=True")
UNKNOWN = ("doesn't have", "Pipeline(modules=")
NO_VALUE = ("needs the value of embed.weight", "doesn't have", "move it into a layer")
DIFFERENT = ("different batches for training_step", "distributed_sampler_kwargs")
OF_SAMPLES = ("of the batch's 8 samples", "Pipeline(microbatches=1)")
MEANS = 'Pipeline(loss="microbatch")'
REENTRANT = ("torch.utils.checkpoint with use_reentrant=True", "use_reentrant=False")
REMEMBER = ("keeps embed.weight", "after the layers")
ON_NODE = ("is registered on a node of autograd's graph", "register_hook")


@dataclass(frozen=True)
class Case:
    """A run that is refused.

    Attributes:
        words: must be in the message on every rank.
        kinds: the classes of the errors, over the ranks.
    """

    module: type[pl.LightningModule]
    words: tuple[str, ...]
    strategy: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = ("UnsupportedCodeError",)
    run: str = "fit"


OWN = ("KeyError", "RankError")
ONE_MICROBATCH = {"pipeline": Pipeline(microbatches=1)}
BY_MICROBATCH = {"pipeline": Pipeline(loss="microbatch")}
ONE_F_ONE_B = {"pipeline": Pipeline(loss="microbatch", schedule="1f1b")}
CASES = {
    "two passes": Case(TwoPasses, ("layers.0 was called a second time", *ORDER)),
    "skips a layer": Case(Skips, ("layers.3 was called before layers.2", *ORDER)),
    "returns inside": Case(ReturnsInside, ("returned after 2 of the 4 layers", "before layers.2")),
    "all_reduce": Case(Reduces, ("all_reduce", *COLLECTIVE)),
    "long skip": Case(LongSkip, ("layer layers.3 depends on", *UNKNOWN)),
    "head first": Case(HeadFirst, ("the result of the step depends on head.weight", *UNKNOWN)),
    "object between the layers": Case(PassesObjects, ("in tuples, lists, dicts", "not in objects of other classes")),
    "sum of auxiliary losses": Case(SumOfAuxiliary, ("the result of the step depends on", "doesn't have")),
    "logs before the layers": Case(LogsBefore, ("the value logged as 'norm' depends on embed.weight", *UNKNOWN)),
    "remembers before the layers": Case(RemembersBefore, ("last of RemembersBefore", *REMEMBER)),
    "recomputes reentrant": Case(RecomputesReentrant, ("layer layers.1 is called in", *REENTRANT)),
    "branches": Case(Branches, ("__bool__", *NO_VALUE)),
    "noise": Case(Noise, ("training_step draws random numbers", MEANS, "microbatches=1")),
    "metric of steps, 1f1b": Case(
        Metered, ("logs the metric object 'mean' for each step", "on_step=False"), ONE_F_ONE_B
    ),
    "batch norm": Case(BatchNorm, ("layers.0.0 is a batch norm", "Pipeline(microbatches=1)")),
    "scalar through the layers": Case(AddedUp, ("layers.3 cannot be joined from microbatches", MEANS)),
    "other data": Case(RankData, DIFFERENT),
    "no layers": Case(NoLayers, ("NoLayers has no list of layers", "Pipeline(layers=["), kinds=("TopologyError",)),
    "wrong split": Case(
        Good, ("Pipeline(split=", "'half'"), {"pipeline": Pipeline(split="half")}, kinds=("TopologyError",)
    ),
    "compiled": Case(
        Compiled,
        ("net is compiled as a whole", "Compile the layers"),
        {"pipeline": Pipeline(layers=["net.layers.*"])},
    ),
    "shards itself": Case(ShardsItself, ("ShardsItself shards itself in configure_model", "FSDP(units=")),
    "router logits": Case(Routers, ("output_router_logits", "Switch that off")),
    "outside of a step": Case(Outside, ("is on another pipeline stage", "outside of a training")),
    "layer breaks, 1f1b": Case(LayerBreaks, ("in a layer", *OF_SAMPLES), ONE_F_ONE_B, kinds=OWN),
    "backward breaks, 1f1b": Case(BackwardBreaks, ("in a backward",), ONE_F_ONE_B, kinds=OWN),
    "predict breaks": Case(PredictBreaks, ("while predicting",), kinds=OWN, run="predict"),
    "scales the loss": Case(ScalesLoss, ("gradient of the loss is 2", 'Pipeline(schedule="gpipe")'), ONE_F_ONE_B),
    "two backwards": Case(TwoBackwards, ("exactly one backward, found 2",)),
    "centers the batch, 1f1b": Case(Centering, ("than of the whole", "layers.3 differs"), ONE_F_ONE_B),
    "hook on a node": Case(HooksNode, ON_NODE),
    "LBFGS": Case(StepsByLBFGS, ("LBFGS updates all parameters as one", "pipeline_parallel_size=1")),
    "adapters of parameters": Case(AdaptsParameters, ("layers.0.0 is an adapter of PEFT", "Use target_modules")),
}


Trained = tuple[list[float], dict[str, Tensor]]
"""Losses and weights."""


class Reuses(Good):
    """Has layers that were trained in another module."""

    def __init__(self) -> None:
        super().__init__()
        before = Good()
        run_of({}, limit_val_batches=0).fit(before)
        self.layers = before.layers


CASES["trained in another pipeline"] = Case(Reuses, ("of Reuses was split into pipeline stages before",))


@dataclass(frozen=True)
class Refused:
    """What one rank saw of a case."""

    kind: str
    message: str
    seconds: float


def refuse_all(names: list[str]) -> tuple[dict[str, Refused], Trained]:
    """Each case, and then a good run."""
    return {name: refuse(CASES[name]) for name in names}, good()


def refuse(case: Case) -> Refused:
    pl.seed_everything(1, verbose=False)
    kind, message, started = "", "no error", time.monotonic()
    try:
        run = run_of(case.strategy)
        getattr(run, case.run)(case.module())
    except Exception as error:
        kind, message = type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return Refused(kind, message, time.monotonic() - started)


def good() -> Trained:
    pl.seed_everything(1, verbose=False)
    module = Good()
    run_of({}, limit_val_batches=0).fit(module)
    return module.losses, full_state(module, [])


def run_of(strategy: dict[str, Any], limit_val_batches: int = 1) -> pl.Trainer:
    return trainer(
        {"pipeline_parallel_size": 2, **strategy},
        max_epochs=1,
        limit_val_batches=limit_val_batches,
        use_distributed_sampler=False,
    )


# ── tests ───────────────────────────────────────────────────────────────────────────────────────────────────────────


Found = tuple[dict[str, list[Refused]], list[list[Trained]]]
"""The cases by name, on each rank; the good runs, on each rank."""


@pytest.fixture(scope="module")
def refused(request: pytest.FixtureRequest) -> Found:
    """All selected cases, one after another, several in the same processes."""
    names = selected(request, "case")
    found: dict[str, list[Refused]] = {}
    after = []
    for start in range(0, len(names), TOGETHER):
        together = names[start : start + TOGETHER]
        ranks = run_ranks(2, refuse_all, together, timeout_s=480)
        found |= {name: [cases[name] for cases, _ in ranks] for name in together}
        after.append([trained for _, trained in ranks])
    return found, after


QUICK = (
    *("two passes", "returns inside", "all_reduce", "long skip", "branches", "noise", "batch norm", "other data"),
    *("no layers", "layer breaks, 1f1b", "sum of auxiliary losses"),
)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_every_rank_is_told_what_is_wrong_and_what_to_do(case: str, refused: Found) -> None:
    for rank, found in enumerate(refused[0][case]):
        missing = [word for word in CASES[case].words if word not in found.message]
        assert missing == [], f"rank {rank}: {found.kind}: {found.message}"
        assert found.seconds < PROMPT_S
    assert {found.kind for found in refused[0][case]} == {*CASES[case].kinds}


def test_the_same_processes_train_afterwards_as_fresh_ones(refused: Found) -> None:
    fresh = run_ranks(2, good)
    for ranks in refused[1]:
        for (losses, state), (losses_fresh, state_fresh) in zip(ranks, fresh, strict=True):
            assert losses == losses_fresh and state.keys() == state_fresh.keys()
            assert [name for name, value in state.items() if not torch.equal(value, state_fresh[name])] == []


def losses(kind: type[Good], strategy: dict[str, Any]) -> list[float]:
    pl.seed_everything(1, verbose=False)
    module = kind()
    run_of(strategy).fit(module)
    return module.losses


@pytest.mark.slow
def test_what_microbatches_are_refused_for_trains_with_one_or_with_losses_of_their_own() -> None:
    """The loss on noise is how far what came through the layers is from the noise that the loss saw."""
    one: dict[str, Any] = {"pipeline": Pipeline(microbatches=1)}
    whole = [OpaqueBatch, Uneven, Good]
    calls = {(kind, ""): (2, losses, kind, one) for kind in (*whole, Noise)}
    found = run_each({**calls, (Noise, "of its own"): (2, losses, Noise, BY_MICROBATCH)})
    for rank in range(2):
        assert [found[Noise, how][rank][:1] for how in ("", "of its own")] == [[0.0], [0.0]]
        assert [found[kind, ""][rank] for kind in whole] == [found[Good, ""][rank]] * 3
        assert len(found[Good, ""][rank]) == 2


class TensorRankData(Good):
    def shift(self) -> int:
        return self.global_rank % 2


class OnePipelineData(Good):
    def shift(self) -> int:
        return int(self.global_rank == 3)


ON_FOUR = [
    Case(
        TensorRankData,
        ("tensor-parallel group got different batches",),
        {"tensor_parallel_size": 2, "tensor_parallel_plan": {"layers.*.linear": "replicate"}},
    ),
    Case(
        OnePipelineData,
        ("the ranks of a pipeline got different batches for training_step",),
        {"data_parallel_shard_size": 2},
    ),
]


@pytest.mark.slow
def test_batches_that_differ_between_tensor_ranks_or_in_one_pipeline_are_refused_in_all() -> None:
    for number, ranks in run_each({n: (4, refuse, case) for n, case in enumerate(ON_FOUR)}, timeout_s=60).items():
        for found in ranks:
            assert found.kind == "UnsupportedCodeError" and ON_FOUR[number].words[0] in found.message
