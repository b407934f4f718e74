"""Replicas that differ are noticed at a save, named, and not mixed. Oracle: who was changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchmetrics import CatMetric
from torchmetrics.classification import BinaryConfusionMatrix

import lightning_shardckpt as ckpt
from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.fabric import ShardedStrategy as FabricStrategy
from tests.support import tiny
from tests.support.pool import run_each, run_ranks


def trained() -> tuple[nn.Sequential, torch.optim.AdamW]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return module, optimizer


Change = Callable[[Any, Any], Any]
CHANGES: dict[str, tuple[Change, set[str]]] = {
    "nothing": (lambda module, optimizer: None, set()),
    "an element": (lambda module, optimizer: module[0].weight[4, 5].add_(1e-7), {"model/0.weight"}),
    "a moment": (
        lambda module, optimizer: optimizer.state[module[2].weight]["exp_avg"].neg_(),
        {"optimizer/0/2.weight/exp_avg"},
    ),
    "a step": (
        lambda module, optimizer: optimizer.state[module[2].weight]["step"].add_(1),
        {"optimizer/0/2.weight/step"},
    ),
    "a setting": (lambda m, optimizer: optimizer.param_groups[0].update(lr=0.5), {"optimizer/0/param_groups/0/lr"}),
    "a statistic": (lambda module, optimizer: module[1].running_mean.add_(1), set()),  # of buffers, rank 0's are stored
}


class Extra(nn.Linear):
    def __init__(self, what: Any) -> None:
        super().__init__(2, 2)
        self._what = what

    def get_extra_state(self) -> Any:
        return self._what

    def set_extra_state(self, state: Any) -> None:
        self._what = state


def metrics(odd: bool) -> nn.Module:
    """Metrics that saw batches of each rank, as many of each class."""
    module = nn.ModuleDict({"confusion": BinaryConfusionMatrix(), "seen": CatMetric()})
    for metric in module.values():
        metric.persistent(mode=True)
    module["confusion"].update(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1] if odd else [1, 1, 0]))
    module["seen"].update(torch.tensor([2.0, 1.0] if odd else [1.0, 2.0]))
    return module


def rows(odd: bool) -> nn.Module:
    """Large ones, which replicas write together, and small ones."""
    weights = {"large": torch.randn(512, 64), "small": torch.randn(8)}
    return nn.ParameterDict({name: nn.Parameter(value.flip(0) if odd else value) for name, value in weights.items()})


ORDERS: dict[str, tuple[Callable[[bool], dict[str, Any]], set[str]]] = {
    "rows": (lambda odd: {"model": rows(odd)}, {"model/large", "model/small"}),
    "a permutation": (lambda odd: {"x": torch.eye(512).flip(0) if odd else torch.eye(512)}, {"x"}),
    "metrics": (lambda odd: {"model": metrics(odd)}, {"model/confusion.confmat", "model/seen.value"}),
    "a few numbers": (lambda odd: {"a": {"b": [torch.tensor([3, 1] if odd else [1, 3])]}}, {"a/b/0"}),
    "extra state": (lambda odd: {"model": Extra(odd)}, {"model/_extra_state"}),
}
"""State that has the same numbers in another order if it is odd, and the keys that are named."""


def states() -> dict[str, tuple[dict[str, Any], set[str]]]:
    """What rank 1 has otherwise than the others, as after training without a reduction of gradients."""
    odd, found = dist.get_rank() == 1, {}
    for name, (change, keys) in CHANGES.items():
        module, optimizer = trained()
        with torch.no_grad():
            change(module, optimizer) if odd else None
        found[name] = {"model": module, "optimizer": optimizer}, keys
    for name, (make, keys) in ORDERS.items():
        torch.manual_seed(0)
        found[name] = make(odd), keys
    return found


def said_of(save: Callable[[], Any]) -> str:
    try:
        save()
    except MismatchError as error:
        return str(error)
    return ""


def save_each(path: str, door: str) -> None:
    fabric = Fabric(strategy=FabricStrategy(), accelerator="cpu", devices=3, plugins=[ShardCkptIO()])
    fabric.launch()
    doors: dict[str, Callable[..., Any]] = {"save": ckpt.save, "Fabric": fabric.save}
    doors["save_async"] = lambda *args: (ckpt.save_async(*args), ckpt.wait())
    for name, (state, keys) in states().items():
        if (door, name) == ("Fabric", "metrics"):  # refused: each rank has the state of its own batches
            continue
        said = said_of(lambda where=f"{path}/{name}", state=state: doors[door](where, state))
        assert {*re.findall(r"^  (\S+)  ranks \[0, 2\] \| \[1\]$", said, re.MULTILINE)} == keys, (name, said)
        assert ('replicas="first"' in said) == bool(keys)
        dist.barrier()
        assert Path(path, name, "checkpoint.index.json").exists() == (not keys)


def test_a_replica_that_differs_is_an_error_that_names_it(tmp_path: Path) -> None:
    run_each({door: (3, save_each, str(tmp_path / door), door) for door in ("save", "save_async", "Fabric")})


def save_first(path: str) -> None:
    module, optimizer = trained()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(dist.get_rank())
    said = said_of(lambda: ckpt.save(path, {"model": module, "optimizer": optimizer}))
    assert "6 entries, by the ranks that hold the same" in said
    ckpt.save(path, {"model": module, "optimizer": optimizer}, replicas="first")


def test_the_first_replica_is_stored_where_that_is_asked_for(tmp_path: Path) -> None:
    run_ranks(3, save_first, str(tmp_path / "c"))
    module, _ = trained()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    with torch.no_grad():
        module[0].weight.zero_()
    ckpt.load(tmp_path / "c", {"model": module, "optimizer": torch.optim.AdamW(module.parameters())})
    assert tiny.differences(expected, module.state_dict()) == []


def save_with_a_trainer(path: str) -> None:
    run = tiny.train(tiny.TinyLM(), {}, 1)
    run.optimizers[0].param_groups[0]["lr"] *= 1 + dist.get_rank()
    assert "\n  optimizer/0/param_groups/0/lr  ranks [0] | [1]\n" in said_of(lambda: run.save_checkpoint(path))


def test_a_trainer_saves_no_state_that_ranks_have_otherwise(tmp_path: Path) -> None:
    run_ranks(2, save_with_a_trainer, str(tmp_path / "a.ckpt"))


def save_on_mesh(path: str) -> None:
    """On 2 × 2 ranks, replicas of shards: none that differ, of the first row, or of the second."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row, column = mesh.get_coordinate() or (0, 0)
    for changed, named in ((None, ""), (0, "ranks [0] | [2]"), (1, "ranks [1] | [3]")):
        local = torch.full((2, 3), float(column))
        local[1, 2] += row == 1 and column == changed
        module = nn.Module()
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False))
        said = said_of(lambda module=module, changed=changed: ckpt.save(f"{path}/{changed}", {"model": module}))
        assert f"model/weight  {named}" in said if named else not said


