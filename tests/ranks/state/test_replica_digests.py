"""Replicas that differ are noticed at a save, named, and not mixed. Oracle: who was changed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchmetrics import CatMetric
from torchmetrics.classification import BinaryConfusionMatrix

import lightning_shardckpt as ckpt
from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.checkpoint.save_agreement import digest_replicas, find_differences, find_replicas, specs_of
from lightning_shardckpt.checkpoint.save_job import Replicas
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.fabric import ShardedStrategy as FabricStrategy
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from tests.support import tiny
from tests.support.pool import run_each, run_ranks


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _trained(module: nn.Module) -> Counted:
    optimizer = Counted(module.parameters())
    module(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return optimizer


class Counted(torch.optim.AdamW):
    """Keeps a number of its own."""

    count = 3

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


@torch.no_grad()
def save_changed(path: str, what: str, replicas: Replicas, background: bool) -> str:
    """As after training without a reduction of gradients: rank 1 differs in one thing."""
    rank = torch.distributed.get_rank()
    with torch.enable_grad():
        module = _net()
        optimizer = _trained(module)
    if rank == 1 and what == "an element":
        module[0].weight[4, 5] += 1e-7
    elif rank == 1 and what == "a moment":
        optimizer.state[module[2].weight]["exp_avg"].neg_()
    elif rank == 1 and what == "a count":
        optimizer.count = 4
    elif rank == 1 and what == "a text":
        optimizer.state["k"] = torch.tensor(1)  # type: ignore[index]
    elif rank == 1 and what == "a statistic":
        module[1].running_mean.add_(1)  # type: ignore[union-attr, operator]
    elif rank == 1 and what == "everything":
        for parameter in module.parameters():
            parameter.add_(1)
    try:
        state = {"model": module, "optimizer": optimizer}
        if background:
            ckpt.save_async(path, state, replicas=replicas)
            ckpt.wait()
        else:
            ckpt.save(path, state, replicas=replicas)
    except MismatchError as error:
        return str(error)
    return ""


CHANGES = {
    "an element": "model/0.weight  ranks [0, 2] | [1]",
    "a moment": "optimizer/0/2.weight/exp_avg  ranks [0, 2] | [1]",
    "a count": "optimizer/0/own  ranks [0, 2] | [1]",
    "a text": "optimizer/0/own  ranks [0, 2] | [1]",
    "everything": "6 entries, by the ranks that hold the same",
    "a statistic": "",  # of buffers, rank 0's are stored
    "nothing": "",
}


@pytest.mark.slow
def test_a_replica_that_differs_is_an_error_that_names_it(tmp_path: Path) -> None:
    ways = [(what, background) for what in CHANGES for background in (False, True)]
    paths = {way: str(tmp_path / "{} {}".format(*way)) for way in ways}
    saves = run_each({way: (3, save_changed, paths[way], way[0], "same", way[1]) for way in ways})
    for (what, back), ranks in saves.items():
        said = CHANGES[what]
        for found in ranks:
            assert said in found if said else not found
            assert not said or 'replicas="first"' in found
        assert (tmp_path / f"{what} {back}" / "checkpoint.index.json").exists() == (not said)


@pytest.mark.slow
def test_the_first_replica_is_stored_where_that_is_asked_for(tmp_path: Path) -> None:
    assert run_ranks(3, save_changed, str(tmp_path / "c"), "everything", "first", False) == ["", "", ""]
    module, expected = _net(), _net()
    optimizer = torch.optim.AdamW(module.parameters())
    _trained(expected)
    ckpt.load(tmp_path / "c", {"model": module, "optimizer": optimizer})
    for key, value in expected.state_dict().items():
        assert torch.equal(module.state_dict()[key], value)


def permuted() -> torch.Tensor:
    """A permutation, of which a matrix of one-hot rows is another order of the same numbers."""
    return torch.eye(512)[torch.arange(512) if torch.distributed.get_rank() != 1 else torch.arange(512).flip(0)]


def sorted_rows() -> nn.Module:
    """Rows as each rank has sorted them: large ones, which replicas write together, and small ones."""
    module = nn.ParameterDict({"large": nn.Parameter(torch.randn(512, 64)), "small": nn.Parameter(torch.randn(8))})
    if torch.distributed.get_rank() == 1:
        module["large"].data = module["large"].data[torch.arange(511, -1, -1)]
        module["small"].data = module["small"].data.flip(0)
    return module


def with_moments() -> dict[str, Any]:
    """State of optimizers: that of a vector in another order, that of a number, a step, and a learning rate."""
    module = nn.ParameterDict({"vector": nn.Parameter(torch.randn(8)), "number": nn.Parameter(torch.tensor(2.0))})
    optimizer = torch.optim.AdamW(module.parameters())
    (module["vector"].prod() * module["number"]).backward()
    optimizer.step()
    if torch.distributed.get_rank() == 1:
        vector, number = optimizer.state[module["vector"]], optimizer.state[module["number"]]
        vector["exp_avg"] = vector["exp_avg"].flip(0)
        number["exp_avg"].neg_()
        number["step"] += 1
        optimizer.param_groups[0]["lr"] = 0.5
    return {"model": module, "optimizer": optimizer}


def with_metrics() -> nn.Module:
    """Metrics that saw batches of each rank, as many of each class."""
    module = nn.ModuleDict({"confusion": BinaryConfusionMatrix(), "seen": CatMetric()})
    odd = torch.distributed.get_rank() == 1
    for metric in module.values():
        metric.persistent(mode=True)
    module["confusion"].update(torch.tensor([1, 1, 0]), torch.tensor([0, 0, 1]) if odd else torch.tensor([1, 1, 0]))
    module["seen"].update(torch.tensor([2.0, 1.0]) if odd else torch.tensor([1.0, 2.0]))
    return module


class Extra(nn.Linear):
    def __init__(self, what: Any) -> None:
        super().__init__(2, 2)
        self._what = what

    def get_extra_state(self) -> Any:
        return self._what

    def set_extra_state(self, state: Any) -> None:
        self._what = state


STATES: dict[str, tuple[Callable[[], dict[str, Any]], set[str]]] = {
    "rows": (lambda: {"model": sorted_rows()}, {"model/large", "model/small"}),
    "a permutation": (lambda: {"x": permuted()}, {"x"}),
    "moments": (
        with_moments,
        {
            *("optimizer/0/vector/exp_avg", "optimizer/0/number/exp_avg", "optimizer/0/number/step"),
            "optimizer/0/param_groups/0/lr",
        },
    ),
    "metrics": (lambda: {"model": with_metrics()}, {"model/confusion.confmat", "model/seen.value"}),
    "a few numbers": (lambda: {"a": {"b": [torch.tensor([3, 1])[[torch.distributed.get_rank() % 2, 0]]]}}, {"a/b/0"}),
    "statistics": (lambda: {"model": {"1.running_mean": torch.tensor(float(torch.distributed.get_rank()))}}, set()),
    "extra state": (lambda: {"model": Extra(torch.distributed.get_rank() % 2)}, {"model/_extra_state"}),
}


def save_each_state(path: str, fabric: bool) -> dict[str, str]:
    """Save states of which rank 1 has the same numbers as ranks 0 and 2, but in another order."""
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 3, "plugins": [ShardCkptIO()]}
    launched = Fabric(strategy=FabricStrategy(), **options) if fabric else None
    if launched is not None:
        launched.launch()
    said = {}
    for name, (state_of, _) in STATES.items():
        torch.manual_seed(0)
        try:
            state = state_of()
            ckpt.save(f"{path}/{name}", state) if launched is None else launched.save(f"{path}/{name}", state)
            said[name] = ""
        except MismatchError as error:
            said[name] = str(error)
    return said


def test_replicas_that_hold_equal_numbers_in_another_order_differ(tmp_path: Path) -> None:
    doors = {fabric: (3, save_each_state, str(tmp_path / str(fabric)), fabric) for fabric in (False, True)}
    for fabric, ranks in run_each(doors).items():
        for said, (name, (_, keys)) in itertools.product(ranks, STATES.items()):
            found = set(re.findall(r"^  (\S+)  ranks \[0, 2\] \| \[1\]$", said[name], re.MULTILINE))
            if fabric and name == "metrics":  # saved with the states of all ranks
                keys = set[str]()
            assert found == keys, name
            assert (tmp_path / str(fabric) / name / "checkpoint.index.json").exists() == (not keys)


class Counting(tiny.TinyLM):
    """A metric of each rank's batches, and what is asked for."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.confusion = what, BinaryConfusionMatrix()
        self.confusion.persistent(mode=True)

    def on_train_end(self) -> None:
        self.confusion.update(torch.tensor([1, 0]), torch.tensor([1, 0]) if self.global_rank else torch.tensor([0, 1]))
        if self.what == "a setting":
            self.trainer.optimizers[0].param_groups[0]["lr"] *= 1 + self.global_rank

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = torch.tensor([0, 1]).roll(self.global_rank if self.what == "a tensor" else 0)


