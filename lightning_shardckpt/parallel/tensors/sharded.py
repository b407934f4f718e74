"""A DTensor that behaves like the whole tensor: parameters, their gradients, optimizer state.

torch's DTensor refuses operations with plain tensors, returns the norm of a shard as the norm of the tensor, and loses
assignments to ``data``. In contrast:

* An operation runs on the gathered tensor, through autograd, and returns a plain tensor.
* An elementwise operation on tensors with the same sharding runs on the shards, without communication, unless autograd
  records it.
* An in-place operation, also on a view, changes the shards. All ranks must write the same values.
* Random values are the same on all ranks.

All ranks must therefore run the same operations in the same order; ``placement.Peers`` detects when they don't.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import (
    DTensorSpec,
    TensorMeta,
    local_tensor,
    new_dtensor,
    replace_local,
    shape_of,
    spec_of,
)
from lightning_shardckpt.compat.torch_tensors import mark_as_parameter, without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.gathered_weights import cast_arguments
from lightning_shardckpt.parallel.tensors.placement import (
    ASSIGNMENTS,
    DATA_AXES,
    NAME,
    describe,
    local_part,
    sharding_of,
)
from lightning_shardckpt.parallel.tensors.values import RECEIVER, check_equal_on_ranks, gather_whole

Function = Callable[..., Any]
Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
TAKES_PRECEDENCE = set[type]()
"""Classes whose ``__torch_function__`` is called before the one of sharded tensors."""
_data: Any = Tensor.data
_grad: Any = Tensor.grad


class ShardedTensor(DTensor):
    """A DTensor that behaves like the whole tensor, as the module's docstring says. Made by `as_sharded`."""

    __slots__: list[str] = []
    _find_handler: ClassVar[Callable[[Function], Handler]]
    """Returns the implementation of a function of torch for sharded tensors; `operations` sets it."""

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not TAKES_PRECEDENCE.isdisjoint(types):
            return NotImplemented
        kwargs = kwargs or {}
        if not args and "tensor" in kwargs:  # as torch.nn.init passes it
            args, kwargs = (kwargs["tensor"],), {k: v for k, v in kwargs.items() if k != "tensor"}
        if (cast := cast_arguments(func, args, kwargs)) is not None:
            return func(*cast[0], **cast[1])
        return cls._find_handler(func)(func, tuple(args), kwargs)

    @property
    def data(self) -> ShardedTensor:
        """The detached tensor, over the same memory."""
        with without_torch_function():
            return new_like(self, local_tensor(self).detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        """Replace the memory: by ``value``'s own if it has the same sharding, else by a copy of this rank's rows."""
        with without_torch_function():
            if value.shape != self.shape:
                raise UnsupportedCodeError(
                    f"a tensor of shape {tuple(value.shape)} was assigned to the data of a sharded one of shape "
                    f"{tuple(self.shape)}; a sharded tensor keeps its shape"
                )
            new = new_like(self, rows_like(value, self, "an assignment to data").detach())
            _data.__set__(self, new)
            replace_local(self, new)
            self.__dict__[ASSIGNMENTS] = self.__dict__.get(ASSIGNMENTS, 0) + 1

    @property
    def grad(self) -> Tensor | None:
        """The gradient, averaged over all batches."""
        with without_torch_function():
            gradient: Any = _grad.__get__(self)
        if type(gradient) is DTensor:  # made by autograd
            gradient = self._name_gradient(as_sharded(gradient))
        return gradient  # type: ignore[no-any-return]  # sharded, or None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with without_torch_function():
            if value is not None and not is_alike(value, self):
                if value.shape != self.shape:
                    raise RuntimeError(
                        f"assigned grad has data of a different size: {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(self.shape)}"
                    )
                value = new_like(self, rows_like(value, self, "an assignment to grad").clone())
            _grad.__set__(self, value if value is None else self._name_gradient(value))

    def _name_gradient(self, gradient: Tensor) -> Tensor:
        if NAME in self.__dict__:
            gradient.__dict__[NAME] = f"the gradient of {self.__dict__[NAME]}"
        return gradient

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Take the memory of another tensor of this shape, as parametrizations do; torch does not dispatch ``set_``."""
        if not isinstance(source, Tensor) or args or kwargs:
            raise UnsupportedCodeError(
                f"set_ replaces the memory of a sharded tensor of shape {tuple(self.shape)}, and this rank has only "
                "some of its rows. Pass a tensor of the same shape, without offset or strides, or copy_ the values."
            )
        if source is not self:
            self.data = source
        return self

    @property
    def __tensor_flatten__(self) -> Any:
        """Absent, so that ``module.to()`` assigns to ``data``: torch can't swap a tensor with weak references."""
        raise AttributeError("a sharded tensor can't be flattened into plain tensors")

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return all elements, as a plain tensor. Collective: every rank that has a shard must call it."""
        with without_torch_function():
            return gather_whole(self, "full_tensor")

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's rows, for parameters of torch's engine only if autograd does not record their use."""
        if torch.is_grad_enabled() and self.requires_grad and RECEIVER in self.__dict__:
            raise UnsupportedCodeError(
                f"to_local() of {describe(self)} gives the rows of one rank, whose gradient no engine reduces. Use the "
                "parameter itself, full_tensor(), or torch.no_grad()."
            )
        return super().to_local(grad_placements=grad_placements)

    def _with(self, local: Tensor) -> ShardedTensor:
        """Return a leaf like this one over other memory."""
        with without_torch_function(), torch.no_grad():
            leaf: Any = new_like(self, local).requires_grad_(self.requires_grad)
        if isinstance(self, nn.Parameter):
            mark_as_parameter(leaf)
        return leaf  # type: ignore[no-any-return]  # it is one

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = copied = self._with(local_tensor(self).detach().clone())
            if self.grad is not None:
                copied.grad = self.grad.detach().clone()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        warnings.warn(
            "a sharded tensor is being pickled: the file will have only the rows of this rank. To save whole tensors, "
            "call lightning_shardckpt.full_state_dict(module) on all ranks and save the result, or consolidate a "
            "checkpoint.",
            stacklevel=2,
        )
        alias: Any = self._with(local_tensor(self))
        alias.__dict__.update((name, value) for name, value in self.__dict__.items() if name != RECEIVER)
        alias.__class__ = DTensor  # as torch pickles it
        with without_torch_function():
            return DTensor.__reduce_ex__(alias, protocol)  # type: ignore[no-untyped-call]  # torch's

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={spec_of(self).placements}, "
            f"rows of this rank={local_tensor(self)})"
        )


