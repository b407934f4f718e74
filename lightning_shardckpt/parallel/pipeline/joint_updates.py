"""Refuse an optimizer that joins parameters, as by a norm of all gradients: a pipeline stage has some of them alone.

Whether it does is tried out in the first steps: copies of a few parameters are updated together, and without the first
of them. What it does to the others must be the same. An optimizer that draws random numbers is found, too: which ones a
parameter gets depends on how many come before it.
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

_SAMPLED = 8  # parameters, the smallest ones
_TRIED = {1, 2, 4, 8, 16}  # steps: some measure in the first what they use later
_SCALES = (1.0, 1e3)  # of gradients: a limit of their norm, or of a step size, may not be reached now
_BOUND = ("step", "add_param_group")  # methods that schedulers and this package put onto an optimizer


class JointUpdates:
    """Tries out the optimizers of one pipeline. Every rank must make the same calls in the same order."""

    def __init__(self) -> None:
        self._steps: MutableMapping[Optimizer, int] = WeakKeyDictionary()

    def checked(self, optimizer: Optimizer, closure: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
        """Return the closure of a step, which then checks the optimizer that is going to step; see ``check``."""

        def closure_and_check() -> Any:
            loss = closure()
            self.check(optimizer, loss, device)
            return loss

        return closure_and_check

    def check(self, optimizer: Optimizer, loss: Any, device: torch.device) -> None:
        """Check an optimizer that is about to step; gradients must be there.

        Collective: every rank of the world must call it.

        Args:
            optimizer: of this stage.
            loss: what its closure gives it.
            device: where the ranks meet.

        Raises:
            UnsupportedCodeError: on every rank.
        """
        if type(optimizer).__module__.startswith("torch.optim."):
            return
        steps = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if steps not in _TRIED:
            return
        with user_code(False), preserve_rng():
            joins = joins_parameters(optimizer, lambda: loss)
        votes = torch.tensor(int(joins), device=device)
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        if votes:
            raise UnsupportedCodeError(
                f"{type(optimizer).__name__} does something else to a parameter if others are missing: it joins them, "
                "by a norm or a step size of all, or draws random numbers. In a pipeline each stage updates its own "
                "parameters. Use an optimizer that updates each one by itself (for clipping, gradient_clip_val), or "
                "pipeline_parallel_size=1."
            )


def joins_parameters(optimizer: Optimizer, closure: Callable[[], Any]) -> bool:
    """Return whether a step does something else to a parameter without others; False, with a warning, if nobody knows.

    Args:
        optimizer: whose parameters have gradients; neither it nor they change.
        closure: what the step is called with.
    """
    live = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None and p.numel()]
    smallest = {id(p) for p in sorted(live, key=Tensor.numel)[:_SAMPLED]}
    some = [p for p in live if id(p) in smallest]
    if len(some) < 2:
        return False
    try:
        for scale in _SCALES:
            together = _stepped(optimizer, some, scale, closure)
            alone = _stepped(optimizer, some[1:], scale, closure)
            if any(not _equal(value, together.get(key)) for key, value in alone.items()):
                return True
    except Exception as error:  # it can't be copied, or needs more than that
        warnings.warn(
            f"whether {type(optimizer).__name__} joins parameters, by a norm or a step size of all, could not be tried "
            f"out ({type(error).__name__}: {error}). If it does, pipeline stages update theirs differently.",
            stacklevel=2,
        )
    return False


def _stepped(
    optimizer: Optimizer, some: list[Tensor], scale: float, closure: Callable[[], Any]
) -> dict[tuple[int, str], Any]:
    """What a copy of an optimizer makes of copies of some parameters, of their state and of its groups' numbers."""
    memo = _left_out(optimizer, {id(p) for p in some})
    copies: list[Any] = [deepcopy(p, memo) for p in some]
    for copied, parameter in zip(copies, some, strict=True):
        assert parameter.grad is not None
        copied.grad = parameter.grad.detach() * scale
    new = _copied(optimizer, memo)
    kept = {id(copied) for copied in copies}
    for group in new.param_groups:
        group["params"][:] = [p for p in group["params"] if id(p) in kept]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        type(new).step(new, closure)
    found: dict[tuple[int, str], Any] = {
        (number, name): value
        for number, group in enumerate(new.param_groups)
        for name, value in group.items()
        if isinstance(value, float | Tensor)
    }
    for copied, parameter in zip(copies, some, strict=True):
        state = new.state.get(copied, {})
        found |= {(id(parameter), str(name)): value for name, value in state.items()}
        found[id(parameter), ""] = copied.detach()
    return found


def _copied(optimizer: Optimizer, memo: dict[int, Any]) -> Any:
    """A copy with all attributes, which torch's ``deepcopy`` of an optimizer leaves out, and without hooks."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer)]
    made = [(old, object.__new__(type(old))) for old in (optimizer, *inner)]
    memo |= {id(old): new for old, new in made}
    for old, _ in made:
        memo |= {id(value): OrderedDict() for name, value in vars(old).items() if name.endswith("_hooks")}
    for old, new in made:
        new.__dict__ |= {name: deepcopy(v, memo) for name, v in vars(old).items() if name not in _BOUND}
    return made[0][1]


def _left_out(optimizer: Optimizer, some: set[int]) -> dict[int, Any]:
    """For ``deepcopy``: what stands for the other parameters and their state, without memory."""
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
