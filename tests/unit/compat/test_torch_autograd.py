"""Autograd tells what runs, and kernels over lists of tensors do what one call each does."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, save_on_cpu
from torch.optim import Optimizer, optimizer
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.compat import torch_autograd as compat


def test_a_backward_pass_is_noticed_inside() -> None:
    seen: list[bool] = []
    leaf = torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda gradient: seen.append(compat.in_backward()))
    (leaf * 2).sum().backward()
    assert seen == [True] and not compat.in_backward()


def test_a_function_runs_once_when_all_gradients_are_there() -> None:
    a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[list[bool]] = []
    note = lambda: seen.append([leaf.grad is None for leaf in (a, b)])  # noqa: E731
    a.register_hook(lambda gradient: compat.after_backward(note))
    (b.exp() * a).sum().backward()
    assert seen == [[False, False]]


def test_a_hook_inside_knows_whether_a_gradient_is_going_to_be_accumulated() -> None:
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    seen: list[list[bool]] = []

    def product() -> Tensor:
        inside = leaf * other
        inside.register_hook(lambda gradient: seen.append([compat.accumulates_gradient_of(p) for p in (leaf, other)]))
        return inside.sum()

    leaf.register_hook(lambda gradient: seen.append([compat.accumulates_gradient_of(leaf)]))

    product().backward()
    torch.autograd.grad(product(), [leaf])
    product().backward(inputs=[leaf])
    assert seen == [[True, True], [True], [False, False], [False], [True, False], [True]]
    assert not compat.accumulates_gradient_of(leaf), "no backward runs"


def test_checkpointing_and_offloading_pack_what_is_saved() -> None:
    seen: list[bool] = []

    def run(tensor: Tensor) -> Tensor:
        seen.append(compat.packing_hook() is not None)
        return tensor.exp()

    tensor = torch.ones(2, requires_grad=True)
    run(tensor)
    checkpoint(run, tensor, use_reentrant=False)
    with save_on_cpu():
        run(tensor)
    assert seen == [False, True, True]


class Multiplied(torch.autograd.Function):
    found: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        Multiplied.found.append(compat.is_batched(gradient))
        return gradient * 2, None


def test_a_batch_of_gradients_is_told_from_a_gradient() -> None:
    x = torch.ones(2, requires_grad=True)
    Multiplied.found.clear()
    torch.autograd.grad(Multiplied.apply(x, 2), x, torch.ones(2))
    torch.autograd.grad(Multiplied.apply(x, 2), x, torch.eye(2), is_grads_batched=True)
    assert Multiplied.found == [False, True]


def test_functions_of_users_are_called_with_other_arguments_until_it_ends() -> None:
    of_torch, seen = torch.autograd.Function.__dict__["apply"], list[type]()
    x = torch.ones(2, requires_grad=True)
    end = compat.change_arguments(lambda function, args: seen.append(function) or (args[0] + 1, *args[1:]))
    found = Multiplied.apply(x, 2)
    checkpoint(torch.sin, x, use_reentrant=True)  # by a function of torch
    end()
    assert found.tolist() == [4, 4] and seen == [Multiplied] and Multiplied.apply(x, 2).tolist() == [2, 2]
    assert torch.autograd.Function.__dict__["apply"] is of_torch


class GradientInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.enable_grad():
            used, unused = torch.ones(1, requires_grad=True), torch.ones(2, requires_grad=True)
            torch.autograd.grad(used * 2, used)
            torch.autograd.grad(used * 2, (used, unused), allow_unused=True)
        return gradient


def test_unused_inputs_of_grad_are_told_inside_a_backward_alone() -> None:
    x, seen, of_torch = torch.ones(1, requires_grad=True), list[Any](), vars(torch.autograd)["_engine_run_backward"]
    end = compat.check_unused_inputs(lambda inputs, found: seen.append((len(inputs[1]), found and found[1])))
    GradientInBackward.apply(x).backward()
    assert torch.autograd.grad(x * 2, torch.ones(1, requires_grad=True), allow_unused=True) == (None,)
    end()
    assert seen == [(2, None)] and vars(torch.autograd)["_engine_run_backward"] is of_torch


def test_a_scaler_calls_what_took_the_place_of_its_own_and_skips_a_step_by_its_answer() -> None:
    parameter, answer, seen = torch.ones(1, requires_grad=True), torch.zeros(()), list[Any]()
    optimizer, scaler = torch.optim.SGD([parameter], lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)

    def function(of: Optimizer, inverse: Tensor, zero: Tensor, allow_fp16: bool) -> dict[torch.device, Tensor]:
        seen.append((of, inverse.item(), zero.item(), allow_fp16))
        return {torch.device("cpu"): answer}

    undo = compat.replace_unscale(scaler, function)
    scaler.scale(parameter.sum()).backward()  # type: ignore[no-untyped-call]
    for value in (0.0, 1.0):
        answer.fill_(value)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert seen[0] == (optimizer, 0.25, 0, False) and len(seen) == 2
    assert parameter.item() == 1 - 4  # one step, and nothing has unscaled it
    undo()
    assert scaler._unscale_grads_ == type(scaler)._unscale_grads_.__get__(scaler)


def test_hooks_on_nodes_are_told_before_they_are_registered_and_found_on_those_of_leaves() -> None:
    told, leaf = list[Any](), torch.ones(2, requires_grad=True)
    leaf.register_hook(lambda g: g)  # type: ignore[no-untyped-call]
    node = get_gradient_edge(leaf).node
    assert compat.node_hooks(leaf) == []
    put_back = compat.on_node_hook(told.append)
    hooks: list[Any] = [lambda given, got: None, lambda got: None]
    node.register_hook(hooks[0])
    node.register_prehook(hooks[1])
    put_back()
    node.register_hook(lambda given, got: None)
    assert told == hooks and set(hooks) < set(compat.node_hooks(leaf)) and len(compat.node_hooks(leaf)) == 3


def test_lists_of_gradients_are_measured_and_scaled_at_once() -> None:
    halves, found = [torch.full((4,), 300.0, dtype=torch.float16), torch.tensor([3.0, -4.0]).half()], torch.zeros(())
    assert [n.item() for n in compat.norms(halves, 2.0, torch.float32)] == [600.0, 5.0]
    compat.unscale([gradient := torch.tensor([2.0, 4.0])], torch.tensor(0.5), found)
    assert gradient.tolist() == [1, 2] and found.item() == 0
    compat.unscale([gradient, torch.tensor([math.nan])], torch.tensor(1.0), found)
    assert found.item() == 1


def test_a_class_of_tensors_is_taken_by_lists_until_the_end() -> None:
    kinds = optimizer._foreach_supported_types
    before, kind = list(kinds), type("Plain", (Tensor,), {})
    put_back = compat.allow_lists_of(kind)
    assert kinds == [*before, kind]
    put_back()
    assert kinds == before
