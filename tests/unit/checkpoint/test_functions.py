"""Plain functions on one process. Oracles: the values that were saved, the files that were there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt import load, save
from lightning_shardckpt.errors import MismatchError, StateError

State = dict[str, Any]


def state_of(seed: int) -> State:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("mapping", "named"),
    [({"weight": "weight", "wieght": "x"}, "'wieght'"), ({"^w": "w", r"^layers\.": "h."}, r"'\^layers")],
    ids=["names", "rules"],
)
def test_a_key_mapping_that_is_about_nothing_is_a_difference(mapping: Any, named: str, tmp_path: Path) -> None:
    stored, live = state_of(1), state_of(2)
    before = live["model"].weight.clone()
    save(tmp_path / "a", stored)
    with pytest.raises(MismatchError, match=f"key_mapping: {named}.*matches no name in the checkpoint"):
        load(tmp_path / "a", {"model": live["model"]}, key_mapping=mapping)
    assert torch.equal(live["model"].weight, before)
    with pytest.warns(UserWarning, match="matches no name in the checkpoint"):
        load(tmp_path / "a", {"model": live["model"]}, key_mapping=mapping, strict=False)
    assert torch.equal(live["model"].weight, stored["model"].weight)


@pytest.mark.parametrize("name", ["ema#", "$"])  # the format gives a meaning to these
def test_state_that_a_load_would_refuse_is_not_committed(tmp_path: Path, name: str) -> None:
    state = state_of(1)
    save(tmp_path / "a", state)
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    state["optimizer"].state[state["model"].bias][name] = 1.0
    with pytest.raises(StateError, match="a load would refuse it: the optimizer state of rank 0"):
        save(tmp_path / "a", state, overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    load(tmp_path / "a", state_of(2))
