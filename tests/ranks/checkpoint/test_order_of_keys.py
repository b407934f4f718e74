"""States whose keys are in another order on another rank. Oracle: what was put in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn

from lightning_shardckpt import ShardCkptIO, load, save, save_async, wait
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support.pool import run_each
from tests.support.whole_state import differing, whole


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
