"""Optimizer state by number on pipeline stages, which have a part of each param group. Oracle: the whole optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import decode_equal
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.optimizer_load import OptimizerLoad
from lightning_shardckpt.state.snapshot import specs_of

WHOLE = ("a", "b", "c", "d", "e")
GROUPS = (("a", "c", "d"), ("b", "e"))


def trained(groups: Sequence[Sequence[str]]) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """An optimizer over parameters of these names; the state of one is its place in WHOLE."""
    named = {name: torch.nn.Parameter(torch.zeros(2)) for group in groups for name in group}
    optimizer = torch.optim.SGD([{"params": [named[name] for name in group]} for group in groups], lr=1.0, momentum=0.5)
    for name, parameter in named.items():
        optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), float(WHOLE.index(name)))
    return optimizer, {id(parameter): name for name, parameter in named.items()}


def stages(*parts: Sequence[Sequence[str]]) -> list[OptimizerLoad]:
    """The load of a stored optimizer of GROUPS on each stage, which has these param groups."""
    leaves, document = optimizer_leaves([trained(GROUPS)[0].state_dict()])
    component = Component(specs_of("optimizer", leaves, ((0, 1),)))
    loads = []
    for part in parts:
        optimizer, names = trained(part)
        stored = StoredOptimizer(0, document["0"], component, decode_equal)
        loads.append(OptimizerLoad(0, optimizer, stored, names, lambda name: [name], WHOLE))
    return loads


def test_stages_find_their_numbers_together() -> None:
    loads = stages((("a", "c"), ("b",)), (("d",), ("e",)))
    found = list[str]()
    joined = loads[0].join_groups([load.groups() for load in loads], WHOLE, found)
    assert joined == [list(group) for group in GROUPS] and found == []
    numbers = [name for group in GROUPS for name in group]
    for load, mine in zip(loads, (("a", "c", "b"), ("d", "e")), strict=True):
        load.take_numbers(joined, found)
        live, new = load.tensors(())
        assert {key for key, _ in live + new} == {f"0/#{numbers.index(name)}/momentum_buffer" for name in mine}
        assert load.sources() == {"0/0": [0], "0/1": [1]}
    assert found == []


def test_groups_that_cannot_be_those_that_were_saved_are_told() -> None:
    for parts, message in (
        (((("a",), ("b",)), (("d",), ("e",))), "param groups of [3, 2] parameters in checkpoint, [2, 2] in model"),
        (((("c", "a"), ("b",)), (("d",), ("e",))), "in another order than the model's parameters"),
    ):
        loads = stages(*parts)
        found = list[str]()
        joined = loads[0].join_groups([load.groups() for load in loads], WHOLE, found)
        assert joined == [] and message in found[0]
        loads[0].take_numbers(joined, found)
        assert loads[0].tensors(()) == ([], [])
