"""What optimizers are built with, and how they save and load, can be changed and asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer, optimizer
from torch.utils import _foreach_utils

from lightning_shardckpt.compat.torch_autograd import (
    allow_lists_of,
    change_parameters,
    has_load_hooks,
    has_own_load_state_dict,
    has_own_state_dict,
)


def test_every_optimizer_gets_what_the_change_returns_until_the_end() -> None:
    given: list[Any] = []
    other = torch.zeros(1, requires_grad=True)

    def change(params: Any) -> list[Tensor]:
        given.append(params)
        return [other]

    with change_parameters(change):
        optimizers = [torch.optim.SGD([], lr=0.1), torch.optim.AdamW([]), torch.optim.LBFGS([])]
    assert given == [[], [], []]
    assert all(optimizer.param_groups[0]["params"] == [other] for optimizer in optimizers)
    with pytest.raises(ValueError, match="empty parameter list"):
        torch.optim.SGD([], lr=0.1)


class Plain(Tensor):
    """A class of tensors that torch does not know."""


def test_a_class_of_tensors_is_taken_by_lists_until_the_end() -> None:
    lists = [optimizer._foreach_supported_types, _foreach_utils._foreach_supported_types]
    before = [list(kinds) for kinds in lists]
    put_back = allow_lists_of(Plain)
    assert lists == [[*kinds, Plain] for kinds in before]
    put_back()
    assert lists == before and DTensor in before[0] and DTensor in before[1]


class Own(SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "mine": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)


def made(kind: type[SGD] = SGD) -> SGD:
    return kind([torch.zeros(2, requires_grad=True)], lr=0.1)


def test_a_method_or_a_hook_that_adds_entries_is_seen() -> None:
    assert has_own_state_dict(made(Own)) and has_own_load_state_dict(made(Own))
    optimizer = made()

    def add(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "mine": 1}

    handle = optimizer.register_state_dict_post_hook(add)
    assert "mine" in optimizer.state_dict() and has_own_state_dict(optimizer)
    handle.remove()
    assert "mine" not in optimizer.state_dict() and not has_own_state_dict(optimizer)


@pytest.mark.parametrize("when", ["pre", "post"])
def test_hooks_of_loading_are_seen(when: str) -> None:
    optimizer, ran = made(), list[object]()
    handle = getattr(optimizer, f"register_load_state_dict_{when}_hook")(lambda *given: ran.append(given))
    assert has_load_hooks(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    assert len(ran) == 1
    handle.remove()
    assert not has_load_hooks(optimizer)
