"""Optimizers that join parameters are told from those that update each one by itself.

Oracle: which of them do is known from their formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from lightning_shardckpt.parallel.pipeline.joint_updates import joins_parameters


class Own(Optimizer):
    """Steps by a rule that gets all gradients."""

    def __init__(self, params: Any, rule: Callable[[list[Tensor], Tensor], float | Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.rule, self.steps = rule, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = closure()
        self.steps += 1
        every = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in every:
            self.state[p]["last"] = p.grad.clone()
            p.sub_(self.rule([p.grad for p in every], loss) * p.grad)
        return loss


class Wrapping(Optimizer):
    """Scales by the norm of all, then lets another one step, as SAM does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.inner = SGD(self.param_groups, 0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> Any:
        every = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in every]).norm()
        for p in every:
            p.grad = p.grad / norm
        return self.inner.step(closure)


def norm_of(grads: list[Tensor]) -> Tensor:
    return torch.stack([grad.norm() for grad in grads]).norm()


KINDS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "Adam": (Adam, False),
    "each by itself": (lambda params: Own(params, lambda grads, loss: 0.1), False),
    "by the loss": (lambda params: Own(params, lambda grads, loss: 0.1 * loss), False),
    "a norm of all": (lambda params: Own(params, lambda grads, loss: 1 / norm_of(grads)), True),
    "a limit not reached": (lambda params: Own(params, lambda grads, loss: min(1.0, 50 / float(norm_of(grads)))), True),
    "random numbers": (lambda params: Own(params, lambda grads, loss: torch.rand(())), True),
    "an inner optimizer": (Wrapping, True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_that_joins_parameters_is_found_and_left_as_it_was(kind: str) -> None:
    build, joins = KINDS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer: Any = build(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces its step
    optimizer.register_step_pre_hook(lambda *args: pytest.fail("a copy runs no hooks"))
    model(torch.ones(5, 3)).square().mean().backward()
    parameters: list[Any] = list(model.parameters())
    before = [(p.detach().clone(), p.grad.clone()) for p in parameters]
    assert joins_parameters(optimizer, lambda: torch.tensor(2.0)) == joins
    assert all(torch.equal(p, q) and torch.equal(p.grad, g) for p, (q, g) in zip(parameters, before, strict=True))
    assert not optimizer.state and getattr(optimizer, "steps", 0) == 0


def test_an_optimizer_that_cannot_be_copied_is_left_alone_with_a_warning() -> None:
    model = nn.Linear(3, 4)
    optimizer: Any = Own(model.parameters(), lambda grads, loss: 0.1)
    optimizer.file = (n for n in range(3))
    model(torch.ones(5, 3)).sum().backward()
    with pytest.warns(UserWarning, match="could not check if Own uses a norm"):
        assert not joins_parameters(optimizer, lambda: None)
