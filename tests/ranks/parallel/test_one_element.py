"""Parameters of one element, which the numbers that optimizers keep beside them are not taken for."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shardckpt import Pipeline
from tests.support import tiny
from tests.support.nets import full_state
from tests.support.pool import run_ranks
from tests.sweeps.twins.base import CLASSES, Natural


class NumbersInTensors(torch.optim.SGD):
    """Steps by lists of numbers, as optimizers with ``capturable`` do, which want a GPU."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = self.param_groups[0]["params"]
        with torch.no_grad():
            sizes = [torch.tensor(0.1, dtype=torch.float64) for _ in parameters]
            changes = torch._foreach_mul([p.grad for p in parameters], sizes)
            torch._foreach_addcdiv_(parameters, changes, torch._foreach_div(parameters, sizes), value=-0.1)
        return loss


OPTIMIZERS: dict[str, Any] = {
    "fused AdamW": partial(torch.optim.AdamW, fused=True),
    "fused AdamW, its lr a tensor": partial(torch.optim.AdamW, fused=True, lr=torch.tensor(1e-3)),
    "AdamW by lists": partial(torch.optim.AdamW, foreach=True),
    "numbers in tensors": NumbersInTensors,
}
TOPOLOGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {},
    "tp2": {"tensor_parallel_size": 2, "tensor_parallel_plan": {"first": "colwise_rep"}},
    "replicas": {"data_parallel_shard_size": 1, "data_parallel_replicate_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "pipeline": Pipeline(layers=["first", "one"])},
}


class Narrow(Natural):
    """One element in one, two, three and no dims."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer

    def build(self) -> None:
        self.first, self.one, self.last = nn.Linear(6, 4), nn.Linear(4, 1), nn.Linear(1, CLASSES)
        self.matrix = nn.Linear(1, 1)
        self.cube, self.number = nn.Parameter(torch.ones(1, 1, 1)), nn.Parameter(torch.tensor(0.5))

    def loss(self, batch: list[Tensor]) -> Tensor:
        x = self.matrix(self.one(self.first(batch[0])))
        return F.cross_entropy(self.last(x * self.cube[0] * self.number), batch[1])

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def train(strategy: dict[str, Any] | str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in OPTIMIZERS:
        pl.seed_everything(3, verbose=False)
        module = Narrow(name)
        tiny.trainer(strategy, max_epochs=1, precision="64-true", use_distributed_sampler=False).fit(module)
        found[name] = full_state(module)
    return found


@pytest.mark.parametrize(
    "topology", [pytest.param(t, marks=pytest.mark.sweep if t in ("replicas", "pp2") else []) for t in TOPOLOGIES]
)
def test_any_optimizer_steps_a_parameter_of_one_element(topology: str) -> None:
    (alone,) = run_ranks(1, train, "auto", init_process_group=False)
    for found in run_ranks(2, train, TOPOLOGIES[topology]):
        for name, expected in alone.items():
            state = {**expected, **found[name]} if topology == "pp2" else found[name]
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-10, msg=name)
