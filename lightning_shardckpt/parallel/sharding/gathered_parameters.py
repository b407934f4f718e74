"""Whole parameters in the forward of a unit, and those that are kept for several passes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.torch_autograd import in_backward
from lightning_shardckpt.compat.torch_tensors import NO_TORCH_FUNCTION, mark_as_parameter, without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gather import absent_gradient
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of
from lightning_shardckpt.parallel.tensors.sharded import TAKES_PRECEDENCE, Function, map_nested
from lightning_shardckpt.parallel.tensors.views import run_gathered

_data: Any = Tensor.data
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_OWN = ("_leaf", "_compiled", "_touched", "_views", "_is_param")
"""What the dict of a whole parameter has for itself."""


class _StandsForLeaf:
    """What a parameter is besides its values: gradients, hooks and attributes are those of the sharded one."""

    __slots__ = ()
    __dict__: dict[str, Any]

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the parameter, from earlier backward passes."""
        if "_compiled" in self.__dict__:
            return None
        return leaf_of(self).grad  # type: ignore[no-any-return]  # of a Tensor

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        leaf_of(self).grad = value

    @property
    def requires_grad(self) -> bool:
        """Whether this takes part in a backward."""
        return _requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value == leaf_of(self).requires_grad:
            return
        if value:
            raise UnsupportedCodeError(
                f"a forward thaws its own parameter of shape {tuple(leaf_of(self).shape)}, which was gathered without "
                "a gradient for this forward. Set requires_grad before the module is called."
            )
        leaf_of(self).requires_grad = False
        Tensor.detach_(self)  # type: ignore[arg-type]  # it is one

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze the parameter, also for the rest of this forward."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register a hook of the parameter, which gets the gradient of all batches."""
        return leaf_of(self).register_hook(hook)  # type: ignore[no-any-return]  # of a Tensor

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook of the parameter."""
        return leaf_of(self).register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return]  # of a Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(leaf_of(self), memo)

    def __getattr__(self, name: str) -> Any:
        """An attribute that somebody has given to the parameter."""
        leaf = self.__dict__.get("_leaf")
        if leaf is None or name not in leaf.__dict__:
            raise AttributeError(f"a parameter has no attribute {name!r}")
        return leaf.__dict__[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            leaf_of(self).__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        leaf_of(self).__dict__.pop(name)


class GatheredCopy(_StandsForLeaf, Tensor):
    """A whole parameter in the forward of a unit: an ordinary tensor, but changes through ``data`` are noticed."""

    __torch_function__: Any = NO_TORCH_FUNCTION

    @property
    def data(self) -> Tensor:
        """The values, over the same memory."""
        self._touched = True
        return self._noted(_data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copies, since others have the memory."""
        with torch.no_grad():
            self.copy_(value)

    def detach(self) -> Tensor:
        """The values without history, over the same memory."""
        return self._noted(super().detach())

    def _noted(self, view: Tensor) -> Tensor:
        self.__dict__.setdefault("_views", []).append(ref(view))
        return view


class GatheredPart(_StandsForLeaf, DTensor):
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


class _Outlives(_StandsForLeaf):
    """A gathered parameter that user code keeps after the forward: functions of it are functions of the sharded one."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(map_nested(tuple(args), sharded_for)), map_nested(kwargs or {}, sharded_for)
        if in_backward() and kind_of(func) is Kind.ELEMENTWISE:  # for autograd, from hooks that saved it
            return run_gathered(func, args, kwargs)
        return func(*args, **kwargs)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter takes part in a backward."""
        return leaf_of(self).requires_grad  # type: ignore[no-any-return]  # of a Tensor

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        leaf_of(self).requires_grad = value

    def __hash__(self) -> int:
        raise UnsupportedCodeError(
            f"a parameter of shape {tuple(leaf_of(self).shape)}, which a forward kept or returned in an object, is a "
            "key, in a set or in an optimizer: there it is another tensor than the module's. Take it from the module "
            "(module.weight)."
        )


class OutlivingCopy(_Outlives, Tensor):
    """See `_Outlives`; was a `GatheredCopy`."""


class OutlivingPart(_Outlives, DTensor):
    """See `_Outlives`; was a `GatheredPart`."""

    __slots__: list[str] = []


