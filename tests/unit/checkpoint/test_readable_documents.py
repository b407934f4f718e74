"""What a save commits, a load reads. Oracle: the load, and the checkpoint that was there before."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_shardckpt as ckpt
from lightning_shardckpt.errors import StateError


class Moment(datetime.datetime):
    """As the timestamps of pandas and pendulum are."""


def trained() -> dict[str, Any]:
    module = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return {"model": module, "optimizer": optimizer}


def test_a_timestamp_of_another_library_comes_back_as_a_datetime(tmp_path: Path) -> None:
    state = {**trained(), "saved_at": Moment(2024, 2, 29, 12, tzinfo=datetime.UTC)}
    ckpt.save(tmp_path / "a", state)
    assert ckpt.load(tmp_path / "a", trained())["saved_at"] == datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)


@pytest.mark.parametrize("name", ["ema#", "$"])  # the format gives a meaning to these
def test_state_that_a_load_would_refuse_is_not_committed(tmp_path: Path, name: str) -> None:
    state = trained()
    ckpt.save(tmp_path / "a", state)
    before = {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()}
    state["optimizer"].state[state["model"].bias][name] = 1.0
    with pytest.raises(StateError, match="a load would refuse it: the optimizer state of rank 0"):
        ckpt.save(tmp_path / "a", state, overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "a").iterdir()} == before
    ckpt.load(tmp_path / "a", trained())


def test_an_odd_value_gets_no_advice_of_another_function(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"thing: builtins\.object") as caught:
        ckpt.save(tmp_path / "a", {**trained(), "thing": object()})
    assert "ShardCkptIO" not in str(caught.value)
