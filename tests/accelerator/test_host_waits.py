"""How often the host waits for the device in a step. Oracle: a step of Lightning's own strategies.

The batch, which the host copies, is one wait; Lightning's ModelParallelStrategy reads a flag of its own besides. In a
pipeline the host reads once what the last stage reports, and the scale of the loss if backward passes ran before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tests.accelerator import device
from tests.accelerator.ranks import run_on_gpus
from tests.accelerator.test_pipelines import by
from tests.accelerator.test_training import HSDP, REPLICAS, TENSOR_PARALLEL
from tests.support.tiny import TinyLM, loader, trainer

STEPS = 6  # the first of them looks whether ranks agree
COPY_OF_THE_BATCH = 1


class _Silent(TinyLM):
    """Reads no loss."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        return nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class _Penalized(_Silent):
    """Its blocks' parameters get gradients through units and besides."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step(batch, index) + 1e-3 * sum(p.square().sum() for p in self.blocks.parameters())


class _ShardedByTorch(_Silent):
    def configure_model(self) -> None:
        self.scale = nn.Parameter(torch.ones(1))  # FSDP2 takes none without dims
        for block in self.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class _Waits(pl.Callback):
    """Notes how often the host had waited when each batch was done."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(device.counts()["host_waits"])

    def of_steps(self) -> list[int]:
        return [after - before for before, after in pairwise(self.seen)]


def _ours(strategy: Mapping[str, Any], options: Mapping[str, Any], kind: type[TinyLM] = _Silent) -> list[int]:
    waits = _Waits()
    run = trainer(strategy, accelerator="cuda", max_steps=STEPS, callbacks=[waits], **options)
    run.fit(kind(frozen=False), loader())
    return waits.of_steps()


def _theirs() -> list[int]:
    waits, options = _Waits(), {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = pl.Trainer(accelerator="cuda", devices=2, strategy=strategy, max_steps=STEPS, callbacks=[waits], **options)
    run.fit(_ShardedByTorch(frozen=False), loader())
    return waits.of_steps()


CASES: dict[str, tuple[int, Mapping[str, Any], Mapping[str, Any]]] = {
    "one process": (1, {}, {}),
    "FSDP, clipped": (2, {}, {"gradient_clip_val": 0.1}),
    "HSDP": (4, HSDP, {}),
    "replicas": (2, REPLICAS, {}),
    "tensor parallel": (2, TENSOR_PARALLEL, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_the_copy_of_its_batch_alone(name: str) -> None:
    world, strategy, options = CASES[name]
    for waits in run_on_gpus(world, _ours, strategy, options):
        assert waits == [COPY_OF_THE_BATCH] * (STEPS - 1)


def test_a_gradient_that_comes_through_no_unit_waits_for_the_streams_of_fully_shard() -> None:
    """They may be adding to the same memory. The engine that has no streams of its own waits for nothing."""
    exact = run_on_gpus(2, _ours, {"fsdp_engine": "exact"}, {}, _Penalized)
    parameters = len(list(_Penalized(frozen=False).blocks.parameters()))
    for waits, without in zip(run_on_gpus(2, _ours, {}, {}, _Penalized), exact, strict=True):
        assert waits == [one + parameters for one in without]


@pytest.mark.filterwarnings("ignore")
def test_lightnings_own_strategy_waits_as_often_or_more() -> None:
    for waits in run_on_gpus(2, _theirs):
        assert min(waits) >= COPY_OF_THE_BATCH


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _by_torch() -> list[int]:
    """Train two stages by a schedule of torch."""
    rank, cuda = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(nn.Linear(8, 8).to(cuda), rank, 2, cuda)
    schedule = Schedule1F1B(stage, 4, loss_fn=_distance)
    optimizer, seen = torch.optim.AdamW(stage.submod.parameters()), []
    for _ in range(STEPS):
        seen.append(device.counts()["host_waits"])
        batch = torch.ones(8, 8).to(cuda)
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
        optimizer.step()
        optimizer.zero_grad()
    return [after - before for before, after in pairwise(seen)][1:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("schedule", "more"), [("gpipe", 1), ("1f1b", 2)])
def test_a_step_of_a_pipeline_waits_once_or_twice_more_than_one_of_torch(schedule: str, more: int) -> None:
    ours = run_on_gpus(2, _ours, by(schedule), {"gradient_clip_val": 0.1})
    for waits, torchs in zip(ours, run_on_gpus(2, _by_torch), strict=True):
        assert max(waits) == min(torchs) + more
