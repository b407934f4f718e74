"""Autograd functions of users get other arguments, those of torch do not."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.compat.custom_functions import change_arguments


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


def test_functions_of_users_are_called_with_other_arguments_until_it_ends() -> None:
    of_torch = torch.autograd.Function.__dict__["apply"]
    seen, x = list[str](), torch.ones(2, requires_grad=True)

    def change(function: type, args: tuple[Any, ...]) -> tuple[Any, ...]:
        seen.append(function.__name__)
        return args[0] + 1, *args[1:]

    end = change_arguments(change)
    try:
        found = Doubled.apply(x, 2)
        checkpoint(torch.sin, x, use_reentrant=True)  # by a function of torch
    finally:
        end()
    found.sum().backward()
    assert found.tolist() == [4, 4] and seen == ["Doubled"]
    assert x.grad is not None and x.grad.tolist() == [2, 2]
    assert Doubled.apply(x, 2).tolist() == [2, 2]
    assert torch.autograd.Function.__dict__["apply"] is of_torch
