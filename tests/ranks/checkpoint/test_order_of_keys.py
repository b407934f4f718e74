"""States whose keys are in another order on another rank. Oracle: what was put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn

import lightning_shardckpt as ckpt
from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support.pool import run_each


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
    optimizers = {
        f"of {name}": torch.optim.SGD(net.parameters(), lr=first + n) for n, (name, net) in enumerate(nets.items())
    }
    inside = {"x": first, "y": [first + 1], "t": torch.full((3,), first)}
    state = {**nets, **optimizers, "m": Meeting(first + 2), "inside": inside, "n": Meeting(first + 3), "k": first}
    if dist.get_rank():
        state["inside"] = dict(reversed(inside.items()))
        state = dict(reversed(state.items()))
    return state


def seen(state: dict[str, Any]) -> list[Any]:
    nets = [tensor.tolist() for net in "ab" for tensor in state[net].state_dict().values()]
    rates = [state[f"of {net}"].param_groups[0]["lr"] for net in "ab"]
    inside = state["inside"]
    return [
        nets,
        rates,
        state["m"].number,
        state["n"].number,
        inside["x"],
        inside["y"],
        inside["t"],
        state["k"],
    ]


def save_and_load(path: str, door: str) -> tuple[list[Any], list[Any]]:
    saved, loaded, path = made(1), made(11), f"{path}/{door}"
    if door == "fabric":
        fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(), plugins=[ShardCkptIO()])
        fabric.launch()
        fabric.save(path, saved)
        fabric.load(path, loaded)
    else:
        ckpt.save(path, saved) if door == "save" else ckpt.save_async(path, saved)
        ckpt.wait()
        ckpt.load(path, loaded)
    return seen(saved), seen(loaded)


def test_ranks_come_to_objects_in_the_order_of_the_first_rank(tmp_path: Path) -> None:
    calls = {door: (2, save_and_load, str(tmp_path), door) for door in ("save", "save_async", "fabric")}
    for door, ranks in run_each(calls, timeout_s=60).items():
        for saved, loaded in ranks:
            assert str(saved) == str(loaded), door