def as_sharded(tensor: Tensor) -> ShardedTensor:
    """Turn a DTensor into a ShardedTensor in place, and return it."""
    if type(tensor) is DTensor:
        tensor.__class__ = ShardedTensor  # it has the same slots
    assert isinstance(tensor, ShardedTensor)
    return tensor


def new_like(tensor: DTensor, local: Tensor) -> ShardedTensor:
    """Return a tensor with the sharding of ``tensor``, and ``local`` as this rank's rows."""
    spec = spec_of(tensor)
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    made = as_sharded(new_dtensor(local, spec))
    if (name := tensor.__dict__.get(NAME)) is not None:
        made.__dict__[NAME] = name
    return made


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is sharded over the data axes; False for activations of a tensor-parallel plan."""
    if isinstance(value, ShardedTensor):
        return True
    return isinstance(value, DTensor) and not {*DATA_AXES}.isdisjoint(value.device_mesh.mesh_dim_names or ())


def is_alike(value: Tensor, tensor: DTensor) -> bool:
    """Return whether both have the same shape and sharding."""
    if value is tensor or not isinstance(value, DTensor):
        return value is tensor
    one, other = spec_of(value), spec_of(tensor)
    if one is other:
        return True
    return shape_of(value) == shape_of(tensor) and one.placements == other.placements and one.mesh == other.mesh


def rows_like(value: Tensor, tensor: DTensor, what: str) -> Tensor:
    """Return this rank's rows of ``value``, a plain tensor or a DTensor with any sharding, split as ``tensor`` is."""
    if is_alike(value, tensor):
        return local_tensor(value)
    sharding = sharding_of(tensor)
    if isinstance(value, DTensor):
        value = gather_whole(value, what)
    else:
        check_equal_on_ranks(value, sharding, what)
    return local_part(value.to(tensor.device), sharding).clone()


def tensors_in(*values: Any) -> list[Any]:
    """Return the tensors among values, also in lists, tuples and dicts."""
    found = list[Any]()

    def collect(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    map_nested(values, collect)
    return found


def map_nested(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return an argument with ``change`` applied to its tensors, also in lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        items = [map_nested(item, change) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return items if type(value) is list else type(value)(items)  # torch's return types, too, such as of max
    if isinstance(value, dict):
        return {key: map_nested(item, change) for key, item in value.items()}
    return value
