"""Fabric scripts under ShardedStrategy train as the same loop in plain torch on one process; errors say what to do."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.io import TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt import FSDP, Pipeline
from lightning_shardckpt.compat.torch_tensors import without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from tests.support import nets
from tests.support.fabrics import Language, assert_close, fabric_of, trained, twins
from tests.support.nets import GLOBAL_BATCH, PLAN, Case, dataset, optimizer_of
from tests.support.pool import run_each, run_ranks

HARD = Case("tied net", late=True, clip=0.05, accumulate=2)
PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
WAYS: list[tuple[Case, str, dict[str, Any]]] = [
    (Case(), "before", {}),
    (HARD, "after", {"fsdp": FSDP(activation_checkpointing=True)}),
    (HARD, "before", {"tensor_parallel_size": 2, "tensor_parallel_plan": PLAN}),
    (Case(), "before", {"data_parallel_replicate_size": 2, "data_parallel_shard_size": 1}),
    (HARD, "after", {**PP2, "pipeline": Pipeline(schedule="1f1b", loss="microbatch")}),
]


def built(fabric: Fabric, case: Case, order: str) -> tuple[Any, Any]:
    """The module and the optimizer of a case; the optimizer is built before or after the setup."""
    torch.manual_seed(3)
    if case.late:
        with fabric.init_module(empty_init=True):
            module = Language(case.net)
        with without_torch_function():
            assert all(p.is_meta == (fabric.global_rank > 0) for p in module.parameters())
    else:
        module = Language(case.net)
    if order == "before":
        return fabric.setup(module, optimizer_of(module))  # type: ignore[no-any-return]
    prepared = fabric.setup_module(module)
    return prepared, fabric.setup_optimizers(optimizer_of(prepared))


def called(module: Any, batch: Any, scale: float = 1.0) -> Any:
    return module(batch)


def train_all(ways: list[tuple[Case, str, dict[str, Any]]]) -> list[dict[str, Any]]:
    found = []
    for case, order, options in ways:
        fabric = fabric_of(**options)
        module, optimizer = built(fabric, case, order)
        run_step = fabric.strategy.run_step if "pipeline_parallel_size" in options else called
        found.append(trained(fabric, module, optimizer, case, partial(run_step, module)))
    return found


@pytest.mark.slow
def test_a_script_trains_as_plain_torch_does_in_one_process() -> None:
    calls = {"twins": (1, twins, WAYS), 1: (1, train_all, WAYS[:1]), 2: (2, train_all, WAYS[1:])}
    (expected,), (first,), others = run_each(calls).values()
    for number, alone in enumerate(expected):
        ranks = [first[0]] if number == 0 else [rank[number - 1] for rank in others]
        for got in ranks:  # Fabric's 64-true gives what a forward returns as float32
            assert got["losses"] == pytest.approx(alone.losses, rel=2e-7), WAYS[number]
            assert got["val"] == pytest.approx(alone.metrics["val"], rel=2e-7), WAYS[number]
            assert_close(got["first"], {name: alone.first[name] for name in got["first"]}, 0)
            assert_close(got["last"], {name: alone.last[name] for name in got["last"]})
        assert set().union(*(got["last"] for got in ranks)) == alone.last.keys()


@dataclass
class Answer:
    value: Tensor


class AnswersWhole(nn.Sequential):
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
    whole = fabric.setup_module(AnswersWhole(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 2)))
    with pytest.raises(UnsupportedCodeError, match=r"fabric.backward\(loss\)"):
        whole(torch.ones(1, 2)).value.sum().backward()
    with pytest.raises(TypeError, match="Pass plugins="):
        fabric.strategy.checkpoint_io = TorchCheckpointIO()


def test_errors_say_what_to_do_and_reductions_count_each_batch_once() -> None:
    run_ranks(2, errors_and_reductions)


# ── pipelines ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Stopping(nets.Block):  # is interrupted, as by Ctrl-C, when it has run as often as `left` says
    left = -1

    def forward(self, x: Tensor) -> Tensor:
        if Stopping.left == 0:
            Stopping.left = -1
            raise KeyboardInterrupt
        Stopping.left -= 1
        return super().forward(x)


def interrupt_a_step() -> str:
    """Interrupt the second step: rank 0 when it has sent two microbatches, rank 1 when it has taken one."""
    fabric = fabric_of("64-true", **PP2)
    torch.manual_seed(3)
    module = Language("net")
    for block in module.net.blocks:
        block.__class__ = Stopping
    model, optimizer = fabric.setup(module, optimizer_of(module))
    first, second, third, *_ = DataLoader(dataset(), batch_size=GLOBAL_BATCH)
    with pytest.raises(UnsupportedCodeError, match="run_step"):
        model(first)
    step = partial(fabric.strategy.run_step, model)
    with pytest.raises(UnsupportedCodeError, match="must return a loss tensor"):
        fabric.strategy.run_step(lambda batch: (model(batch), 3)[1], first)
    fabric.backward(step(first))
    optimizer.step()
    optimizer.zero_grad()
    Stopping.left = 5 if fabric.global_rank == 0 else 0
    with pytest.raises(KeyboardInterrupt):
        step(second)
    fabric.barrier()
    with pytest.raises(UnsupportedCodeError, match=r"an earlier step was interrupted.* of ranks \[0, 1\]") as refused:
        step(third)
    return str(refused.value)


def test_after_a_step_that_was_interrupted_none_runs() -> None:
    """What rank 1 has not taken would come to it in the next step: a loss of other samples."""
    one, other = run_ranks(2, interrupt_a_step)
    assert one == other
