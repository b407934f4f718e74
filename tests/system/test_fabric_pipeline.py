"""A Fabric script over pipeline stages, by ``run_step``. The oracle is the same loop in plain torch, one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_shardckpt import Pipeline, load, metadata
from lightning_shardckpt.errors import MismatchError, UnsupportedCodeError
from tests.support import nets
from tests.support.fabrics import assert_close, fabric_of, trained, twins
from tests.support.nets import GLOBAL_BATCH, Case, dataset, loss_of, optimizer_of
from tests.support.pool import run_ranks
from tests.support.whole_state import differing, whole

PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
EARLY = {**PIPELINE, "pipeline": Pipeline(schedule="1f1b", loss="microbatch")}
HARD = Case("tied net", late=True, clip=0.05, accumulate=2)
Ways = list[tuple[Case, dict[str, Any]]]
WAYS: Ways = [(Case(), PIPELINE), (HARD, PIPELINE), (HARD, EARLY)]


class Language(nn.Module):
    """Returns its loss: of logits, Fabric's 64-true would make float32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = nets.BUILDERS[name]()

    def forward(self, batch: list[Tensor]) -> Tensor:
        return loss_of(self.net, batch)


def built(fabric: Any, case: Case) -> tuple[Any, Any]:
    torch.manual_seed(3)
    if case.late:
        with fabric.init_module(empty_init=True):
            module = Language(case.net)
    else:
        module = Language(case.net)
    return fabric.setup(module, optimizer_of(module))  # type: ignore[no-any-return]


def train(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    fabric = fabric_of("64-true", **options)
    module, optimizer = built(fabric, case)
    return trained(fabric, module, optimizer, case, partial(fabric.strategy.run_step, module))


def train_all(ways: Ways) -> list[dict[str, Any]]:
    return [train(*way) for way in ways]


@pytest.mark.slow
def test_a_pipeline_trains_as_plain_torch_does_in_one_process() -> None:
    (expected,) = run_ranks(1, twins, [(case, "", {}) for case, _ in WAYS])
    ranks = run_ranks(2, train_all, WAYS)
    for number, alone in enumerate(expected):
        names: set[str] = set()
        for rank in ranks:
            got = rank[number]
            assert got["losses"] == pytest.approx(alone.losses, rel=2e-7)
            assert got["val"] == pytest.approx(alone.metrics["val"], rel=2e-7)
            assert_close(got["first"], {name: alone.first[name] for name in got["first"]}, 0)
            assert_close(got["last"], {name: alone.last[name] for name in got["last"]})
            names |= got["last"].keys()
        assert names == alone.last.keys()


def save_and_refuse(path: str) -> None:
    fabric = fabric_of("64-true", **PIPELINE)
    module, optimizer = built(fabric, HARD)
    (batch, *_) = fabric.setup_dataloaders(DataLoader(dataset(), batch_size=GLOBAL_BATCH))
    with pytest.raises(UnsupportedCodeError, match="run_step"):
        module(batch)
    with pytest.raises(UnsupportedCodeError, match="must return a loss tensor"):
        fabric.strategy.run_step(lambda batch: (module(batch), 3)[1], batch)
    loss = fabric.strategy.run_step(module, batch)
    fabric.backward(loss)
    optimizer.step()
    names = ("net.blocks.0.up.weight", "net.blocks.2.up.weight")  # of the first stage, and of the last
    state = {"model": module, "optimizer": optimizer, "step": 1, "average": {name: torch.ones(300) for name in names}}
    fabric.save(path, state)
    torch.manual_seed(8)
    again, its = built(fabric, HARD)
    average = {name: torch.zeros(300) for name in names}
    loaded = {"model": again, "optimizer": its, "step": 0, "average": average}
    assert fabric.load(path, loaded) == {} and loaded["step"] == 1
    assert all(tensor.sum() == 300 for tensor in average.values())
    assert differing(whole(again), whole(module)) == []
    assert differing(whole(its.optimizer), whole(optimizer.optimizer)) == []
    lone = built(fabric, HARD)[1]
    fabric.load(path, {"optimizer": lone})
    assert differing(whole(lone.optimizer), whole(optimizer.optimizer)) == []
    fabric.save(path + "-alone", {"optimizer": lone})
    lone = built(fabric, HARD)[1]
    fabric.load_raw(path + "-alone", lone)
    assert differing(whole(lone.optimizer), whole(optimizer.optimizer)) == []
    if fabric.global_rank == 1:
        again.module.net.norm.register_buffer("more", torch.zeros(2))
    with pytest.raises(MismatchError, match="more  in model only"):
        fabric.load(path, {"model": again})


class Stopping(nets.Block):
    """Is interrupted, as by Ctrl-C, when it has run as often as `left` says."""

    left = -1

    def forward(self, x: Tensor) -> Tensor:
        if Stopping.left == 0:
            Stopping.left = -1
            raise KeyboardInterrupt
        Stopping.left -= 1
        return super().forward(x)


def interrupt_a_step() -> str:
    """Interrupt the second step: rank 0 when it has sent two microbatches, rank 1 when it has taken one."""
    fabric = fabric_of("64-true", **PIPELINE)
    torch.manual_seed(3)
    module = Language("net")
    for block in module.net.blocks:
        block.__class__ = Stopping
    model, optimizer = fabric.setup(module, optimizer_of(module))
    first, second, third, *_ = DataLoader(dataset(), batch_size=GLOBAL_BATCH)
    step = partial(fabric.strategy.run_step, model)
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


def load_without(path: str, file: str) -> None:
    fabric = fabric_of("64-true")
    module, optimizer = built(fabric, HARD)
    fabric.load(path, {"model": module, "optimizer": optimizer, "step": 0})
    if fabric.is_global_zero:
        torch.save([whole(module), whole(optimizer.optimizer)], file)
    else:
        whole(module), whole(optimizer.optimizer)


def test_what_a_pipeline_saved_loads_without_one_and_the_other_way_round(tmp_path: Path) -> None:
    path, file = str(tmp_path / "piped"), str(tmp_path / "whole.pt")
    run_ranks(2, save_and_refuse, path)
    assert {"net.head.weight", "net.embed.weight", "net.blocks.2.up.weight"} <= metadata(path).tensors.keys()
    run_ranks(2, load_without, path, file)
    plain = Language("tied net").double()
    optimizer = optimizer_of(plain)
    load(path, {"model": plain, "optimizer": optimizer})
    model, its = torch.load(file)
    assert differing(whole(plain), model) == []
    assert differing(whole(optimizer)["state"], its["state"]) == []