def test_replicas_of_shards_are_compared_with_those_of_the_same_shard(tmp_path: Path) -> None:
    run_ranks(4, save_on_mesh, str(tmp_path))


STAGES: dict[str, tuple[Change, str]] = {
    "nothing": (lambda weight, optimizer: None, ""),
    "a parameter": (lambda weight, optimizer: weight.copy_(weight.flip(1)), "model/scale.weight"),
    "a moment": (
        lambda weight, optimizer: optimizer.state[weight]["momentum_buffer"].neg_(),
        "optimizer/0/scale.weight/momentum_buffer",
    ),
    "a setting": (lambda weight, optimizer: optimizer.param_groups[0].update(lr=0.25), "optimizer/0/param_groups/0/lr"),
}


def save_stages(path: str) -> None:
    """Two stages by hand, each with a layer of its own, and one thing that both have."""
    rank = dist.get_rank()
    for what, (change, key) in STAGES.items():
        torch.manual_seed(0)
        module = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3), "scale": nn.Linear(3, 1)})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
        module["scale"](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            module["scale"].weight.copy_(torch.arange(3.0)[None])
            change(module["scale"].weight, optimizer) if rank else None
        for number, save in enumerate((ckpt.save, lambda *args: (ckpt.save_async(*args), ckpt.wait()))):
            state = {"model": module, "optimizer": optimizer}
            said = said_of(lambda save=save, state=state, where=f"{path}/{what} {number}": save(where, state))
            assert f"\n  {key}  ranks [0] | [1]\n" in said if key else not said, what


def test_what_several_stages_hold_is_compared_between_them(tmp_path: Path) -> None:
    run_ranks(2, save_stages, str(tmp_path))
    assert sorted(p.parent.name for p in tmp_path.glob("*/checkpoint.index.json")) == ["nothing 0", "nothing 1"]
