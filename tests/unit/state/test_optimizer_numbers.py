"""Optimizer state by number on pipeline stages, which have a part of each param group. Oracle: the whole optimizer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lightning_shardckpt.checkpoint.save_agreement import specs_of
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.optimizer import OptimizerLoad, join_groups, optimizer_leaves

WHOLE = ("a", "b", "c", "d", "e")
GROUPS = [["a", "c", "d"], ["b", "e"]]


def trained(groups: Sequence[Sequence[str]]) -> tuple[torch.optim.Optimizer, dict[int, str]]:
    """An optimizer over parameters of these names; the state of one is its place in WHOLE."""
    named = {name: torch.nn.Parameter(torch.zeros(2)) for group in groups for name in group}
    optimizer = torch.optim.SGD([{"params": [named[name] for name in group]} for group in groups], lr=1.0, momentum=0.5)
    for name, parameter in named.items():
        optimizer.state[parameter]["momentum_buffer"] = torch.full((2,), float(WHOLE.index(name)))
    return optimizer, {id(parameter): name for name, parameter in named.items()}


def saved() -> StoredOptimizer:
    leaves, document = optimizer_leaves([trained(GROUPS)[0].state_dict()])
    return StoredOptimizer(0, document["0"], Component(specs_of("optimizer", leaves, ((0, 1),))), decode_small)


def test_stages_find_their_numbers_together() -> None:
    stages = [["a", "c"], ["b"]], [["d"], ["e"]]
    joined = join_groups([[part] for part in stages], WHOLE)
    assert joined == [GROUPS]
    numbers = [name for group in GROUPS for name in group]
    for part in stages:
        stored, (optimizer, names) = saved(), trained(part)
        assert stored.name(joined[0]) is None
        load = OptimizerLoad(0, optimizer, stored, names, lambda name: [name])
        differences = [*load.compare(frozenset(WHOLE) - {*names.values()}, lambda keys, like: False)]
        live, new = load.tensors(lambda tensor: True)
        assert {key for key, _ in live + new} == {f"0/#{numbers.index(n)}/momentum_buffer" for n in names.values()}
        assert load.sources() == {"0/0": [0], "0/1": [1]} and differences == []


def test_groups_that_cannot_be_those_that_were_saved_are_told() -> None:
    for parts, sizes in (
        (([["a"], ["b"]], [["d"], ["e"]]), "[2, 2]"),
        (([["c", "a"], ["b"]], [["d"], ["e"]]), "[0, 2] in the order of its parameters"),
    ):
        stored = saved()
        problem = stored.name(join_groups([[part] for part in parts], WHOLE)[0])
        assert problem is not None and f"param groups of [3, 2] parameters; the model has {sizes}" in problem
        assert stored.numbered
