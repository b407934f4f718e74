"""Hooks of parameters that run once for several backward passes. Oracle: one backward of the sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.parameter_hooks import ParameterHooks, accumulate

PARTS = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -9.0], [2.0, 2.0, 2.0]])


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def clamped(**hooks: Callable[[nn.Parameter], Any]) -> dict[str, nn.Parameter]:
    parameters = {name: nn.Parameter(torch.zeros(3)) for name in (*hooks, "without")}
    for name, register in hooks.items():
        register(parameters[name])
    return parameters


def hooked() -> dict[str, nn.Parameter]:
    return clamped(
        gradient=lambda p: p.register_hook(lambda g: g.clamp(-1, 1)),
        accumulated=lambda p: p.register_post_accumulate_grad_hook(halve),
    )


def passes(parameters: dict[str, nn.Parameter], parts: Tensor) -> None:
    for part in parts:
        sum((p * part).sum() for p in parameters.values()).backward()


@pytest.mark.parametrize("earlier", [None, torch.tensor([10.0, 20.0, 30.0])])
def test_hooks_see_the_sum_of_all_passes_once(earlier: Tensor | None) -> None:
    parameters, expected = hooked(), hooked()
    for p in (*parameters.values(), *expected.values()):
        p.grad = None if earlier is None else earlier.clone()
    with ParameterHooks(parameters).once():
        passes(parameters, PARTS)
    passes(expected, PARTS.sum(0, keepdim=True))
    for name, parameter in parameters.items():
        assert parameter.grad is not None and torch.equal(parameter.grad, expected[name].grad), name


def test_handles_remove_hooks_meanwhile_and_afterwards() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    first = parameter.register_hook(lambda g: g * 10)
    second = parameter.register_hook(lambda g: g * 100)
    hooks = ParameterHooks({"w": parameter})
    with hooks.once():
        passes({"w": parameter}, PARTS[:1])
        first.remove()
    assert parameter.grad is not None and torch.equal(parameter.grad, 100 * PARTS[0])
    second.remove()
    parameter.grad = None
    with hooks.once():
        passes({"w": parameter}, PARTS[:1])
    assert torch.equal(parameter.grad, PARTS[0])


def test_a_failed_pass_leaves_hooks_and_gradients_as_they_were() -> None:
    parameters = hooked()
    parameters["gradient"].grad = PARTS[0].clone()
    with pytest.raises(ZeroDivisionError), ParameterHooks(parameters).once():
        passes(parameters, PARTS)
        raise ZeroDivisionError
    assert parameters["gradient"].grad is not None and torch.equal(parameters["gradient"].grad, PARTS[0])
    assert parameters["accumulated"].grad is None
    accumulate([(parameters["accumulated"], PARTS[1].clone())])
    found: Any = parameters["accumulated"].grad
    assert torch.equal(found, PARTS[1] / 2)


def test_a_hook_that_a_backward_pass_registers_is_refused() -> None:
    parameters = hooked()
    hooks = ParameterHooks(parameters)
    with pytest.raises(UnsupportedCodeError, match="misses a part of the gradient"), hooks.put_off():
        parameters["without"].register_hook(lambda g: g)


def test_a_hook_that_a_repeated_run_registers_is_refused_by_name() -> None:
    parameters = hooked()
    hooks = ParameterHooks(parameters)
    parameters["without"].register_hook(lambda g: g)
    hooks.allow()
    hooks.check()
    parameters["without"].register_hook(lambda g: g)
    with pytest.raises(UnsupportedCodeError, match="a step registers a hook on without"):
        hooks.check()


def test_hooks_of_a_run_that_does_not_count_are_removed_and_others_stay() -> None:
    parameters = hooked()
    hooks = ParameterHooks(parameters)
    with hooks.undone():
        for parameter in parameters.values():
            parameter.register_hook(lambda g: g * 7)
            parameter.register_post_accumulate_grad_hook(halve)
    hooks.check()
    passes(parameters, PARTS[:1])
    found = {name: parameter.grad for name, parameter in parameters.items()}
    expected = {"gradient": PARTS[0].clamp(-1, 1), "accumulated": PARTS[0] / 2, "without": PARTS[0]}
    assert all(torch.equal(gradient, expected[name]) for name, gradient in found.items() if gradient is not None)
