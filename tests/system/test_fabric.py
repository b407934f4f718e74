"""Fabric scripts under ShardedStrategy. Oracles: the same loop in plain torch, one process, and state dicts."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_shardckpt import FSDP
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from tests.support import nets
from tests.support.fabrics import assert_close, fabric_of, trained, twins
from tests.support.nets import GLOBAL_BATCH, PLAN, Case, dataset, full_state, loss_of, optimizer_of
from tests.support.pool import run_each, run_ranks

TENSOR = {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}


def built(fabric: Fabric, case: Case, order: str = "before") -> tuple[Any, Any]:
    """The module and the optimizer of a case; the optimizer is built before or after the setup."""
    torch.manual_seed(3)
    if case.late:
        with fabric.init_module(empty_init=True):
            net = nets.BUILDERS[case.net]()
        with without_torch_function():
            assert all(p.is_meta == (fabric.global_rank > 0) for p in net.parameters())
    else:
        net = nets.BUILDERS[case.net]()
    module = nn.ModuleDict({"net": net})
    module.forward = lambda batch: loss_of(net, batch)  # type: ignore[method-assign]
    if order == "before":
        return fabric.setup(module, optimizer_of(module))  # type: ignore[no-any-return]
    prepared = fabric.setup_module(module)
    return prepared, fabric.setup_optimizers(optimizer_of(prepared))


def train(case: Case, order: str = "before", **options: Any) -> dict[str, Any]:
    fabric = fabric_of(**options)
    module, optimizer = built(fabric, case, order)
    return trained(fabric, module, optimizer, case, lambda batch, scale=1.0: module(batch))


HARD = Case("tied net", late=True, clip=0.05, accumulate=2)
TWO: list[tuple[Case, str, dict[str, Any]]] = [
    (Case(), "before", {}),
    (HARD, "after", {"fsdp": FSDP(activation_checkpointing=True)}),
    (Case(clip=0.05), "after", {"fsdp": FSDP(cpu_offload=True)}),
    (HARD, "before", TENSOR),
    (Case(), "before", {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 1}),
]


def train_all(ways: list[tuple[Case, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [train(case, order, **options) for case, order, options in ways]


@pytest.mark.slow
def test_a_script_trains_as_plain_torch_does_in_one_process() -> None:
    calls = {"twins": (1, twins, TWO), 1: (1, train_all, TWO[:1]), 2: (2, train_all, TWO[1:])}
    (expected,), (first,), others = run_each(calls).values()
    for rank in others:
        for (case, order, options), got, alone in zip(TWO, [*first, *rank], expected, strict=True):
            print(case, order, options)
            # Fabric's 64-true gives what a forward returns as float32
            assert got["losses"] == pytest.approx(alone.losses, rel=2e-7)
            assert got["val"] == pytest.approx(alone.metrics["val"], rel=2e-7)
            assert_close(got["first"], alone.first, 0)
            assert_close(got["last"], alone.last)


# ── precision, errors, other ranks ────────────────────────────────────────────────────────────────────────────────


def train_in(precision: str, options: dict[str, Any]) -> tuple[set[torch.dtype], list[float], float]:
    fabric = fabric_of(precision, **options)
    module, optimizer = built(fabric, Case("llama", late=True))
    losses = []
    for batch in fabric.setup_dataloaders(
        DataLoader(dataset(), batch_size=GLOBAL_BATCH // fabric.strategy.topology.data_parallel)
    ):
        loss = module(batch)
        fabric.backward(loss)
        fabric.clip_gradients(module, optimizer, clip_val=0.01)
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        parts = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        assert parts and all(part.abs().max() <= 0.0101 for part in parts if part.numel())  # bfloat16 rounds up
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(fabric.all_reduce(loss.detach().float())))
    values = torch.cat([v.double().flatten() for v in full_state(module).values()])
    return {p.dtype for p in module.parameters()}, losses, values.norm().item()


# Type of the parameters, and how far rounding may go.
PRECISIONS = {
    "32-true": (torch.float32, 1e-5),
    "bf16-mixed": (torch.float32, 2e-3),
    "bf16-true": (torch.bfloat16, 2e-2),
}


def train_in_each(ways: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    return [train_in(precision, options) for precision, options in ways]


@pytest.fixture(scope="module")
def in_one_process() -> dict[str, Any]:
    """The same training, by precision."""
    (found,) = run_ranks(1, train_in_each, [(precision, {}) for precision in PRECISIONS])
    return dict(zip(PRECISIONS, found, strict=True))


FSDP2: dict[str, Any] = {}
TP2: dict[str, Any] = {"tensor_parallel_size": 2}


@pytest.mark.slow
def test_precisions_train_the_same_up_to_their_rounding(in_one_process: dict[str, Any]) -> None:
    ways: list[tuple[str, dict[str, Any]]] = [("32-true", FSDP2), ("bf16-mixed", FSDP2), ("bf16-true", TP2)]
    for rank in run_ranks(2, train_in_each, ways):
        for (precision, _), got in zip(ways, rank, strict=True):
            (dtype, tolerance), alone = PRECISIONS[precision], in_one_process[precision]
            assert got[0] == {dtype}
            assert got[1] == pytest.approx(alone[1], rel=tolerance)
            assert got[2] == pytest.approx(alone[2], rel=tolerance)


@dataclass
class Answer:
    value: Tensor


class _AnswersWhole(nn.Sequential):
    def forward(self, x: Tensor) -> Answer:
        return Answer(super().forward(x))


def errors_and_reductions() -> None:
    fabric = fabric_of("32-true", tensor_parallel_size=2, tensor_parallel_plan={"0": "colwise_gather_output"})
    rank = fabric.global_rank
    with pytest.raises(UnsupportedCodeError, match=r"before any module: call fabric.setup\(model, optimizer\)"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    model = fabric.setup(nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)))
    with pytest.raises(UnsupportedCodeError, match="holds 2 parameters that are not in"):
        fabric.setup_optimizers(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    # both ranks compute the same: a sum counts the one data-parallel rank once
    assert fabric.all_reduce(torch.tensor(3.0), reduce_op="sum") == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # Lightning gathers by a function that torch deprecates
        assert fabric.all_gather(torch.tensor([3.0])).flatten().tolist() == [3.0]
    assert fabric.strategy.reduce_boolean_decision(rank == 0, all=False)
    assert not fabric.strategy.reduce_boolean_decision(rank == 0)
    assert fabric.broadcast(rank) == 0
    fabric.backward(model(torch.full((1, 2), float("inf"))).sum())
    with pytest.raises(RuntimeError, match="the norm of the gradients is"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    with pytest.raises(UnsupportedCodeError, match=r"fabric.backward\(loss\)"):
        model(torch.ones(1, 2)).sum().backward()
    whole = fabric.setup_module(_AnswersWhole(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)))
    with pytest.raises(UnsupportedCodeError, match=r"fabric.backward\(loss\)"):
        whole(torch.ones(1, 2)).value.sum().backward()
    x = torch.ones(1, 2, requires_grad=True)
    (slope,) = torch.autograd.grad(model(x).sum(), x)
    assert x.grad is None and not slope.isnan().any()
    with pytest.raises(TypeError, match="pass plugins="):
        fabric.strategy.checkpoint_io = TorchCheckpointIO()


def test_errors_say_what_to_do_and_reductions_count_each_batch_once() -> None:
    run_ranks(2, errors_and_reductions)


def by_name() -> str:
    fabric = Fabric(accelerator="cpu", strategy="sharded", devices=dist.get_world_size())
    with pytest.raises(RuntimeError, match=r"call fabric.launch\(\)"):
        _ = fabric.strategy.topology
    fabric.launch()
    return f"{type(fabric.strategy).__module__}: {fabric.strategy.topology}"


def test_the_strategy_is_known_by_name_once_the_module_is_imported() -> None:
    (said,) = run_ranks(1, by_name)
    assert said == "lightning_shardckpt.fabric: Topology(pipeline=1, replicate=1, shard=1, tensor=1)"
