"""A backward in two parts makes the gradients of an ordinary one. Oracle: the ordinary one, in float64."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_shardckpt.parallel.pipeline.split_backward import DeferredBackward, backward_input, backward_weight

WIDTH = 8


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


class Residual(nn.Module):
    """Two blocks between which one linear layer and one norm are used twice; with a parameter unused, one frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.tied, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.frozen, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.norm(self.first(x)))
        x = self.second(x) * self.scale
        result: Tensor = self.frozen(self.tied(self.norm(x)))
        return result


class Entangled(nn.Module):
    """One parameter used as it is and through an expression, the expression twice, and an output of parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.other = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        expression = (self.mixed * self.other).T
        x = torch.addcmul(x @ expression, self.other, self.other) @ self.mixed
        return self.norm(x @ expression) * self.other, (self.other * self.mixed).sum(0)


class Pair(nn.Module):
    """Two inputs and two outputs; the first input also leaves as it came, one output alone reaches the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.b(torch.nn.functional.gelu(self.a(x)) + y)


class Checkpointed(nn.Module):
    """The residual network, recomputed in the backward, with dropout; counts how often its blocks run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.runs = Residual(), 0

    def _run(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.nn.functional.dropout(self.inner(x), 0.3, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) * 2  # type: ignore[no-any-return]


def tensors(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def run(
    module: nn.Module, inputs: Sequence[Sequence[Tensor]], late: int | None
) -> tuple[list[Tensor | None], dict[str, Tensor | None]]:
    """Gradients of the inputs and of the parameters over all microbatches; ``late``: how many wait, None: ordinary."""
    torch.manual_seed(1)
    rests: list[DeferredBackward] = []
    leaves = [[x.detach().clone().requires_grad_(x.requires_grad) for x in microbatch] for microbatch in inputs]
    for microbatch in leaves:
        outputs = [output for output in tensors(module(*microbatch)) if output.requires_grad]
        gradients = [torch.randn_like(output) for output in outputs]
        if late is None:
            torch.autograd.backward(outputs, gradients)
            continue
        rests.append(backward_input(outputs, gradients, microbatch))
        if len(rests) > late:
            backward_weight(rests.pop(0))
    for rest in rests:
        backward_weight(rest)
    return [x.grad for microbatch in leaves for x in microbatch], {n: p.grad for n, p in module.named_parameters()}


def same(left: Tensor | None, right: Tensor | None, tolerance: float) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right) if not tolerance else torch.allclose(left, right, rtol=tolerance, atol=tolerance)


# Where a parameter is used several times, the sum of its uses is in another order: hence a tolerance for float64.
CASES: list[tuple[Callable[[], nn.Module], int, bool, float]] = [
    (Residual, 1, True, 1e-12),
    (Entangled, 1, True, 1e-12),
    (Pair, 2, True, 0.0),
    (Checkpointed, 1, True, 1e-12),
    (Checkpointed, 1, False, 1e-12),
]


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize(("build", "arity", "wanted", "tolerance"), CASES)
def test_gradients_are_those_of_an_ordinary_backward(
    build: Callable[[], nn.Module], arity: int, wanted: bool, tolerance: float, late: int
) -> None:
    module = build().double()
    twin = copy.deepcopy(module)
    inputs = [
        [torch.randn(3, 5, WIDTH, dtype=torch.float64, requires_grad=wanted) for _ in range(arity)] for _ in range(4)
    ]
    found, parameters = run(module, inputs, late)
    expected, expected_parameters = run(twin, inputs, None)
    assert all(same(a, b, tolerance) for a, b in zip(found, expected, strict=True))
    wrong = [name for name, grad in parameters.items() if not same(grad, expected_parameters[name], tolerance)]
    assert not wrong
    assert any(grad is not None for grad in parameters.values())


def test_the_first_part_leaves_the_gradients_of_parameters_to_the_second() -> None:
    block, x = Block(), torch.randn(3, WIDTH, requires_grad=True)
    output = block(x)
    rest = backward_input([output], [torch.ones_like(output)], [x])
    assert x.grad is not None and all(p.grad is None for p in block.parameters())
    backward_weight(rest)
    assert all(p.grad is not None for p in block.parameters())


def test_checkpointed_regions_are_recomputed_once_in_each_part() -> None:
    module, x = Checkpointed(), torch.randn(3, WIDTH, requires_grad=True)
    output = module(x)
    rest = backward_input([output], [torch.ones_like(output)], [x])
    assert module.runs == 2
    backward_weight(rest)
    assert module.runs == 3


def test_hooks_change_gradients_once() -> None:
    """A hook on an activation runs in both parts, but what it returns counts once; one on a parameter runs once."""
    found: dict[bool, tuple[dict[str, Tensor | None], Counter[str]]] = {}
    for split in (False, True):
        torch.manual_seed(0)
        block, calls = Block().double(), Counter[str]()
        weight: Any = block.up.weight
        x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)

        def scaled(grad: Tensor, name: str, factor: float, calls: Counter[str] = calls) -> Tensor:
            calls[name] += 1
            return grad * factor

        weight.register_hook(partial(scaled, name="parameter", factor=3.0))
        weight.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.update(["accumulated"]))
        activation: Any = block.up(block.norm(x))
        activation.register_hook(partial(scaled, name="activation", factor=2.0))
        output = block.down(activation)
        if split:
            backward_weight(backward_input([output], [torch.ones_like(output)], [x]))
        else:
            output.backward(torch.ones_like(output))
        found[split] = {name: p.grad for name, p in block.named_parameters()}, calls
    assert all(same(grad, found[False][0][name], 0.0) for name, grad in found[True][0].items())
    assert found[False][1] == Counter(parameter=1, accumulated=1, activation=1)
    assert found[True][1] == Counter(parameter=1, accumulated=1, activation=2)
