"""Refuse layers that carry state in attributes from one microbatch to the next, where one process would see a batch.

Buffers aside, a forward may set attributes of its module. Allowed are tables that it computes once, and sizes. Refused
are values that change with every microbatch: counters, averages of activations, and tensors that are set anew, such as
losses to be read later. Only users' classes are checked: forwards of torch's modules set no attributes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_shardckpt.compat.torch_tensors import version_of
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.attribute_owners import INTERNAL, MAX_ITEMS

_MISSING: Any = object()
_NUMBERS = (bool, int, float, complex, str, bytes, type(None))


class LayerAttributes:
    """The attributes of modules that see microbatches, during one training step.

    Args:
        modules: by name, with the stages that call them.
        sizes: the number of samples of each microbatch.
    """

    def __init__(self, modules: Mapping[str, tuple[nn.Module, frozenset[int]]], sizes: Sequence[int]) -> None:
        self._modules, self._sizes = modules, sizes
        self._attributes: dict[int, list[_Attributes]] = {}  # by stage
        self._latest: dict[int, int] = {}  # microbatch, by stage

    @contextmanager
    def watch(self, stage: int, microbatch: int) -> Iterator[None]:
        """Check the attributes around the forward of a stage on a microbatch.

        Raises:
            UnsupportedCodeError: for an attribute that depends on earlier microbatches.
        """
        latest = self._latest.get(stage)
        if latest is None:
            modules = [(name, module) for name, (module, stages) in self._modules.items() if stage in stages]
            self._attributes[stage] = [_Attributes(name, module) for name, module in modules]
        yield
        same_size = latest is not None and self._sizes[latest] == self._sizes[microbatch]
        for attributes in self._attributes[stage]:
            attributes.compare(is_first=latest is None, same_size=same_size)
        self._latest[stage] = microbatch


class _Attributes:
    """The attributes of one module after the latest microbatch, or at the start of the step."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._live = name, vars(module)
        self._save()

    def _save(self) -> None:
        self._saved = dict(self._live)
        rest = [(k, v) for k, v in self._saved.items() if type(v) not in _NUMBERS and k not in INTERNAL]
        self._versions = {key: version_of(value) for key, value in rest if isinstance(value, Tensor)}
        containers = ((key, value) for key, value in rest if isinstance(value, list | dict | set))
        self._contents = {key: copy.deepcopy(value) for key, value in containers if _is_of_numbers(value)}

    def compare(self, *, is_first: bool, same_size: bool) -> None:
        """Compare with the previous microbatch; ``same_size`` if both have the same number of samples."""
        live, saved = self._live, self._saved
        if len(live) == len(saved) and all(map(is_, live.values(), saved.values())) and not self._changed_in_place():
            return
        for key, value in live.items():
            old = saved.get(key, _MISSING)
            if old is value:
                continue
            is_result = isinstance(value, Tensor) and (not is_first or value.requires_grad)
            if is_result or (same_size and _is_of_numbers(value) and old != value):
                raise self._error(key)
        changed = self._changed_in_place()
        if changed and (same_size or changed in self._versions):
            raise self._error(changed)
        self._save()

    def _changed_in_place(self) -> str | None:
        """Return the name of an attribute that is the same object with another content."""
        for key, version in self._versions.items():
            if self._live.get(key) is self._saved[key] and version_of(self._saved[key]) != version:
                return key
        for key, content in self._contents.items():
            if self._live.get(key) is self._saved[key] and self._saved[key] != content:
                return key
        return None

    def _error(self, key: str) -> UnsupportedCodeError:
        return UnsupportedCodeError(
            f"{self._name}.{key} is an attribute that changes with every call of its module, which sees microbatches, "
            "not batches. Count in a hook, such as on_train_batch_start, return tensors from the forward, or use "
            "pipeline_microbatches=1."
        )


def _is_of_numbers(value: Any) -> bool:
    """Return True for a number, a string, or a small container of them."""
    if isinstance(value, _NUMBERS):
        return True
    if not isinstance(value, list | tuple | dict | set) or len(value) > MAX_ITEMS:
        return False
    return all(map(_is_of_numbers, value.values() if isinstance(value, dict) else value))
