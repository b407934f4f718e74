"""What the pieces of training code have in common: a small network, its data, and a register of cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, CLASSES, BATCH, STEPS = 8, 5, 16, 4
PLAN = {"**layers.*.a": "colwise", "**layers.*.b": "rowwise"}
TENSOR_PARALLEL = ("tp2", "fsdp2 x tp2")
SECOND_DERIVATIVES = dict.fromkeys(TENSOR_PARALLEL, "a backward with create_graph=True went through Linear")
BY_FUNCTION = "grad asks for the gradient of net"
COMPILED = dict.fromkeys(TENSOR_PARALLEL, "is compiled, and tensor_parallel_plan shards it")
COMPUTED_WEIGHTS = dict.fromkeys(TENSOR_PARALLEL, "is computed from other parameters")


@dataclass(frozen=True)
class Case:
    """One piece of code.

    Attributes:
        module: makes the LightningModule.
        options: of the Trainer; ``callbacks`` makes them.
        refused: by topology, what an error must say instead.
        whole: what ``fully_shard`` must say instead; then the case runs with its modules in ``FSDP(ignored=…)``.
        tolerance: relative, in float64; rounding differs where sums have another order.
    """

    name: str
    module: Callable[[], pl.LightningModule]
    options: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    whole: str = ""
    tolerance: float = 1e-10


CASES: dict[str, Case] = {}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Net(nn.Module):
    """Layers, something around them, a parameter of the module itself."""

    def __init__(self, classes: int = CLASSES, Layer: Any = Block, Head: Any = nn.Linear) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = Head(WIDTH, classes)

    def features(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def dataset() -> TensorDataset:
    """Inputs, classes, noise, tokens."""
    generator, count = torch.Generator().manual_seed(1), BATCH * STEPS
    return TensorDataset(
        torch.randn(count, 6, generator=generator, dtype=torch.float64),
        torch.randint(CLASSES, (count,), generator=generator),
        torch.randn(count, 6, generator=generator, dtype=torch.float64),
        torch.randint(7, (count, 4), generator=generator),
    )


class Natural(pl.LightningModule):
    """Learns to classify. A class below it in this folder is a case, unless it is ``abstract``.

    Attributes:
        Layer, Head: what the network is made of.
        seen: numbers that must be the same on every rank, and on one process.
    """

    lr, momentum = 0.1, 0.9
    Layer: Any = Block
    Head: Any = nn.Linear

    def __init_subclass__(
        cls,
        *,
        abstract: bool = False,
        refused: Mapping[str, str] | None = None,
        whole: str = "",
        tolerance: float = 1e-10,
        **options: Any,
    ) -> None:
        super().__init_subclass__()
        if abstract or not cls.__module__.startswith(f"{__package__}."):
            return
        every = dict(refused or {})
        if whole and ("fsdp2 x tp2" not in every or "asks for the gradient" in whole):  # before a backward begins
            every["fsdp2 x tp2"] = whole  # a plan shards modules that would be ignored
        name = cls.__name__
        CASES.setdefault(name, Case(name, cls, options, every, whole, tolerance))  # sharding makes subclasses, too

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.build()

    def build(self) -> None:
        self.net = Net(Layer=self.Layer, Head=self.Head)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], index: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)

    def adamw(self) -> Any:
        """Another ``configure_optimizers``, of what is not frozen."""
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], 1e-2, eps=1e-3)

    def loader(self) -> DataLoader[Any]:
        """Rank r of n gets rows r, r + n, … of the rows that one process has in a batch."""
        place = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        sampler: DistributedSampler[Any] = DistributedSampler(dataset(), shuffle=False, **place)
        return DataLoader(dataset(), batch_size=BATCH // place["num_replicas"], sampler=sampler)

    train_dataloader = loader


class Validated(Natural, abstract=True):
    """Sees its validation loss."""

    val_dataloader = Natural.loader
    momentum = 0.0

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.seen.append(float(self.trainer.callback_metrics["val"]))


class Manual(Natural, abstract=True):
    """Optimizes by hand: one backward, something done to the gradients, a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], index: int) -> None:
        self.manual_backward(self.loss(batch))
        if self.edit(index) is not False:
            self.optimizers().step()
        self.optimizers().zero_grad()

    def edit(self, index: int) -> Any: ...