class Remembers(pl.Callback):
    """A callback may have state of its rank."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": torch.full((999,), torch.distributed.get_rank())}


def save_with_a_trainer(path: str) -> dict[str, str]:
    said = {}
    for what in ("nothing", "a tensor", "a setting"):  # the metric is saved with the states of all ranks
        run = tiny.trainer({}, max_steps=1, callbacks=[Remembers()])
        run.fit(Counting(what), tiny.loader())
        try:
            run.save_checkpoint(f"{path}/{what}")
            said[what] = ""
        except MismatchError as error:
            said[what] = str(error)
    return said


def test_a_trainer_saves_no_state_that_ranks_have_otherwise(tmp_path: Path) -> None:
    names = {"a tensor": "mine", "a setting": "optimizer/0/param_groups/0/lr"}
    for said in run_ranks(2, save_with_a_trainer, str(tmp_path)):
        assert said.pop("nothing") == ""
        for what, name in names.items():
            assert f"\n  {name}  ranks [0] | [1]\n" in said[what], what


def save_on_mesh(path: str) -> list[str]:
    """On 2 × 2 ranks, replicas of shards: of the first row, of the second row, or none that differ."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    row, column = mesh.get_coordinate() or (0, 0)
    said = []
    for changed in (None, 0, 1):
        local = torch.full((2, 3), float(column))
        if row == 1 and column == changed:
            local[1, 2] += 1
        module = nn.Module()
        module.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False))
        try:
            ckpt.save(f"{path}/{changed}", {"model": module})
            said.append("")
        except MismatchError as error:
            said.append(str(error))
    return said