TAKES_PRECEDENCE.update((OutlivingCopy, OutlivingPart))
_AFTER_FORWARD: dict[type, type] = {GatheredCopy: OutlivingCopy, GatheredPart: OutlivingPart}
_IN_FORWARD = {after: within for within, after in _AFTER_FORWARD.items()}


def begin_forward(wholes: Sequence[Tensor]) -> None:
    """Let gathered parameters be tensors of their own; those that are kept for several passes were not meanwhile."""
    for whole in wholes:
        whole.__class__ = _IN_FORWARD.get(type(whole), type(whole))


def end_forward(wholes: Sequence[Tensor]) -> None:
    """Let gathered parameters, where user code still has them, be the sharded ones from now on."""
    for whole in wholes:
        whole.__class__ = _AFTER_FORWARD.get(type(whole), type(whole))


def sharded_for(value: Any) -> Any:
    """Return the parameter for one that was gathered for a forward that is over, and anything else itself."""
    return leaf_of(value) if isinstance(value, _Outlives) else value


def leaf_of(whole: Any) -> Any:
    """Return the parameter that a gathered one stands for, and any other tensor itself."""
    return whole.__dict__.get("_leaf", whole)


class KeptGathers:
    """Parameters that are gathered once for many passes over the same modules, such as those of microbatches.

    The passes see copies that are leaves of autograd: their gradients accumulate there, and are reduced by `reduce`.
    """

    current: ClassVar[KeptGathers | None] = None

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._with_history = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, units take their parameters from here. If gradients are enabled, those have history."""
        before, KeptGathers.current = KeptGathers.current, self
        self._with_history = torch.is_grad_enabled()
        try:
            yield
        finally:
            KeptGathers.current = before

    def take(self, module: nn.Module, gather: Callable[[], list[Tensor]]) -> list[Tensor]:
        """The copies for a module; made by ``gather`` for the first pass."""
        found = self._found.get(id(module))
        if found is None:
            with torch.set_grad_enabled(self._with_history):
                wholes = gather()
            copies = [as_gathered(w.detach().requires_grad_(leaf_of(w).requires_grad), leaf_of(w)) for w in wholes]
            found = self._found[id(module)] = wholes, copies
        return found[1]

    def reduce(self) -> None:
        """Give the gradients of all passes to the sharded parameters. Collective: every rank that has a shard."""
        found, self._found = self._found, {}
        wholes, gradients = [], []
        for several in found.values():
            for whole, copy in zip(*several, strict=True):
                if whole.requires_grad:
                    with without_torch_function():
                        gradient = _grad.__get__(copy)
                    wholes.append(whole)
                    gradients.append(absent_gradient(whole) if gradient is None else gradient)
        if wholes:
            torch.autograd.backward(wholes, gradients)


def as_gathered(whole: Tensor, leaf: Tensor) -> Tensor:
    """The gathered tensor itself, as a parameter from now on that stands for ``leaf``."""
    whole.__dict__["_leaf"] = leaf
    if type(whole) is Tensor:
        whole.__class__ = GatheredCopy
    elif type(whole) is DTensor:
        whole.__class__ = GatheredPart
    mark_as_parameter(whole)
    return whole


def show_to_compiler(wholes: Iterable[Tensor]) -> None:
    """Let gathered parameters show no gradient: torch.compile looks at it, and cannot trace a sharded one."""
    for whole in wholes:
        whole.__dict__["_compiled"] = True


def values_of(whole: Tensor) -> Tensor:
    """The values of a gathered parameter, over the same memory; reading them so is no change."""
    return _data.__get__(whole)  # type: ignore[no-any-return]  # a Tensor


def views_of(whole: Tensor) -> list[ref[Tensor]]:
    """What was taken of a gathered parameter without history, over the same memory."""
    return vars(whole).get("_views", [])  # type: ignore[no-any-return]  # as `GatheredCopy` makes it


def was_assigned(whole: Tensor) -> bool:
    """Return whether ``data`` of a gathered parameter was used, by which changes of it go unseen."""
    return vars(whole).get("_touched", False)  # type: ignore[no-any-return]  # a bool
