"""Whole parameters in the forward of a unit, and those that are kept for several passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.tensor_subclass import NO_TORCH_FUNCTION, mark_as_parameter
from lightning_shardckpt.parallel.tensors.gather import is_gathered, no_gradient

_data: Any = Tensor.data


class GatheredCopy(Tensor):
    """A whole parameter in the forward of a unit: an ordinary tensor, but changes through ``data`` are noticed."""

    __torch_function__: Any = NO_TORCH_FUNCTION

    @property
    def data(self) -> Tensor:
        """The values, over the same memory."""
        self._touched = True
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copies, since others have the memory."""
        with torch.no_grad():
            self.copy_(value)


class GatheredPart(DTensor):
    """A gathered parameter whose tensor-parallel plan shards it; `_keep_change` refuses changes."""

    __slots__: list[str] = []
    __torch_function__: Any = NO_TORCH_FUNCTION

    @property
    def data(self) -> Tensor:
        """The values, over the same memory."""
        self.__dict__["_touched"] = True
        return _data.__get__(self)  # type: ignore[no-any-return]

    @data.setter
    def data(self, value: Tensor) -> None:
        self.__dict__["_touched"] = True


class KeptGathers:
    """Parameters that are gathered once for many passes over the same modules, such as those of microbatches.

    The passes see copies that are leaves of autograd: their gradients accumulate there, and are reduced by `reduce`.
    """

    current: ClassVar[KeptGathers | None] = None

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[Tensor], list[Tensor]]] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, units take their parameters from here."""
        before, KeptGathers.current = KeptGathers.current, self
        try:
            yield
        finally:
            KeptGathers.current = before

    def take(self, module: nn.Module, gather: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The copies for a module; made by ``gather`` for the first pass."""
        found = self._found.get(id(module))
        if found is None:
            with torch.enable_grad():
                wholes = gather()
            copies = [as_gathered(whole.detach().requires_grad_(whole.requires_grad)) for whole in wholes]
            found = self._found[id(module)] = wholes, copies
        return found[1]

    def reduce(self) -> None:
        """Give the gradients of all passes to the sharded parameters. Collective: every rank that has a shard."""
        found, self._found = self._found, {}
        for wholes, copies in found.values():
            heads = [(whole, copy) for whole, copy in zip(wholes, copies, strict=True) if whole.requires_grad]
            given = [
                (whole, no_gradient(whole) if copy.grad is None else copy.grad)
                for whole, copy in heads
                if copy.grad is not None or is_gathered(whole)
            ]
            if given:
                torch.autograd.backward([whole for whole, _ in given], [gradient for _, gradient in given])


def as_gathered(whole: Tensor) -> Tensor:
    """The gathered tensor itself, as a parameter from now on whose changes through ``data`` are noticed."""
    if type(whole) is Tensor:
        whole.__class__ = GatheredCopy
    elif type(whole) is DTensor:
        whole.__class__ = GatheredPart
    mark_as_parameter(whole)
    return whole


def values_of(whole: Tensor) -> Tensor:
    """The values of a gathered parameter, over the same memory; reading them so is no change."""
    return _data.__get__(whole)  # type: ignore[no-any-return]  # a Tensor


def was_assigned(whole: Tensor) -> bool:
    """Return whether ``data`` of a gathered parameter was used, by which changes of it go unseen."""
    return vars(whole).get("_touched", False)  # type: ignore[no-any-return]  # a bool