@pytest.mark.slow
def test_replicas_of_shards_are_compared_with_those_of_the_same_shard(tmp_path: Path) -> None:
    for none, first, second in run_ranks(4, save_on_mesh, str(tmp_path)):
        assert none == ""
        assert "model/weight  ranks [0] | [2]" in first
        assert "model/weight  ranks [1] | [3]" in second


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "float32": lambda: torch.randn(7, 5),
    "bytes": lambda: torch.randint(255, (13,), dtype=torch.uint8),
    "bool": lambda: torch.rand(9) > 0.5,
    "bfloat16": lambda: torch.randn(11).bfloat16(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "float8": lambda: torch.randn(5).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.randn(4, 6).T,
    "in the middle": lambda: torch.randn(9)[1:8],
    "number": lambda: torch.tensor(3.0),
    "not a number": lambda: torch.full((3,), torch.nan),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_is_of_the_bits_wherever_they_lie(kind: str) -> None:
    torch.manual_seed(0)
    tensor = KINDS[kind]()

    def digest(value: torch.Tensor) -> Any:
        leaves = Leaves({"x": value})
        tables = {"model": Component(specs_of("model", leaves, ((0, 1),)))}
        return digest_replicas(find_replicas(Snapshot({"model": leaves}, {}, {}), tables, 0, "all"))

    assert digest(tensor) == digest(tensor.clone())
    raw = bytearray(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    for place in (0, len(raw) - 1):
        raw[place] ^= 1
        other = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
        assert find_differences({0: digest(tensor), 1: digest(other)}) == {"model/x": [[0], [1]]}
        raw[place] ^= 1


def save_stages(path: str) -> list[str]:
    """Two stages by hand, each with a layer of its own, and one thing that both have."""
    rank, said = torch.distributed.get_rank(), []
    for what in ("nothing", "a parameter", "a moment", "a setting"):
        torch.manual_seed(0)
        module = nn.ModuleDict({f"layer{rank}": nn.Linear(3, 3), "scale": nn.Linear(3, 1)})
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5)
        module["scale"](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        weight = module["scale"].weight
        if rank and what == "a parameter":
            weight.data = torch.arange(3.0)[None]
        elif what == "a parameter":
            weight.data = torch.arange(3.0).flip(0)[None]
        elif rank and what == "a moment":
            optimizer.state[weight]["momentum_buffer"].neg_()
        elif rank and what == "a setting":
            optimizer.param_groups[0]["lr"] = 0.25
        for background in (False, True):
            try:
                where, state = f"{path}/{what} {background}", {"model": module, "optimizer": optimizer}
                ckpt.save_async(where, state) if background else ckpt.save(where, state)
                ckpt.wait()
                said.append("")
            except MismatchError as error:
                said.append(str(error))
    return said


def test_what_several_stages_hold_is_compared_between_them(tmp_path: Path) -> None:
    for said in run_ranks(2, save_stages, str(tmp_path)):
        expected = ["model/scale.weight", "optimizer/0/scale.weight/momentum_buffer", "optimizer/0/param_groups/0/lr"]
        assert said[:2] == ["", ""]
        for text, key in zip(said[2:], [key for key in expected for _ in (False, True)], strict=True):
            assert f"\n  {key}  ranks [0] | [1]\n" in text
    assert sorted(path.parent.name for path in tmp_path.glob("*/checkpoint.index.json")) == [
        "nothing False",
        "nothing True",
    ]
