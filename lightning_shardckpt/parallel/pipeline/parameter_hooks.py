"""Run the hooks of plain parameters once for all passes of a step, on the sum of their gradients.

A pipeline makes a backward pass for each microbatch; a hook must see what it would see on one process: the gradient of
the batch. Sharded parameters are gathered once for all passes, so their hooks need nothing of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.torch_tensors import (
    accumulation_hooks,
    gradient_hooks,
    set_accumulation_hooks,
    set_gradient_hooks,
    with_hooks,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.sharding.replicated_gradients import count_hooks


class ParameterHooks:
    """The hooks of users on the parameters of one rank, in one step.

    Args:
        parameters: those of this rank, by name.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters, self._names = list(parameters.values()), {id(p): name for name, p in parameters.items()}
        self._known = self._counts()

    @contextmanager
    def once(self) -> Iterator[None]:
        """Inside, backward passes accumulate; at the end the hooks run, on the sum of the gradients."""
        hooked = self._plain_hooked()
        before = [parameter.grad for parameter in hooked]
        for parameter in hooked:
            parameter.grad = None
        sums: list[Tensor | None] = []
        try:
            with self.put_off():
                yield
            sums = [parameter.grad for parameter in hooked]
        finally:
            for parameter, gradient in zip(hooked, before, strict=True):
                parameter.grad = gradient
        accumulate([(p, total) for p, total in zip(hooked, sums, strict=True) if total is not None])

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside, backward passes run no hooks of plain parameters.

        Raises:
            UnsupportedCodeError: for a hook that was registered meanwhile, which has missed a part of the gradient.
        """
        hooked = self._plain_hooked()
        hooks = [(gradient_hooks(p) or OrderedDict(), accumulation_hooks(p) or OrderedDict()) for p in hooked]
        for parameter in hooked:
            set_gradient_hooks(parameter, OrderedDict())  # handles refer to it weakly, as to no dict
            set_accumulation_hooks(parameter, OrderedDict())
        registered = self._counts()
        try:
            yield
            if self._counts() != registered:
                raise UnsupportedCodeError(
                    "a backward pass of a pipelined step, or a step whose backward passes run between its forward "
                    "passes, registers a hook on a parameter, which misses a part of the gradient. Register it in "
                    '__init__, configure_model or on_fit_start, or use pipeline_schedule="gpipe".'
                )
        finally:
            for parameter, (of_gradient, of_accumulated) in zip(hooked, hooks, strict=True):
                set_gradient_hooks(parameter, of_gradient)
                set_accumulation_hooks(parameter, of_accumulated)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """At the end, hooks that were registered inside are removed."""
        before = [(dict(gradient_hooks(p) or {}), dict(accumulation_hooks(p) or {})) for p in self._parameters]
        try:
            yield
        finally:
            for parameter, known in zip(self._parameters, before, strict=True):
                for hooks, old in zip((gradient_hooks(parameter), accumulation_hooks(parameter)), known, strict=True):
                    for number in (hooks or {}).keys() - old.keys():
                        del (hooks or {})[number]

    def allow(self) -> None:
        """Call after a run of a part of the step that no other run repeats: what it has registered may stay."""
        self._known = self._counts()

    def check(self) -> None:
        """Call after a run of a part of the step that others repeat.

        Raises:
            UnsupportedCodeError: if it has registered a hook, naming the parameter.
        """
        more = [name for name, count in self._counts().items() if count > self._known.get(name, 0)]
        if more:
            raise UnsupportedCodeError(
                f"a step registers a hook on {more[0]}. In a pipeline, parts of a step run once for each microbatch, "
                "and more often, so it would be registered as often. Register it in __init__, configure_model or "
                "on_fit_start, or in the first forward of a layer alone."
            )

    def _counts(self) -> dict[str, int]:
        """Return how many hooks each parameter has, by name, if it has any."""
        found = {self._names[id(p)]: count_hooks(p) for p in with_hooks(self._parameters)}
        return {name: count for name, count in found.items() if count}

    def _plain_hooked(self) -> list[nn.Parameter]:
        return [p for p in with_hooks(self._parameters) if not isinstance(p, DTensor) and count_hooks(p)]


def accumulate(gradients: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Add gradients to those of parameters, as a backward does: hooks see and change them."""
    hooked = [(parameter, gradient) for parameter, gradient in gradients if count_hooks(parameter)]
    for parameter, gradient in gradients:
        if not count_hooks(parameter):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
    if hooked:
        with torch.enable_grad():
            heads: list[Any] = [parameter.view_as(parameter) for parameter, _ in hooked]
        torch.autograd.backward(heads, [gradient for _, gradient in hooked])
