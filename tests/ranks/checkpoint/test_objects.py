"""Objects that fail, or stand in another order, on one rank alone: all ranks raise, and none waits for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt import ShardCkptIO, load, save, save_async, wait
from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support.pool import run_each, run_ranks
from tests.support.whole_state import differing, whole


class Schedule:
    """An object with a state; on the second rank it takes none."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == 1:
            raise ValueError("not I")


def load_each(path: str) -> list[str]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(), plugins=[ShardCkptIO()])
    fabric.launch()
    said = []
    for door in (load, fabric.load):
        save(path, {"model": nn.Linear(2, 2), "schedule": Schedule()}, overwrite=True, replicas="first")
        with pytest.raises(Exception) as raised:  # of any class
            door(path, {"model": nn.Linear(2, 2), "schedule": Schedule()})  # type: ignore[operator]
        said.append(str(raised.value))
    return said


def disagree(path: str) -> list[str]:
    """A tensor has other shapes on other ranks; a rank lacks a key of a sharded tensor."""
    rank, said, mesh = dist.get_rank(), list[str](), init_device_mesh("cpu", (3,))
    sharded = {name: distribute_tensor(torch.ones(50, 9), mesh, [Shard(0)]) for name in "abc"}
    if rank == 1:
        del sharded["b"]
    for tensors in ({"a": torch.zeros(rank + 1)}, sharded):
        with pytest.raises((FormatError, MismatchError)) as raised:
            save(path, {"model": nn.ParameterDict(tensors)})
        said.append(str(raised.value))
    return said


def test_ranks_that_hold_what_does_not_fit_together_are_named_on_all(tmp_path: Path) -> None:
    for shapes, lacking in run_ranks(3, disagree, str(tmp_path / "a.ckpt")):
        assert "'a'" in shapes and "(1,)" in shapes and "(2,)" in shapes
        assert "model: the boxes of 'b'" in lacking and "none of the ranks ((0, 1), (2, 3)) has the box" in lacking
    assert list(tmp_path.iterdir()) == []


def test_what_fails_on_one_rank_while_it_is_loaded_fails_on_all(tmp_path: Path) -> None:
    for said in run_ranks(2, load_each, str(tmp_path / "a")):
        assert [message[:39] for message in said] == ["rank 1 failed while loading the rest of"] * 2


# ── keys in another order on another rank ──────────────────────────────────────────────────────────────────────────


class Meeting:
    """Has a number, of which all ranks tell each other when it is saved and when it is loaded."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self._agreed(self.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = self._agreed(state["number"])

    def _agreed(self, number: int) -> int:
        every: list[Any] = [None, None]
        dist.all_gather_object(every, number)
        assert every == [number, number]
        return number


def made(first: int) -> dict[str, Any]:
    """A state of which the second rank has the keys in the opposite order, also in a dict inside."""
    torch.manual_seed(first)
    nets = {name: nn.Linear(2, 2) for name in ("a", "b")}
    optimizers = {f"of {name}": torch.optim.SGD(net.parameters(), lr=first) for name, net in nets.items()}
    inside = {"x": first, "y": [first + 1], "t": torch.full((3,), first)}
    state = {**nets, **optimizers, "m": Meeting(first + 2), "inside": inside, "n": Meeting(first + 3), "k": first}
    if dist.get_rank():
        state["inside"] = dict(reversed(inside.items()))
        state = dict(reversed(state.items()))
    return state


def save_and_load(path: str, door: str) -> list[str]:
    saved, loaded, path = made(1), made(11), f"{path}/{door}"
    if door == "fabric":
        fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(), plugins=[ShardCkptIO()])
        fabric.launch()
        fabric.save(path, saved)
        fabric.load(path, loaded)
    else:
        save(path, saved) if door == "save" else save_async(path, saved)
        wait()
        load(path, loaded)
    numbers = [meeting.number for state in (saved, loaded) for meeting in (state.pop("m"), state.pop("n"))]
    assert numbers == [3, 4, 3, 4]
    return differing(whole(saved), whole(loaded))


def test_ranks_come_to_objects_in_the_order_of_the_first_rank(tmp_path: Path) -> None:
    calls = {door: (2, save_and_load, str(tmp_path), door) for door in ("save", "save_async", "fabric")}
    assert run_each(calls, timeout_s=60) == {door: [[], []] for door in calls}
