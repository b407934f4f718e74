"""torch.compile of layers, of parts of them and of all: equal to one process without it, or refused by name."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.errors import TopologyError
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_each, run_ranks
from tests.sweeps.twins.base import PLAN, Natural

pytestmark = pytest.mark.slow

BACKEND = "aot_eager"  # as Inductor's, without C++
TENSOR_PARALLEL = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}


class Decays(nn.Module):
    """Changes its own weights, in both ways."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale, self.shift = inner, nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.scale.data.mul_(0.9)
            with torch.no_grad():
                self.shift.mul_(0.9)
        return self.inner(x) * self.scale + self.shift


class Compiles(Natural):
    """Trains and validates by turns, so that there are gradients when nothing records them."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        if part == "all":
            self.net = torch.compile(self.net, backend=BACKEND)
        elif part == "head":
            self.net.head.compile(backend=BACKEND)
        elif part.startswith("decays"):
            self.net.layers[0] = Decays(self.net.layers[0])
        if part == "decays, compiled":
            self.net.layers[0].compile(backend=BACKEND)

    def on_train_start(self) -> None:
        if self.part == "late":
            self.net.layers[1].a.compile(backend=BACKEND)

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.log("loss", self.loss(batch), sync_dist=True)

    val_dataloader = Natural.train_dataloader


PARTS = {"all": "none", "decays, compiled": "decays", "late": "none"}
"""What is compiled → what one process trains."""


def train(strategy: dict[str, Any] | str, parts: list[str]) -> dict[str, Any]:
    found = dict[str, Any]()
    for part in parts:
        torch.compiler.reset()
        pl.seed_everything(3, verbose=False)
        module = Compiles(part)
        run = tiny.trainer(strategy, max_epochs=2, precision="64-true", use_distributed_sampler=False)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not")  # torch's own
                run.fit(module)
        except TopologyError as error:
            found[part] = str(error)
            continue
        state = {name.replace("_orig_mod.", ""): value for name, value in full_state(module).items()}
        found[part] = {**state, "loss": run.callback_metrics["loss"]}
    return found


REFUSED = {"all": "net", "late": "net.layers.1.a"}
WAYS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "sharded": ({}, [*PARTS]),
    "tensor": (TENSOR_PARALLEL, [*REFUSED, "head"]),
}


def test_compiled_modules_train_on_shards_as_on_one_process_and_those_that_a_plan_shards_are_refused() -> None:
    (alone,) = run_ranks(1, train, "auto", sorted({*PARTS.values()}), init_process_group=False)
    found = run_each({way: (2, train, strategy, parts) for way, (strategy, parts) in WAYS.items()}, timeout_s=200)
    for rank, part in itertools.product(found["sharded"], PARTS):
        torch.testing.assert_close(rank[part], alone[PARTS[part]], rtol=0, atol=1e-10)
    for rank in found["tensor"]:
        torch.testing.assert_close(rank["head"], alone["none"], rtol=0, atol=1e-10)
        for part, name in REFUSED.items():
            assert rank[part].startswith(f"{name} is compiled, and tensor_parallel_plan shards it"), rank[part]
