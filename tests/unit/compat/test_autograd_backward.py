"""The backward that runs, and the nodes of its graph, as `compat.autograd_backward` asks about them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.compat.autograd_backward import (
    accumulates_gradient_of,
    after_backward,
    is_batched,
    is_result_of,
    packing_hook,
    returns_gradient_of,
)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_function_runs_once_when_all_gradients_are_there() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    a.register_hook(lambda gradient: after_backward(lambda: seen.append(a.grad is not None and b.grad is not None)))
    (b.exp() * a).sum().backward()
    assert seen == [True]


def test_a_hook_knows_whether_its_gradient_is_returned_or_accumulated() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    leaf.register_hook(lambda gradient: seen.append(returns_gradient_of(leaf)))
    (leaf * other).sum().backward()
    torch.autograd.grad((leaf * other).sum(), [leaf])
    (leaf * other).sum().backward(inputs=[leaf])
    assert seen == [False, True, False]


def test_a_hook_inside_knows_whether_a_gradient_is_going_to_be_accumulated() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[list[bool]] = []

    def product() -> Tensor:
        inside = leaf * other
        inside.register_hook(lambda gradient: seen.append([accumulates_gradient_of(p) for p in (leaf, other)]))
        return inside.sum()

    product().backward()
    torch.autograd.grad(product(), [leaf])
    product().backward(inputs=[leaf])
    assert seen == [[True, True], [False, False], [True, False]]
    assert not accumulates_gradient_of(leaf), "no backward runs"


def test_a_tensor_is_a_result_of_the_function_that_made_it() -> None:
    leaf = torch.ones(2, requires_grad=True)
    made: Tensor = Doubled.apply(leaf)  # type: ignore[no-untyped-call]
    assert is_result_of(made, Doubled)
    assert not is_result_of(made + 1, Doubled) and not is_result_of(leaf, Doubled)


def test_checkpointing_and_offloading_pack_what_is_saved() -> None:
    seen: list[bool] = []

    def run(tensor: Tensor) -> Tensor:
        seen.append(packing_hook() is not None)
        return tensor.exp()

    tensor = torch.ones(2, requires_grad=True)
    run(tensor)
    checkpoint(run, tensor, use_reentrant=False)
    with save_on_cpu():
        run(tensor)
    assert seen == [False, True, True]


def test_a_batch_of_gradients_is_told_from_a_gradient() -> None:
    found = list[bool]()

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            found.append(is_batched(gradient))
            return gradient

    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(Looks.apply(x), x, torch.ones(2))
    torch.autograd.grad(Looks.apply(x), x, torch.eye(2), is_grads_batched=True)
    assert found == [False, True]
