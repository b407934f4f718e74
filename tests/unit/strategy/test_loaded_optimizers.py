"""Hooks see the state of loaded optimizers, and may change tensors of it in place alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.model import parameter_names
from lightning_shardckpt.strategy.run_checkpoints import LoadedOptimizers


class Counts(torch.optim.AdamW):
    """Has an entry of its own, and state without a parameter."""

    scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}


def loaded(*settings: tuple[int, int, str]) -> tuple[Any, LoadedOptimizers, list[dict[str, Any]]]:
    """An optimizer that was loaded with lr 0.2; the result of ``states``."""
    module = nn.Linear(2, 2)
    optimizer = Counts([{"params": [module.weight]}, {"params": [module.bias]}], lr=torch.tensor(0.1))
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"], optimizer.scale = 0.2, 2.0
    optimizer.state["seen"] = [1]  # type: ignore[index]  # state without a parameter
    of_hooks = LoadedOptimizers([optimizer], parameter_names(module), {*settings})
    return optimizer, of_hooks, of_hooks.states()


def test_settings_that_were_loaded_are_set_again() -> None:
    optimizer, of_hooks, left = loaded((0, 0, "lr"))
    assert (left[0]["scale"], left[0]["state"]["seen"]) == (2.0, [1])
    left[0]["state"]["weight"]["exp_avg"].zero_()
    first, second = optimizer.param_groups
    for group in (first, second):  # as on_fit_start does
        group |= {"lr": 0.05, "eps": 1e-3}
    of_hooks.take(left)
    assert (first["lr"], first["eps"], second["lr"]) == (0.2, 1e-3, 0.05)
    assert not optimizer.state[first["params"][0]]["exp_avg"].any()


@pytest.mark.parametrize(
    "change",
    [
        lambda states: states.pop(),
        lambda states: states.append({}),
        lambda states: states[0]["param_groups"].pop(),
        lambda states: states[0]["param_groups"][1].update(eps=1.0),
        lambda states: states[0].pop("scale"),
        lambda states: states[0]["state"].update(other={}),
        lambda states: states[0]["state"]["seen"].append(2),
        lambda states: states[0]["state"]["bias"].update(exp_avg=torch.ones(2)),
    ],
)
def test_changes_are_refused_by_name(change: Callable[[Any], Any]) -> None:
    _, of_hooks, left = loaded()
    change(left)
    with pytest.raises(StateError, match=r"changed optimizer_states of optimizer .* in on_train_start"):
        of_hooks.take(left)


def test_a_parameter_that_is_replaced_after_the_load_is_refused_by_name() -> None:
    optimizer, of_hooks, left = loaded()
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2))]  # as on_fit_start does
    with pytest.raises(StateError, match=r"weight of .* had state in the checkpoint, but"):
        of_hooks.take(left)
