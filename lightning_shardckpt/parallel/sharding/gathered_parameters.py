"""Whole parameters in the forward of a unit, and those that are kept for several passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.tensor_subclass import NO_TORCH_FUNCTION, mark_as_parameter
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.tensors.gather import is_gathered, no_gradient

_data: Any = Tensor.data
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad


class _Gathered(Tensor):
    """What is asked of a gathered parameter, besides its values, is asked of the sharded one, which stays."""

    __torch_function__: Any = NO_TORCH_FUNCTION
    __slots__: list[str] = []

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the parameter."""
        return _leaf_of(self).grad  # type: ignore[no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _leaf_of(self).grad = value

    @property
    def requires_grad(self) -> bool:
        """True if the forward makes a gradient."""
        return _requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Raise TopologyError, unless it is so already."""
        if bool(requires_grad) != _leaf_of(self).requires_grad:
            raise TopologyError(
                f"a forward changes requires_grad of its own parameter, of shape {tuple(self.shape)}, while that is "
                "gathered. Change it before, such as in on_train_batch_start."
            )
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register a hook of the parameter's gradient."""
        return _leaf_of(self).register_hook(hook)  # type: ignore[no-any-return]

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook that runs when the parameter's gradient was accumulated."""
        return _leaf_of(self).register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that somebody has given to the parameter."""
        attributes = vars(_leaf_of(self))
        if name not in attributes:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return attributes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or hasattr(type(self), name)
        super().__setattr__(name, value) if own else vars(_leaf_of(self)).update({name: value})


class GatheredCopy(_Gathered):
    """A whole parameter in the forward of a unit: an ordinary tensor, but changes through ``data`` are noticed."""

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


class GatheredPart(_Gathered, DTensor):
    """A gathered parameter whose tensor-parallel plan shards it; `_keep_change` refuses changes."""

    __slots__: list[str] = []

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

    def take(
        self, module: nn.Module, leaves: Sequence[Tensor], gather: Callable[[], list[Tensor]]
    ) -> list[Tensor]:
        """The copies of the parameters of a module; made by ``gather`` for the first pass."""
        found = self._found.get(id(module))
        if found is None:
            with torch.enable_grad():
                wholes = gather()
            copies = [
                as_gathered(whole.detach().requires_grad_(whole.requires_grad), leaf)
                for whole, leaf in zip(wholes, leaves, strict=True)
            ]
            found = self._found[id(module)] = wholes, copies
        return found[1]

    def reduce(self) -> None:
        """Give the gradients of all passes to the sharded parameters. Collective: every rank that has a shard."""
        found, self._found = self._found, {}
        for wholes, copies in found.values():
            heads = [(w, _grad.__get__(copy)) for w, copy in zip(wholes, copies, strict=True) if w.requires_grad]
            given = [
                (whole, no_gradient(whole) if gradient is None else gradient)
                for whole, gradient in heads
                if gradient is not None or is_gathered(whole)
            ]
            if given:
                torch.autograd.backward([whole for whole, _ in given], [gradient for _, gradient in given])


def as_gathered(whole: Tensor, leaf: Tensor) -> Tensor:
    """The gathered tensor itself, which from now on stands for the parameter ``leaf``."""
    whole.__dict__["_leaf"] = leaf
    if type(whole) is Tensor:
        whole.__class__ = GatheredCopy
    elif type(whole) is DTensor:
        whole.__class__ = GatheredPart
    mark_as_parameter(whole)
    return whole


def _leaf_of(whole: Tensor) -> Any:
    return whole.__dict__["_leaf"]


def values_of(whole: Tensor) -> Tensor:
    """The values of a gathered parameter, over the same memory; reading them so is no change."""
    return _data.__get__(whole)  # type: ignore[no-any-return]  # a Tensor


def was_assigned(whole: Tensor) -> bool:
    """Return whether ``data`` of a gathered parameter was used, by which changes of it go unseen."""
    return vars(whole).get("_touched", False)  # type: ignore[no-any-return]  # a bool
