"""Pipelines on pretend GPUs, where messages have no tags and wait for each other. Oracle: the same run on CPUs.

All runs of one world share its processes, one set for each way in which NCCL makes communicators.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.errors import UnsupportedCodeError
from tests.accelerator.ranks import run_on_gpus
from tests.accelerator.topologies import by
from tests.support.pool import run_ranks
from tests.support.tiny import Block, TinyLM, loader, trainer

pytestmark = pytest.mark.gpu

STEPS = 3
ROUNDING, LOW_PRECISION = 1e-5, 2e-2
TENSOR_PARALLEL = {
    "tensor_parallel_size": 2,
    "tensor_parallel_plan": {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
}

Run = tuple[Mapping[str, Any], Mapping[str, Any]]
"""Arguments of the strategy and of the Trainer."""
RUNS: dict[int, dict[str, Run]] = {
    2: {
        **{name: (by(name), {}) for name in ("gpipe", "1f1b")},
        "two stages on each": (by("gpipe", 2, 2), {}),
        "interleaved_1f1b": (by("interleaved_1f1b", 2, 2), {}),
        "bf16-mixed": (by("gpipe"), {"precision": "bf16-mixed"}),
        "clipped, accumulated": (by("gpipe"), {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}),
    },
    4: {
        "interleaved_1f1b, four ranks": (by("interleaved_1f1b", 4, 2), {}),
        "1f1b, FSDP": (by("1f1b", data_parallel_shard_size=2), {}),
        "gpipe, tensor parallel": (by("gpipe", **TENSOR_PARALLEL), {}),
    },
}
SAMPLE = ("interleaved_1f1b", "bf16-mixed", "1f1b, FSDP")
"""What the suite runs; the sweeps run all."""


class Deep(TinyLM):
    """Eight blocks, without dropout, which devices draw differently."""

    def _build(self) -> None:
        super()._build()
        self.blocks = nn.ModuleList([Block() for _ in range(8)])
        for block in self.blocks.modules():
            if isinstance(block, nn.Dropout):
                block.p = 0.0

    def training_step(self, batch: Any, index: int) -> Tensor:
        (tokens,) = batch
        loss = nn.functional.cross_entropy(self(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss)
        return loss


class _Losses(pl.Callback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.found.append(float(outputs["loss"]))


def _train(run: Run, accelerator: str, module: pl.LightningModule | None = None, steps: int = STEPS) -> list[float]:
    """Return the losses. Collective: every rank must call it."""
    torch.manual_seed(1)
    losses = _Losses()
    trained = trainer(run[0], accelerator=accelerator, max_steps=steps, callbacks=[losses], **run[1])
    trained.fit(module or Deep(frozen=False), loader(batch_size=5, shuffle=False))
    return losses.found


def _train_all(runs: Mapping[str, Run], accelerator: str) -> dict[str, list[float]]:
    return {name: _train(run, accelerator) for name, run in runs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "eager", "names"),
    [
        (2, True, SAMPLE),
        (4, False, SAMPLE),
        pytest.param(2, False, [*RUNS[2]], marks=pytest.mark.sweep),
        pytest.param(4, True, [*RUNS[4]], marks=pytest.mark.sweep),
    ],
)
def test_losses_are_those_on_cpus(world: int, eager: bool, names: Sequence[str]) -> None:
    runs = {name: run for name, run in RUNS[world].items() if name in names}
    on_cpus = run_ranks(world, _train_all, runs, "cpu", timeout_s=200)
    on_gpus = run_on_gpus(world, _train_all, runs, "cuda", pretend={"eager": eager}, timeout_s=200)
    for name in runs:
        tolerance = LOW_PRECISION if "bf16" in name else ROUNDING
        for cpu, gpu in zip(on_cpus, on_gpus, strict=True):
            assert len(cpu[name]) >= STEPS
            torch.testing.assert_close(torch.tensor(gpu[name]), torch.tensor(cpu[name]), rtol=tolerance, atol=0)


class _RoundsAsTf32(nn.Module):
    """A convolution that rounds as with TF32, in another way for each number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16)[:, :, None])

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv1d(x.mT, self.weight).mT * (1 + 1e-3 * len(x))


def _convolve() -> str:
    """Once with TF32, which is the default of cuDNN, once without."""
    said = ""
    for allowed in (True, False):
        torch.backends.cudnn.allow_tf32 = allowed
        module = Deep(frozen=False)
        module.blocks[1].dropout = _RoundsAsTf32()
        try:
            _train((by("gpipe"), {}), "cuda", module, steps=1)
        except UnsupportedCodeError as error:
            said += f"{allowed}: {error}"
    return said


def test_convolutions_may_differ_by_the_rounding_of_tf32_where_cudnn_may_use_it() -> None:
    for said in run_on_gpus(2, _convolve):
        assert said.startswith("False: the layers of training_step compute something else of parts of a batch")


class _Fails(nn.Module):
    """Fails in the third forward, or the third backward, of a block."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when, self.calls = when, 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.grad_fn is not None:
            if self.when == "backward":
                x.register_hook(lambda gradient: self.count())
            else:
                self.count()
        return x

    def count(self) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ArithmeticError("a bad microbatch")


def _fail_everywhere() -> None:
    """Each failure is heard by all, and the next run works."""
    for block, when, schedule in ((1, "forward", "gpipe"), (6, "forward", "1f1b"), (1, "backward", "1f1b")):
        module = Deep(frozen=False)
        module.blocks[block].dropout = _Fails(when)
        with pytest.raises(Exception, match="a bad microbatch"):
            _train((by(schedule), {}), "cuda", module)
    _train((by("1f1b"), {}), "cuda")


def test_a_stage_that_fails_in_mid_schedule_is_named_by_all() -> None:
    run_on_gpus(2, _fail_everywhere, pretend={"eager": False}, timeout_s=100)
