"""Scripts of Fabric that several tests share: a Fabric on all ranks, a training loop, and its twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt.fabric import ShardCkptIO, ShardedStrategy
from tests.support import nets
from tests.support.nets import GLOBAL_BATCH, TOLERANCE, Case, dataset, full_state, loss_of, twin


def fabric_of(precision: Any = "64-true", io: ShardCkptIO | None = None, **options: Any) -> Fabric:
    strategy = ShardedStrategy(**options)
    world = dist.get_world_size() if dist.is_initialized() else 1
    plugins = [io] if io is not None else None
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy, precision=precision, plugins=plugins)
    fabric.launch()
    return fabric


class Language(nn.Module):
    """Returns its loss: of logits, Fabric's 64-true would make float32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net: Any = nets.BUILDERS[name]()

    def forward(self, batch: list[Tensor]) -> Tensor:
        return loss_of(self.net, batch)


def trained(fabric: Fabric, module: Any, optimizer: Any, case: Case, step: Callable[..., Tensor]) -> dict[str, Any]:
    """The loop of a script. ``step``: the loss of a batch; is told by which factor it goes into the backward."""
    first = full_state(module)
    size = GLOBAL_BATCH // fabric.strategy.topology.data_parallel
    loader = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=size))
    losses = []
    for number, batch in enumerate(loader, 1):
        holding = number % case.accumulate != 0
        with fabric.no_backward_sync(module, enabled=holding):
            loss = step(batch, scale=1 / case.accumulate)
            fabric.backward(loss / case.accumulate)
        losses.append(float(fabric.all_reduce(loss.detach().clone())))
        if not holding:
            if case.clip is not None:
                fabric.clip_gradients(module, optimizer, max_norm=case.clip)
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        val = [float(fabric.all_reduce(step(batch))) for batch in loader]
    return {"losses": losses, "first": first, "last": full_state(module), "val": sum(val) / len(val)}


def assert_close(got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=tolerance, msg=name)


def twins(ways: list[tuple[Case, str, dict[str, Any]]]) -> list[nets.Trained]:
    return [twin(case) for case, *_ in ways]
