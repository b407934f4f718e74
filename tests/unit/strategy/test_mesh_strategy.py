"""Both strategies take the same arguments, and what cannot be is refused when they are made."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from torch import nn

from lightning_shardckpt import fabric, pytorch
from lightning_shardckpt.compat.tensor_subclass import without_torch_function
from lightning_shardckpt.errors import TopologyError

BOTH = [pytorch.ShardedStrategy, fabric.ShardedStrategy]


def test_both_strategies_have_one_signature() -> None:
    ours, theirs = (inspect.signature(strategy) for strategy in BOTH)
    assert ours == theirs and len(ours.parameters) == 26
    assert {parameter.kind for parameter in ours.parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("strategy", BOTH)
def test_what_cannot_be_is_refused_at_once(strategy: type) -> None:
    with pytest.raises(TopologyError, match="pipeline_microbatches"):
        strategy(pipeline_microbatches=0)


@pytest.mark.parametrize("name", ["pipeline_layers", "fsdp_units", "activation_checkpointing"])
def test_a_pattern_is_not_taken_for_a_list_of_letters(name: str) -> None:
    with pytest.raises(TopologyError, match=rf"{name}=\['blocks.\*'\]"):
        pytorch.ShardedStrategy(**{name: "blocks.*"})


@pytest.mark.parametrize("defers", [True, False])
def test_fabric_builds_modules_without_memory_only_if_it_may(defers: bool) -> None:
    strategy = fabric.ShardedStrategy(defer_init=defers)
    with strategy.module_init_context(empty_init=True):
        module = nn.Linear(2, 1)
    assert not module.weight.is_meta
    with without_torch_function():
        assert module.weight.is_meta == defers


@pytest.mark.parametrize("name", ["pipeline_layers", "fsdp_units", "activation_checkpointing"])
def test_a_class_among_names_is_refused_with_its_name(name: str) -> None:
    options: dict[str, Any] = {name: ["blocks.*", nn.Linear]}
    with pytest.raises(TopologyError, match=rf"{name} is a list of names or patterns, found <class .*: write 'Linear'"):
        pytorch.ShardedStrategy(**options)


def test_reshard_after_forward_is_no_text() -> None:
    wrong: Any = "no"
    with pytest.raises(TopologyError, match="reshard_after_forward is True, False or None, found 'no'"):
        pytorch.ShardedStrategy(reshard_after_forward=wrong)


def test_an_option_that_there_is_not_is_one_of_the_class_that_users_know() -> None:
    wrong: Any = {"fsdp_unit": ["Linear"]}
    for strategy in BOTH:
        with pytest.raises(TypeError, match=r"^ShardedStrategy.__init__\(\) got an unexpected .* 'fsdp_unit'"):
            strategy(**wrong)
