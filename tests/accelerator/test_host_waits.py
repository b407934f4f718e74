"""How often the host waits for the device in a step, and how many kernels it starts.

Oracles: a step of Lightning's own strategy on ``fully_shard``, and of a schedule of torch's pipelines. All runs of one
world share its processes.

The batch, which the host copies, is one wait; Lightning's ModelParallelStrategy reads a flag of its own besides. In a
pipeline the host reads once what the last stage reports, and the scale of the loss if backward passes ran before it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

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
from tests.accelerator.topologies import HSDP, REPLICAS, TENSOR_PARALLEL, by
from tests.support.tiny import Block, TinyLM, loader, trainer

STEPS = 4  # the first of them looks whether ranks agree
COPY_OF_THE_BATCH = 1
MORE_LAYERS = 4


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


class _Deep(_Silent):
    def _build(self) -> None:
        super()._build()
        self.blocks.extend(Block() for _ in range(MORE_LAYERS))


class _DeepByTorch(_ShardedByTorch, _Deep):
    pass


class Step(NamedTuple):
    """What one step took."""

    waits: int
    kernels: int


def _now() -> Step:
    counts = device.counts()
    return Step(counts["host_waits"], counts["kernels"])


def _steps(seen: list[Step]) -> list[Step]:
    return [Step(b.waits - a.waits, b.kernels - a.kernels) for a, b in pairwise(seen)]


class _Watch(pl.Callback):
    """Notes the counts when each batch is done."""

    def __init__(self) -> None:
        self.seen: list[Step] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(_now())


def _ours(strategy: Mapping[str, Any], kind: type[TinyLM] = _Silent, **options: Any) -> list[Step]:
    watch = _Watch()
    run = trainer(strategy, accelerator="cuda", max_steps=STEPS, callbacks=[watch], **options)
    run.fit(kind(frozen=False), loader())
    return _steps(watch.seen)


def _theirs(kind: type[TinyLM] = _ShardedByTorch) -> list[Step]:
    watch, options = _Watch(), {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    run = pl.Trainer(accelerator="cuda", devices=2, strategy=strategy, max_steps=STEPS, callbacks=[watch], **options)
    run.fit(kind(frozen=False), loader())
    return _steps(watch.seen)


def _distance(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _by_torch() -> list[Step]:
    """Train two stages by a schedule of torch."""
    rank, cuda = dist.get_rank(), torch.device("cuda", torch.cuda.current_device())
    stage = PipelineStage(nn.Linear(8, 8).to(cuda), rank, 2, cuda)
    schedule = Schedule1F1B(stage, 4, loss_fn=_distance)
    optimizer, seen = torch.optim.AdamW(stage.submod.parameters()), []
    for _ in range(STEPS):
        seen.append(_now())
        batch = torch.ones(8, 8).to(cuda)
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
        optimizer.step()
        optimizer.zero_grad()
    return _steps(seen)[1:]


CLIPPED = {"gradient_clip_val": 0.1}
RUNS: dict[int, dict[str, Callable[[], list[Step]]]] = {
    1: {"one process": partial(_ours, {})},
    2: {
        "FSDP": partial(_ours, {}),
        "FSDP, clipped": partial(_ours, {}, **CLIPPED),
        "replicas": partial(_ours, REPLICAS),
        "tensor parallel": partial(_ours, TENSOR_PARALLEL),
        "penalized": partial(_ours, {}, _Penalized),
        "1f1b": partial(_ours, by("1f1b"), **CLIPPED),
        "Lightning's": _theirs,
        "FSDP, deep": partial(_ours, {}, _Deep),
        "Lightning's, deep": partial(_theirs, _DeepByTorch),
        "torch's 1f1b": _by_torch,
    },
    4: {"HSDP": partial(_ours, HSDP)},
}


def _run(world: int) -> dict[str, list[Step]]:
    warnings.simplefilter("ignore")  # of Lightning's strategy and of torch's schedules
    return {name: run() for name, run in RUNS[world].items()}


@pytest.fixture(scope="module")
def runs() -> dict[str, list[list[Step]]]:
    """The steps of each run, for each rank."""
    found = {}
    for world, names in RUNS.items():
        ranks = run_on_gpus(world, _run, world)
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


Runs = dict[str, list[list[Step]]]


@pytest.mark.parametrize("name", ["one process", "FSDP", "FSDP, clipped", "HSDP", "replicas", "tensor parallel"])
def test_a_step_waits_for_the_copy_of_its_batch_alone(name: str, runs: Runs) -> None:
    for steps in runs[name]:
        assert [step.waits for step in steps] == [COPY_OF_THE_BATCH] * (STEPS - 1)


def test_a_read_outside_of_a_forward_waits_for_nothing(runs: Runs) -> None:
    """Its gradient comes through the unit."""
    for steps in runs["penalized"]:
        assert [step.waits for step in steps] == [COPY_OF_THE_BATCH] * (STEPS - 1)


def test_a_layer_starts_one_kernel_more_than_with_fully_shard_alone(runs: Runs) -> None:
    """And a step up to 35 more, whatever the number of layers: the tied weights are a unit of their own."""
    names = ("FSDP", "FSDP, deep", "Lightning's", "Lightning's, deep")
    for ours, deep, theirs, theirs_deep in zip(*(runs[name] for name in names), strict=True):
        assert max(ours).kernels <= min(theirs).kernels + 35
        assert max(deep).kernels <= min(theirs_deep).kernels + 35 + MORE_LAYERS


def test_a_step_of_a_pipeline_waits_twice_more_than_one_of_torch(runs: Runs) -> None:
    for steps, torchs in zip(runs["1f1b"], runs["torch's 1f1b"], strict=True):
        assert max(steps).waits == min(torchs).waits + 2
