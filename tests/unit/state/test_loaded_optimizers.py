"""Changes of ``optimizer_states`` by hooks; oracle: torch's ``load_state_dict``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.state.loaded_optimizers import LoadedOptimizers
from lightning_shardckpt.state.module_io import parameter_names


class Counts(torch.optim.AdamW):
    """Has an entry of its own, and state without a parameter."""

    scale = 1.0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "scale": self.scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.scale = state_dict["scale"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "scale"})


def loaded(*settings: tuple[int, int, str]) -> tuple[Any, LoadedOptimizers, list[dict[str, Any]]]:
    """An optimizer that was configured with lr 0.1, and loaded with 0.2; the result of ``show``."""
    module = nn.Linear(2, 2)
    optimizer = Counts([{"params": [module.weight]}, {"params": [module.bias]}], lr=0.1)
    names = parameter_names(module)
    of_hooks = LoadedOptimizers([optimizer], names, {"elsewhere.weight"})
    module(torch.ones(2)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"], optimizer.scale = 0.2, 2.0
    optimizer.state["seen"] = [1]  # type: ignore[index]  # state without a parameter
    return optimizer, of_hooks, of_hooks.show({*settings})


def test_only_settings_that_were_loaded_or_changed_are_set() -> None:
    optimizer, of_hooks, left = loaded((0, 0, "lr"))
    first, second = optimizer.param_groups
    for group in (first, second):  # as on_fit_start does
        group |= {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.5}
    left[0]["param_groups"][1]["weight_decay"] = 0.7
    of_hooks.take(left)
    assert (first["lr"], first["eps"], first["weight_decay"]) == (0.2, 1e-3, 0.5)
    assert (second["lr"], second["eps"], second["weight_decay"]) == (0.05, 1e-3, 0.7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["param_groups"].pop(), "left 1 of 2 param groups of optimizer 0"),
        (lambda state: state["param_groups"][1].pop("eps"), r"deleted \['eps'\] of param group 1 of optimizer 0"),
        (lambda state: state.pop("scale"), r"deleted \['scale'\] from the state of Counts"),
        (lambda state: state["state"].update(other={}), "gave Counts state of .*other"),
    ],
)
def test_what_is_missing_or_unknown_is_refused_by_name(change: Callable[[Any], Any], message: str) -> None:
    _, of_hooks, left = loaded()
    change(left[0])
    with pytest.raises(StateError, match=message):
        of_hooks.take(left)


def test_replaced_state_is_cast_as_torch_casts_it() -> None:
    optimizer, of_hooks, left = loaded()
    replaced = {"step": torch.tensor(3.0, dtype=torch.float64), "exp_avg": torch.ones(2, dtype=torch.float64)}
    left[0]["state"]["bias"] |= replaced
    of_hooks.take(left)
    bias = optimizer.param_groups[1]["params"][0]
    twin = torch.optim.AdamW([bias])
    twin.load_state_dict({"state": {0: replaced}, "param_groups": twin.state_dict()["param_groups"]})
    expected = twin.state[bias]
    for key in replaced:
        assert optimizer.state[bias][key].dtype == expected[key].dtype
        assert torch.equal(optimizer.state[bias][key], expected[key])


def test_own_entries_are_shown_and_changes_of_them_count() -> None:
    optimizer, of_hooks, left = loaded()
    assert (left[0]["scale"], left[0]["state"]["seen"]) == (2.0, [1])
    left[0]["scale"] = 5.0
    left[0]["state"]["seen"].append(2)
    of_hooks.take(left)
    assert (optimizer.scale, optimizer.state["seen"]) == (5.0, [1, 2])


def test_reset_optimizer_has_its_first_settings_and_entries() -> None:
    optimizer, of_hooks, _ = loaded((0, 0, "lr"), (0, 0, "eps"))
    optimizer.param_groups[0]["eps"] = 1e-3  # as on_fit_start does
    of_hooks.take([])
    group = optimizer.param_groups[0]
    assert not optimizer.state and (group["lr"], group["eps"], optimizer.scale) == (0.1, 1e-3, 1.0)


def test_state_of_other_stages_is_ignored() -> None:
    optimizer, of_hooks, left = loaded()
    left[0]["state"]["elsewhere.weight"] = {"exp_avg": torch.ones(2)}
    of_hooks.take(left)
    assert len(optimizer.state) == 3
