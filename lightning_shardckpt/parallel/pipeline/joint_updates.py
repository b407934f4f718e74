"""Refuse an optimizer whose update of a parameter depends on other parameters, since a pipeline stage has only some.

An example is a step size by the norm of all gradients. In some of the first steps, copies of a few parameters are
updated together, and again without the first of them; the results for the others must be equal. Optimizers that draw
random numbers are refused, too, since the numbers for a parameter depend on how many are updated before it.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, MutableMapping
from copy import deepcopy
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.stage_optimizer import user_code
from lightning_shardckpt.system.random_generators import preserve_rng

_SAMPLED = 8  # the number of parameters, the smallest ones
_CHECKED_STEPS = {1, 2, 4, 8, 16}  # some optimizers use statistics of the first steps later
_SCALES = (1.0, 1e3)  # of gradients, to exceed limits of their norm or of a step size
_REPLACED = ("step", "add_param_group", "zero_grad")  # methods that schedulers and this package replace on an optimizer


class JointUpdates:
    """Checks the optimizers of one pipeline. Every rank must make the same calls in the same order."""

    def __init__(self) -> None:
        self._steps: MutableMapping[Optimizer, int] = WeakKeyDictionary()

    def wrap_closure(self, optimizer: Optimizer, closure: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        """Return the closure of a step, followed by a `check` of the optimizer."""

        def closure_and_check() -> Any:
            loss = closure()
            self.check(optimizer, loss, device)
            return loss

        return closure_and_check

    def check(self, optimizer: Optimizer, loss: Any, device: torch.device) -> None:
        """Check an optimizer before its step, after the backward.

        Collective: every rank of the world must call it.

        Raises:
            UnsupportedCodeError: on every rank, if an update depends on other parameters.
        """
        if type(optimizer).__module__.startswith("torch.optim."):
            return
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps not in _CHECKED_STEPS:
            return
        with user_code(False), preserve_rng():
            joins = joins_parameters(optimizer, lambda: loss)
        votes = torch.tensor(int(joins), device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        if votes:
            raise UnsupportedCodeError(
                f"{type(optimizer).__name__} updates a parameter differently without the others: it uses a norm or a "
                "step size of all parameters, or draws random numbers. In a pipeline each stage updates only its own "
                "parameters. Use an optimizer that updates each parameter by itself (for clipping, gradient_clip_val), "
                "or pipeline_parallel_size=1."
            )


def joins_parameters(optimizer: Optimizer, closure: Callable[[], Any]) -> bool:
    """Return True if a step updates a parameter differently without others; False with a warning if it can't be tried.

    Args:
        optimizer: with gradients. Neither it nor its parameters are changed.
        closure: the argument of its ``step``.
    """
    live = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.numel()]
    smallest = {id(p) for p in sorted(live, key=Tensor.numel)[:_SAMPLED]}
    some = [p for p in live if id(p) in smallest]
    if len(some) < 2:
        return False
    try:
        for scale in _SCALES:
            together = _step_copies(optimizer, some, scale, closure)
            without_first = _step_copies(optimizer, some[1:], scale, closure)
            if any(not _equal(value, together.get(key)) for key, value in without_first.items()):
                return True
    except Exception as error:  # it can't be copied, or its step needs more than the copies
        warnings.warn(
            f"could not check if {type(optimizer).__name__} uses a norm or a step size of all parameters "
            f"({type(error).__name__}: {error}). If it does, pipeline stages update their parameters differently.",
            stacklevel=2,
        )
    return False


def _step_copies(
    optimizer: Optimizer, some: list[Tensor], scale: float, closure: Callable[[], Any]
) -> dict[tuple[int, str], Any]:
    """Step a copy of an optimizer with copies of some parameters; return them, their state and the groups' numbers."""
    memo = _replace_others(optimizer, {id(p) for p in some})
    copies: list[Any] = [deepcopy(p, memo) for p in some]
    for new_parameter, parameter in zip(copies, some, strict=True):
        assert parameter.grad is not None
        new_parameter.grad = parameter.grad.detach() * scale
    new = _copy_optimizer(optimizer, memo)
    ids = set(map(id, copies))
    for group in new.param_groups:
        group["params"][:] = [p for p in group["params"] if id(p) in ids]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        type(new).step(new, closure)
    results: dict[tuple[int, str], Any] = {
        (number, name): value
        for number, group in enumerate(new.param_groups)
        for name, value in group.items()
        if isinstance(value, float | Tensor)
    }
    for new_parameter, parameter in zip(copies, some, strict=True):
        state = new.state.get(new_parameter, {})
        results |= {(id(parameter), str(name)): value for name, value in state.items()}
        results[id(parameter), ""] = new_parameter.detach()
    return results


def _copy_optimizer(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    """Return a copy without hooks, but with all attributes, unlike torch's ``deepcopy`` of an optimizer."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    copies = [(old, object.__new__(type(old))) for old in (optimizer, *inner)]
    memo |= {id(old): new for old, new in copies}
    for old, _ in copies:
        memo |= {id(value): OrderedDict() for name, value in vars(old).items() if name.endswith("_hooks")}
    for old, new in copies:
        new.__dict__ |= {name: deepcopy(v, memo) for name, v in vars(old).items() if name not in _REPLACED}
    return copies[0][1]


def _replace_others(optimizer: Optimizer, some: set[int]) -> dict[int, Any]:
    """Return a memo for ``deepcopy`` that replaces the other parameters and their state by empty tensors."""
    memo: dict[int, Any] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in some:
                continue
            memo[id(parameter)] = nn.Parameter(torch.empty(0, dtype=parameter.dtype), requires_grad=False)
            state = optimizer.state.get(parameter, {})
            memo |= {id(value): torch.empty(0) for value in state.values() if isinstance(value, Tensor)}
    return memo


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())
    return not isinstance(one, int | float) or one == other or one != one
