"""Objects that can't take what was loaded, on one rank alone: all ranks raise, and none goes on without the others."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import Fabric
from torch import nn

from lightning_shardckpt import ShardCkptIO, load, save
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


def test_what_fails_on_one_rank_while_it_is_loaded_fails_on_all(tmp_path: Path) -> None:
    for said in run_ranks(2, load_each, str(tmp_path)):
        assert len(said) == 2 * len(FAILURES)
        for (_, what), message in said.items():
            assert message.startswith(f"rank 1 failed while {FAILURES[what]}"), what
