"""Gathered parameters in the forward of a unit, after it, and for several passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, ClassVar, Self
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import in_backward
from lightning_shardckpt.compat.torch_tensors import (
    NO_TORCH_FUNCTION,
    keep_version,
    mark_as_parameter,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.operations import handler_of, run_elementwise, run_gathered, wrap_hook
from lightning_shardckpt.parallel.tensors.placement import describe
from lightning_shardckpt.parallel.tensors.sharded import TAKES_PRECEDENCE, Function, ShardedTensor, map_nested
from lightning_shardckpt.parallel.tensors.values import absent_gradient

_data: Any = Tensor.data
_grad: Any = Tensor.grad
_requires_grad: Any = Tensor.requires_grad
_OWN = ("_leaf", "_compiled", "_touched", "_views", "_is_param")  # attributes that are not those of the sharded one


class _StandsForLeaf:
    """Gives a gathered parameter the gradients, hooks and attributes of the sharded one."""

    __slots__ = ()
    __dict__: dict[str, Any]

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the parameter, from earlier backward passes."""
        return None if "_compiled" in self.__dict__ else leaf_of(self).grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        leaf_of(self).grad = value

    @property
    def requires_grad(self) -> bool:
        """Whether this forward records operations on the parameter."""
        return _requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value == leaf_of(self).requires_grad:
            return
        if value:
            raise UnsupportedCodeError(
                f"a forward sets requires_grad=True on its own parameter of shape {tuple(leaf_of(self).shape)}, which "
                "was gathered without gradients for this forward. Set requires_grad before the module is called."
            )
        leaf_of(self).requires_grad = False
        Tensor.detach_(self)  # type: ignore[arg-type]  # it is one

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Set ``requires_grad`` of the parameter, also for the rest of this forward."""
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register a hook on the sharded parameter; it gets the gradient of all batches."""
        return leaf_of(self).register_hook(hook)  # type: ignore[no-any-return]  # of a Tensor

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook on the sharded parameter."""
        return leaf_of(self).register_post_accumulate_grad_hook(hook)  # type: ignore[no-any-return]  # of a Tensor

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return deepcopy(leaf_of(self), memo)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that was set on the sharded parameter."""
        attributes = vars(leaf_of(self))
        if name not in attributes:
            raise AttributeError(f"a parameter has no attribute {name!r}")
        return attributes[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            leaf_of(self).__dict__[name] = value

    def __delattr__(self, name: str) -> None:
        leaf_of(self).__dict__.pop(name)


class GatheredCopy(_StandsForLeaf, Tensor):
    """A gathered parameter in the forward of a unit: an ordinary tensor that records uses of ``data``."""

    __torch_function__: Any = NO_TORCH_FUNCTION

    @property
    def data(self) -> Tensor:
        """The values, over the same memory."""
        self._touched = True
        return self._record(_data.__get__(self))

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy the values: other tensors share the memory."""
        _refuse_conversion(self, value)
        if value is not self:  # as module.to() assigns where nothing changes
            with torch.no_grad():
                self.copy_(value)

    def detach(self) -> Tensor:
        """Return a detached view."""
        return self._record(super().detach())

    def _record(self, view: Tensor) -> Tensor:
        self.__dict__.setdefault("_views", []).append(ref(view))
        return view


class _Part:
    """A parameter that a tensor-parallel plan shards, in the forward of a unit, which must not change it."""

    __slots__ = ()
    __dict__: dict[str, Any]
    __torch_function__: Any = NO_TORCH_FUNCTION

    @property
    def data(self) -> Any:
        """The values, over the same memory."""
        self.__dict__["_touched"] = True
        return _data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        _refuse_conversion(self, value)  # type: ignore[arg-type]  # it is a Tensor
        self.__dict__["_touched"] = True


class GatheredPart(_Part, _StandsForLeaf, DTensor):
    """A part that is gathered over the data axes."""

    __slots__: list[str] = []


class PartInForward(_Part, ShardedTensor):
    """A parameter that is no more than a part: it computes as torch's DTensor."""

    __slots__: list[str] = []

    def register_hook(self, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        """Register a hook that gets the gradient as a sharded tensor."""
        return super().register_hook(wrap_hook(hook, after=False))  # type: ignore[no-any-return, no-untyped-call]  # torch's

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> RemovableHandle:
        """Register a hook that is called with the parameter."""
        return super().register_post_accumulate_grad_hook(wrap_hook(hook, after=True))  # type: ignore[no-any-return, no-untyped-call]  # torch's


def _refuse_conversion(whole: Tensor, value: Tensor) -> None:
    if value.dtype != whole.dtype or value.shape != whole.shape:
        raise UnsupportedCodeError(
            f"a forward converts {describe(leaf_of(whole))} from {whole.dtype} to {value.dtype}, or changes its shape. "
            "Do so before the module is called, as in on_fit_start, or leave that module whole: "
            "ShardedStrategy(fsdp=FSDP(ignored=[…]))."
        )


class _Outlives(_StandsForLeaf):
    """A gathered parameter that user code keeps after the forward: functions run on the sharded one instead."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = map_nested((tuple(args), kwargs or {}), resolve_outliving)
        if in_backward() and handler_of(func) is run_elementwise:  # autograd unpacks it from other hooks
            return run_gathered(func, tuple(args), kwargs)
        return func(*args, **kwargs)

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter requires a gradient."""
        return leaf_of(self).requires_grad  # type: ignore[no-any-return]  # of a Tensor

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        leaf_of(self).requires_grad = value

    def __hash__(self) -> int:
        raise UnsupportedCodeError(
            f"a parameter of shape {tuple(leaf_of(self).shape)}, which a forward kept or returned in an object, is "
            "used as a key, in a set or in an optimizer. Take it from the module there (module.weight)."
        )


class OutlivingCopy(_Outlives, Tensor):
    """A `GatheredCopy` after its forward."""


class OutlivingPart(_Outlives, DTensor):
    """A `GatheredPart` after its forward."""

    __slots__: list[str] = []


TAKES_PRECEDENCE.update((OutlivingCopy, OutlivingPart))
AFTER_FORWARD: dict[type, type] = {
    GatheredCopy: OutlivingCopy,
    GatheredPart: OutlivingPart,
    PartInForward: ShardedTensor,
}
IN_FORWARD = {after: within for within, after in AFTER_FORWARD.items()}


def switch_classes(wholes: Sequence[Tensor], classes: dict[type, type]) -> None:
    """Let functions run on gathered parameters (`IN_FORWARD`), or on the sharded ones instead (`AFTER_FORWARD`)."""
    for whole in wholes:
        if type(whole) in classes:
            whole.__class__ = classes[type(whole)]
        whole.__dict__.pop("_touched", None)


def resolve_outliving(value: Any) -> Any:
    """Return the sharded parameter for a gathered one whose forward has ended, and any other value itself."""
    return leaf_of(value) if isinstance(value, _Outlives) else value


def leaf_of(whole: Any) -> Any:
    """Return the sharded parameter for a gathered one, and any other tensor itself."""
    return whole.__dict__.get("_leaf", whole)


class KeptGathers:
    """Parameters that are gathered once for several passes, such as those of microbatches.

    The passes use copies that are leaves of autograd and accumulate the gradients, which `reduce` reduces.
    """

    current: ClassVar[KeptGathers | None] = None

    def __init__(self) -> None:
        self._gathered: dict[tuple[int, ...], tuple[list[Tensor], list[Tensor]]] = {}
        self._requires_grad = False

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside, units take their parameters from here; gradients must be enabled if the passes need them."""
        before, KeptGathers.current = KeptGathers.current, self
        self._requires_grad = torch.is_grad_enabled()
        try:
            yield
        finally:
            KeptGathers.current = before

    def take(self, key: tuple[int, ...], gather: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Return the gathered copies for ``key``. The first pass that asks for them gets them from ``gather``."""
        if key not in self._gathered:
            with torch.set_grad_enabled(self._requires_grad):
                wholes = gather()
            copies = [as_gathered(w.detach().requires_grad_(leaf_of(w).requires_grad), leaf_of(w)) for w in wholes]
            self._gathered[key] = wholes, copies
        return self._gathered[key][1]

    def reduce(self) -> None:
        """Reduce the gradients of all passes. Collective: every rank that has a shard must call it."""
        gathered, self._gathered = self._gathered, {}
        wholes, gradients = [], []
        for whole, copy in [pair for kept in gathered.values() for pair in zip(*kept, strict=True)]:
            if not whole.requires_grad:
                continue
            with without_torch_function():
                gradient = _grad.__get__(copy)
            if isinstance(gradient, DTensor) and not isinstance(whole, DTensor):  # a backward has reduced it already
                raise UnsupportedCodeError(
                    "a custom autograd function of a layer runs a module in its backward, and returns gradients for "
                    f"parameters that were its arguments, here of {describe(leaf_of(whole))}, which a pipeline reduces "
                    "twice. Don't pass the parameters, and call torch.autograd.backward, or use torch.utils.checkpoint."
                )
            wholes.append(whole)
            gradients.append(absent_gradient(whole) if gradient is None else gradient)
        if wholes:
            torch.autograd.backward(wholes, gradients)


def as_gathered(whole: Tensor, leaf: Tensor) -> Tensor:
    """Turn a gathered tensor into a parameter that stands for ``leaf``, in place, and return it."""
    mark_as_parameter(whole)
    whole.__dict__["_leaf"] = leaf
    if type(whole) in (Tensor, DTensor):
        whole.__class__ = GatheredCopy if type(whole) is Tensor else GatheredPart
    return whole


def values_of(whole: Tensor) -> Tensor:
    """Return the ``data`` of a gathered parameter without a record."""
    return _data.__get__(whole)  # type: ignore[no-any-return]  # a Tensor


def traces_of(whole: Tensor) -> tuple[bool, list[ref[Tensor]]]:
    """Return whether ``data`` was read, through which changes keep the version, and the recorded detached views."""
    attributes = vars(whole)
    return attributes.get("_touched", False), attributes.get("_views", [])


def copy_memory(references: Sequence[ref[Tensor]]) -> None:
    """Move gathered parameters that outlive a forward, and their detached views, to new memory."""
    with torch.no_grad(), without_torch_function():
        for whole in [whole for reference in references if (whole := reference()) is not None]:
            shared = local_tensor(values_of(whole))
            memory = shared.clone().untyped_storage()
            views = [view for reference in traces_of(whole)[1] if (view := reference()) is not None]
            for tensor in (local_tensor(whole), *views):
                if tensor.untyped_storage().data_ptr() == shared.untyped_storage().data_ptr():
                    with keep_version(tensor):
                        tensor.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())
