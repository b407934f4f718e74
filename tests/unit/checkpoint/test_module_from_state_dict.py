"""A module loads what was saved from its state dict. Oracle: the module that gave it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lightning_shardckpt as ckpt

State = dict[str, Any]


def trained(seed: int) -> State:
    """Tensors of more than a kilobyte, which have files, and small ones; a tie; running statistics."""
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(6, 400), nn.BatchNorm1d(400), nn.Linear(400, 6), nn.Linear(6, 400))
    module[3].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters(), lr=seed / 10)
    module(torch.randn(3, 6)).square().mean().backward()
    optimizer.step()
    return {"model": module, "optimizer": optimizer}


def bits(state: State) -> State:
    tensors = {f"model/{name}": value for name, value in state["model"].state_dict().items()}
    for number, values in state["optimizer"].state_dict()["state"].items():
        tensors |= {f"{number}/{name}": value for name, value in values.items()}
    return {name: (value.dtype, value.shape, value.tolist()) for name, value in tensors.items()}


FORMS: dict[str, Callable[[State], State]] = {
    "state dicts": lambda state: {key: value.state_dict() for key, value in state.items()},
    "with a filtered state dict": lambda state: {
        "model": dict(state["model"].state_dict()),
        "optimizer": state["optimizer"].state_dict(),
    },
    "with a live optimizer": lambda state: {**state, "model": state["model"].state_dict()},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_module_and_an_optimizer_load_their_state_dicts(form: str, tmp_path: Path) -> None:
    saved, state = trained(1), trained(2)
    ckpt.save(tmp_path / "a", {**FORMS[form](saved), "step": 3})
    assert ckpt.load(tmp_path / "a", state) == {"step": 3}
    assert bits(state) == bits(saved)
    state = trained(2)
    dicts = FORMS["state dicts"](state)
    assert ckpt.load(tmp_path / "a", dicts) == {"step": 3}
    state["optimizer"].load_state_dict(dicts["optimizer"])
    assert bits(state) == bits(saved)
    assert ckpt.load(tmp_path / "a").keys() == {"model", "optimizer", "step"}


def test_a_module_loads_its_state_dict_that_was_saved_as_the_whole_state(tmp_path: Path) -> None:
    saved, state = trained(1), trained(2)
    ckpt.save(tmp_path / "a", saved["model"].state_dict())
    ckpt.load(tmp_path / "a", {"model": state["model"]})
    weights = [{k: v for k, v in bits(one).items() if k.startswith("model/")} for one in (state, saved)]
    assert weights[0] == weights[1]
    found, expected = ckpt.load(tmp_path / "a"), saved["model"].state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_two_modules_load_two_state_dicts(tmp_path: Path) -> None:
    first, second = trained(1)["model"], trained(2)["model"]
    state = {"a": trained(3)["model"], "b": trained(4)["model"]}
    ckpt.save(tmp_path / "a", {"a": first.state_dict(), "b": second.state_dict()})
    ckpt.load(tmp_path / "a", state)
    for found, expected in ((state["a"], first), (state["b"], second)):
        pairs = zip(found.state_dict().values(), expected.state_dict().values(), strict=True)
        assert all(torch.equal(x, y) for x, y in pairs)
