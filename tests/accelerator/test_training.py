"""Training on pretend GPUs. Oracle: the same run on CPUs with gloo."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_shardckpt import FSDP
from lightning_shardckpt.parallel.tensors.placement import peers_of
from tests.accelerator.ranks import run_on_gpus
from tests.accelerator.topologies import HSDP, REPLICAS, ROUNDING, TENSOR_PARALLEL
from tests.support.pool import run_ranks, selected
from tests.support.tiny import TinyLM, fit, loader, trainer

pytestmark = pytest.mark.gpu

STEPS = 3
LOW_PRECISION = 2e-2  # autocast has another list of operations for each device
CASES: dict[str, tuple[int, Mapping[str, Any], Mapping[str, Any], float]] = {
    "one process": (1, {}, {}, ROUNDING),
    "FSDP": (2, {}, {}, ROUNDING),
    "HSDP": (4, HSDP, {}, ROUNDING),
    "a module that is not sharded": (4, {**HSDP, "fsdp": FSDP(ignored=["blocks.0"])}, {}, ROUNDING),
    "replicas": (2, REPLICAS, {}, ROUNDING),
    "tensor parallel": (2, TENSOR_PARALLEL, {}, ROUNDING),
    "bf16-mixed": (2, {}, {"precision": "bf16-mixed"}, LOW_PRECISION),
    "bf16-true": (2, {}, {"precision": "bf16-true"}, LOW_PRECISION),
    "16-mixed": (2, {}, {"precision": "16-mixed"}, LOW_PRECISION),
    "checkpointed activations": (2, {"fsdp": FSDP(activation_checkpointing=True)}, {}, ROUNDING),
    "clipped by norm": (2, TENSOR_PARALLEL, {"gradient_clip_val": 0.1}, ROUNDING),
    "accumulated": (2, {}, {"accumulate_grad_batches": 2}, ROUNDING),
    "fused optimizer": (2, {}, {"model": {"optimizer": "fused"}}, ROUNDING),
    "offloaded, clipped": (2, {"fsdp": FSDP(cpu_offload=True)}, {"gradient_clip_val": 0.1}, ROUNDING),
    "offloaded replicas": (2, {**REPLICAS, "fsdp": FSDP(cpu_offload=True)}, {"accumulate_grad_batches": 2}, ROUNDING),
    "a communicator for each pair": (4, HSDP, {}, ROUNDING),
    "a group of NCCL alone": (2, TENSOR_PARALLEL, {}, ROUNDING),
}
SAMPLE = ("FSDP", "tensor parallel", "one process", "HSDP", "16-mixed", "offloaded, clipped", "a group of NCCL alone")
"""What the suite runs; the sweeps run all."""
GROUPS: dict[str, dict[str, Any]] = {
    "a communicator for each pair": {"pretend": {"eager": False}},
    "a group of NCCL alone": {"backend": "nccl"},
}
ON_CPUS = {"16-mixed": {"precision": "bf16-mixed"}}  # where Lightning has no other


class _WithoutDropout(pl.Callback):
    """Devices draw numbers of their own."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for module in pl_module.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0


def _losses(strategy: Mapping[str, Any], accelerator: str, options: Mapping[str, Any]) -> list[float]:
    found = fit(strategy, STEPS, accelerator=accelerator, callbacks=[_WithoutDropout()], **options)["losses"]
    return list(found)


def _losses_of(names: list[str], accelerator: str) -> dict[str, list[float]]:
    instead = ON_CPUS if accelerator == "cpu" else {}
    return {name: _losses(CASES[name][1], accelerator, instead.get(name, CASES[name][2])) for name in names}


Found = dict[str, list[list[float]]]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> tuple[Found, Found]:
    """What each rank found on CPUs and on GPUs, by name; runs of one world share its processes."""
    together = dict[tuple[int, str], list[str]]()
    on_cpus, on_gpus = Found(), Found()
    for name in selected(request, "name"):
        together.setdefault((CASES[name][0], name if name in GROUPS else ""), []).append(name)
    for (world, own), some in together.items():
        for found, ranks in (
            (on_cpus, run_ranks(world, _losses_of, some, "cpu", timeout_s=300)),
            (on_gpus, run_on_gpus(world, _losses_of, some, "cuda", timeout_s=300, **GROUPS.get(own, {}))),
        ):
            found |= {name: [rank[name] for rank in ranks] for name in some}
    return on_cpus, on_gpus


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SAMPLE else pytest.mark.sweep) for n in CASES])
def test_losses_are_those_on_cpus(name: str, found: tuple[Found, Found]) -> None:
    on_cpus, on_gpus = (torch.tensor(one[name]) for one in found)
    assert len(on_gpus) == CASES[name][0]
    torch.testing.assert_close(on_gpus, on_cpus, rtol=CASES[name][3], atol=0)


def test_groups_of_their_members_alone_come_up_with_a_barrier_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of gloo, for host numbers: other ranks would have to split NCCL's communicator, or to come to the barrier."""
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    assert len(run_on_gpus(4, _losses, HSDP, "cuda", {})) == 4


def _asks_over_a_mesh_of_its_own() -> list[list[float]]:
    return peers_of(init_device_mesh("cuda", (2,))).share("a number", [float(dist.get_rank())])


def test_ranks_of_a_group_of_nccl_alone_tell_each_other_numbers() -> None:
    assert run_on_gpus(2, _asks_over_a_mesh_of_its_own, backend="nccl") == [[[0.0], [1.0]]] * 2


class _Chooses(TinyLM):
    """Runs another block, of the same shapes, on each rank."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks[self.trainer.global_rank](self.embed(tokens)))


def _choose() -> None:
    trainer({}, accelerator="cuda", max_steps=1).fit(_Chooses(frozen=False), loader())


def test_ranks_that_run_different_modules_are_an_error() -> None:
    outcomes = run_on_gpus(2, _choose, expect_errors=True)
    assert all("different modules" in o.error.message for o in outcomes)
