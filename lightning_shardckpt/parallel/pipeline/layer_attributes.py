"""Find attributes that layers carry from one microbatch to the next, where one process would see a batch.

Buffers aside, a forward may keep things in attributes of its module. What is harmless stays possible: sizes, tables
that are computed once, attention weights and losses to be looked at. Refused are counters, averages of activations and
other values that a forward makes of those before: numbers that change with every microbatch, and tensors that are read
before they are set. Only classes of users are looked at: the forwards of torch's own keep nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.attribute_owners import INTERNAL, MOST_ITEMS
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder

_MISSING: Any = object()
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


class LayerAttributes:
    """The attributes of modules that see microbatches, during one training step.

    Args:
        modules: by name; of each, the stages that call it.
        sizes: samples of each microbatch.
        device: where placeholders are to be.
    """

    def __init__(
        self,
        modules: Mapping[str, tuple[nn.Module, frozenset[int]]],
        sizes: Sequence[int],
        device: torch.device,
    ) -> None:
        self._modules, self._sizes, self._device = modules, sizes, device
        self._known: dict[int, list[_Attributes]] = {}
        self._before: dict[int, int] = {}  # the latest microbatch, by stage

    @contextmanager
    def watched(self, stage: int, microbatch: int) -> Iterator[None]:
        """Surround the forward of a stage on a microbatch.

        Raises:
            UnsupportedCodeError: for an attribute that is made of what an earlier microbatch left.
        """
        before = self._before.get(stage)
        if before is None:
            here = [(name, module) for name, (module, stages) in self._modules.items() if stage in stages]
            self._known[stage] = [_Attributes(name, module) for name, module in here]
        for one in self._known[stage]:
            one.rewind(self._device)
        try:
            yield
        finally:
            for one in self._known[stage]:
                one.unwind()
        again = before is not None and self._sizes[before] == self._sizes[microbatch]
        for one in self._known[stage]:
            one.look(again)
        self._before[stage] = microbatch


class _Attributes:
    """The attributes of one module, as they were after the latest microbatch, or when the step began."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._of = name, vars(module)
        self._start: dict[str, Any] = {}  # of tensors that the forward sets: what was there before
        self._put: dict[str, Any] = {}
        self._keep()

    def _keep(self) -> None:
        self._now = dict(self._of)
        rest = [(k, v) for k, v in self._now.items() if type(v) not in _NUMBERS and k not in INTERNAL]
        self._versions = {key: version_of(value) for key, value in rest if isinstance(value, Tensor)}
        containers = ((key, value) for key, value in rest if isinstance(value, list | dict | set))
        self._inside = {key: copy.deepcopy(value) for key, value in containers if _is_of_numbers(value)}

    def rewind(self, device: torch.device) -> None:
        """Before a microbatch, let attributes in which the one before has put tensors be as it found them.

        A tensor that it found is unknown: it is of a microbatch, and one process would have it of the batch before.
        """
        for key, start in self._start.items():
            put = start
            if isinstance(start, Tensor):
                put = Placeholder.like(start, f"{self._name}.{key} of another microbatch", device)
            self._put[key] = put
            if put is _MISSING:
                self._of.pop(key, None)
            else:
                self._of[key] = put

    def unwind(self) -> None:
        """After it, let those that it has not set be as the one before had left them."""
        for key, put in self._put.items():
            if self._of.get(key, _MISSING) is put:
                self._of[key] = self._now[key]
        self._put.clear()

    def look(self, again: bool) -> None:
        """Compare with the microbatch before; ``again``: whether that had as many samples."""
        of, now = self._of, self._now
        if len(of) == len(now) and all(map(is_, of.values(), now.values())) and not self._changed_in_place():
            return
        for key, value in list(of.items()):
            old = now.get(key, _MISSING)
            if isinstance(value, Tensor) and old is not value:
                self._start.setdefault(key, old)
            elif again and old is not value and _is_of_numbers(value) and old != value:
                raise self._refused(key)
        changed = self._changed_in_place()
        if changed and (again or changed in self._versions):
            raise self._refused(changed)
        self._keep()

    def _changed_in_place(self) -> str | None:
        """Return the name of an attribute that is the same object with another content."""
        for key, version in self._versions.items():
            if self._of.get(key) is self._now[key] and version_of(self._now[key]) != version:
                return key
        for key, inside in self._inside.items():
            if self._of.get(key) is self._now[key] and self._now[key] != inside:
                return key
        return None

    def _refused(self, key: str) -> UnsupportedCodeError:
        return UnsupportedCodeError(
            f"{self._name}.{key} is an attribute that changes with every call of its module, which sees microbatches, "
            "not batches. Count in a hook, such as on_train_batch_start, or use pipeline_microbatches=1."
        )


@contextmanager
def results_as_placeholders(layers: Mapping[str, nn.Module], device: torch.device) -> Iterator[None]:
    """Inside, what layers left in their attributes of the last microbatch, such as losses of their own, is unknown."""
    left = {
        (part, name, f"{fqn}.{name}"): value
        for prefix, layer in layers.items()
        for fqn, part in layer.named_modules(prefix=prefix)
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    }
    for (part, name, fqn), value in left.items():
        vars(part)[name] = Placeholder.like(value, f"{fqn} of the whole batch", device)
    try:
        yield
    finally:
        for (part, name, _), value in left.items():
            vars(part)[name] = value


def _is_of_numbers(value: Any) -> bool:
    """Return whether a value is a number or a text, or a small container of those."""
    if isinstance(value, _NUMBERS):
        return True
    if not isinstance(value, list | tuple | dict | set) or len(value) > MOST_ITEMS:
        return False
    return all(map(_is_of_numbers, value.values() if isinstance(value, dict) else value))
