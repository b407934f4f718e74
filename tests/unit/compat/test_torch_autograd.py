"""Autograd tells what runs, and kernels over lists of tensors do what one call each does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer, optimizer
from torch.utils import _foreach_utils
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.compat.torch_autograd import (
    accumulated_leaf,
    accumulates_gradient_of,
    after_backward,
    allow_lists_of,
    backward_number,
    change_arguments,
    change_parameters,
    check_unused_inputs,
    has_load_hooks,
    has_own_load_state_dict,
    has_own_state_dict,
    in_backward,
    is_batched,
    node_hooks,
    norms,
    on_node_hook,
    packing_hook,
    replace_unscale,
    returns_gradient_of,
    unscale,
)


def test_only_the_nodes_of_leaves_have_one() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2)
    node = (leaf * other).grad_fn
    assert node is not None and accumulated_leaf(node) is None
    below = node.next_functions[0][0]
    assert below is not None and accumulated_leaf(below) is leaf


def test_each_backward_pass_has_a_number_of_its_own_in_all_of_it() -> None:
    seen: list[int] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append(backward_number() if in_backward() else -1))
    for _ in range(2):
        out = leaf * 2
        out.register_hook(lambda gradient: seen.append(backward_number()))
        out.sum().backward()
    first, in_leaf, second, in_leaf_again = seen
    assert first == in_leaf != second == in_leaf_again and -1 not in seen and backward_number() == -1


def test_a_function_runs_once_when_all_gradients_are_there() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    a.register_hook(lambda gradient: after_backward(lambda: seen.append(a.grad is not None and b.grad is not None)))
    (b.exp() * a).sum().backward()
    assert seen == [True]


def test_a_hook_inside_knows_whether_a_gradient_is_going_to_be_accumulated() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[list[bool]] = []

    def product() -> Tensor:
        inside = leaf * other
        inside.register_hook(lambda gradient: seen.append([accumulates_gradient_of(p) for p in (leaf, other)]))
        return inside.sum()

    leaf.register_hook(lambda gradient: seen.append([returns_gradient_of(leaf)]))

    product().backward()
    torch.autograd.grad(product(), [leaf])
    product().backward(inputs=[leaf])
    assert seen == [[True, True], [False], [False, False], [True], [True, False], [False]]
    assert not accumulates_gradient_of(leaf), "no backward runs"


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


class Multiplied(torch.autograd.Function):
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
        found = Multiplied.apply(x, 2)
        checkpoint(torch.sin, x, use_reentrant=True)  # by a function of torch
    finally:
        end()
    found.sum().backward()
    assert found.tolist() == [4, 4] and seen == ["Multiplied"]
    assert x.grad is not None and x.grad.tolist() == [2, 2]
    assert Multiplied.apply(x, 2).tolist() == [2, 2]
    assert torch.autograd.Function.__dict__["apply"] is of_torch


class GradientInBackward(torch.autograd.Function):
    """Asks for the gradient of something unused in its backward, and then for one that is used."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, allow_unused: bool) -> torch.Tensor:
        ctx.allow_unused = allow_unused
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        with torch.enable_grad():
            used, unused = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
            torch.autograd.grad(used * 2, used)
            torch.autograd.grad(used * 2, (used, unused), allow_unused=ctx.allow_unused)
        return gradient, None


def test_unused_inputs_of_grad_are_told_inside_a_backward_alone() -> None:
    x, seen, of_torch = torch.ones(1, requires_grad=True), list[Any](), vars(torch.autograd)["_engine_run_backward"]
    end = check_unused_inputs(lambda inputs, gradients: seen.append((len(inputs[1]), gradients and gradients[1])))
    try:
        GradientInBackward.apply(x, True).backward()
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            GradientInBackward.apply(x, False).backward()
        assert torch.autograd.grad(x * 2, torch.ones(1, requires_grad=True), allow_unused=True) == (None,)
    finally:
        end()
    assert seen == [(2, None), (2, None)]
    assert vars(torch.autograd)["_engine_run_backward"] is of_torch


def test_a_scaler_calls_what_took_the_place_of_its_own_and_skips_a_step_by_its_answer() -> None:
    parameter = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    answer = torch.zeros(())
    seen: list[tuple[float, bool]] = []

    def function(
        of: torch.optim.Optimizer, inverse: Tensor, zero: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        assert of is optimizer and zero.item() == 0
        seen.append((inverse.item(), allow_fp16))
        return {torch.device("cpu"): answer}

    undo = replace_unscale(scaler, function)
    scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert seen == [(0.25, False)] and parameter.item() == 1 - 4  # nothing has unscaled it
    answer.fill_(1.0)
    scaler.step(optimizer)
    assert len(seen) == 2 and parameter.item() == 1 - 4
    undo()
    assert scaler._unscale_grads_ == type(scaler)._unscale_grads_.__get__(scaler)


def test_hooks_on_nodes_are_told_before_they_are_registered_and_found_on_those_of_leaves() -> None:
    told = list[Any]()
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda g: g)  # type: ignore[no-untyped-call]
    node = get_gradient_edge(leaf).node
    assert node_hooks(leaf) == []
    put_back = on_node_hook(told.append)
    try:
        hooks: list[Any] = [lambda given, got: None, lambda got: None]
        node.register_hook(hooks[0])
        node.register_prehook(hooks[1])
    finally:
        put_back()
    node.register_hook(lambda given, got: None)
    assert told == hooks and set(hooks) < set(node_hooks(leaf)) and len(node_hooks(leaf)) == 3


def test_lists_of_gradients_are_measured_and_scaled_at_once() -> None:
    halves, found = [torch.full((4,), 300.0, dtype=torch.float16), torch.tensor([3.0, -4.0]).half()], torch.zeros(())
    assert [n.item() for n in norms(halves, 2.0, torch.float32)] == [600.0, 5.0]
    unscale([gradient := torch.tensor([2.0, 4.0])], torch.tensor(0.5), found)
    assert gradient.tolist() == [1, 2] and found.item() == 0
    unscale([gradient, torch.tensor([math.nan])], torch.tensor(1.0), found)
    assert found.item() == 1


# ── what optimizers are built with, and how they save and load, can be changed and asked for ──────────────────────────


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
