"""Objects that can't be saved or can't take what was loaded, on one rank alone: all ranks raise."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lightning_shardckpt import ShardCkptIO, load, save
from lightning_shardckpt.errors import FormatError, MismatchError
from lightning_shardckpt.fabric import ShardedStrategy
from tests.support.pool import run_ranks


class Schedule:
    """An object with a state; on the second rank it takes none."""

    def state_dict(self) -> dict[str, Any]:
        return {"n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse()


class OwnEntries(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "n": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        _refuse()
        super().load_state_dict(state_dict)


class NoState(nn.Linear):
    """Has a state only when it is saved."""

    saves = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        if not self.saves:
            _refuse()
        return super().state_dict(*args, **kwargs)


def _refuse() -> None:
    if dist.get_rank() == 1:
        raise ValueError("not I")


def state_with(what: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = NoState(2, 2) if what == "module" else nn.Linear(2, 2)
    state: dict[str, Any] = {"model": model}
    if what == "optimizer":
        state["optimizer"] = OwnEntries(model.parameters(), lr=1.0)
    elif what == "object":
        state["schedule"] = Schedule()
    elif what == "tuple" and dist.get_rank() == 1:
        state["model"] = (model,)
    return state


def load_each(folder: str) -> dict[tuple[str, str], str]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ShardedStrategy(), plugins=[ShardCkptIO()])
    fabric.launch()
    said = {}
    for door, what in itertools.product((load, fabric.load), FAILURES):
        path, saved = f"{folder}/{what}", state_with("" if what == "tuple" else what)
        saved["model"].saves = True
        save(path, saved, overwrite=True)
        try:
            door(path, state_with(what))  # type: ignore[operator]
        except Exception as error:
            said[door.__qualname__, what] = str(error)
    return said


FAILURES = {"object": "loading the rest of", "optimizer": "reading checkpoint", "module": "", "tuple": ""}


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
    for said in run_ranks(2, load_each, str(tmp_path)):
        assert len(said) == 2 * len(FAILURES)
        for (_, what), message in said.items():
            assert message.startswith(f"rank 1 failed while {FAILURES[what]}"), what
