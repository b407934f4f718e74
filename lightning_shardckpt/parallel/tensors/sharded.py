"""A DTensor that acts as the whole tensor, whoever uses it: parameters, their gradients, the state of optimizers.

torch's DTensor leaves much to its users: it refuses operations with plain tensors, gives norms of a shard as if they
were those of the tensor, loses what is assigned to ``data``. Here

* an operation with plain tensors, and any that needs more than one element at a time, sees the whole tensor, through
  autograd; the result is a plain tensor;
* elementwise operations on tensors that are sharded alike stay sharded, without communication;
* a norm is that of the whole tensor, made of those of the shards;
* in-place operations, also on views, change the shards; what the ranks write must be the same on all of them;
* what is drawn into a tensor is what one process would draw.

So every rank must do the same with it at the same time; ``peers`` notices when they don't.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
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
from lightning_shardckpt.compat.torch_tensors import (
    is_marked_as_parameter,
    mark_as_parameter,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.autocast_weights import cast_arguments
from lightning_shardckpt.parallel.tensors.kinds import Kind, kind_of
from lightning_shardckpt.parallel.tensors.placeholder import Placeholder
from lightning_shardckpt.parallel.tensors.placement import ASSIGNMENTS, DATA_AXES, NAME, local_part
from lightning_shardckpt.parallel.tensors.values import Scatter, check_same, where_is, whole

Function = Callable[..., Any]
Handler = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Kind, Handler] = {}
"""What functions of torch do with sharded tensors, by what they need of them; filled by `operations`."""

ANSWER_FIRST: set[type] = {Placeholder}
"""Classes whose ``__torch_function__`` answers for sharded tensors, too: values of other pipeline stages, and tensors
that stand for sharded ones."""
LEAF = "a leaf Variable that requires grad is being used in an in-place operation."
_data: Any = Tensor.data
_grad: Any = Tensor.grad


class ShardedTensor(DTensor):
    """See the module's docstring. Made of a DTensor by `sharded`."""

    __slots__: list[str] = []

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not ANSWER_FIRST.isdisjoint(types):
            return NotImplemented
        kwargs = kwargs or {}
        if not args and "tensor" in kwargs:  # so torch.nn.init does it
            args, kwargs = (kwargs["tensor"],), {k: v for k, v in kwargs.items() if k != "tensor"}
        if (cast := cast_arguments(func, args, kwargs)) is not None:
            return func(*cast[0], **cast[1])
        return _handler_of(func)(func, tuple(args), kwargs)

    @property
    def data(self) -> ShardedTensor:
        """The tensor without history, over the same memory."""
        with without_torch_function():
            return like(self, local_tensor(self).detach())

    @data.setter
    def data(self, value: Tensor) -> None:
        """Set other memory, as it is if it is laid out alike, else that of the rows of a whole tensor."""
        with without_torch_function():
            if value.shape != self.shape:
                raise UnsupportedCodeError(
                    f"a tensor of shape {tuple(value.shape)} was assigned to the data of a sharded one of shape "
                    f"{tuple(self.shape)}; a sharded tensor keeps its shape"
                )
            rows = rows_like(value, self, "an assignment to data")
            found = like(self, rows.detach())
            _data.__set__(self, found)
            replace_local(self, found)
            self.__dict__[ASSIGNMENTS] = self.__dict__.get(ASSIGNMENTS, 0) + 1

    @property
    def grad(self) -> Tensor | None:
        """The gradient, averaged over all batches."""
        with without_torch_function():
            found: Any = _grad.__get__(self)
        if type(found) is DTensor:  # of autograd
            found = self._named_gradient(sharded(found))
        return found  # type: ignore[no-any-return]  # sharded, or None

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        with without_torch_function():
            if value is not None and not is_alike(value, self):
                if value.shape != self.shape:
                    raise RuntimeError(
                        f"assigned grad has data of a different size: {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(self.shape)}"
                    )
                value = like(self, rows_like(value, self, "an assignment to grad").clone())
            _grad.__set__(self, value if value is None else self._named_gradient(value))

    def _named_gradient(self, gradient: Tensor) -> Tensor:
        if NAME in self.__dict__:
            gradient.__dict__[NAME] = f"the gradient of {self.__dict__[NAME]}"
        return gradient

    def set_(self, source: Any = None, *args: Any, **kwargs: Any) -> ShardedTensor:
        """Take the memory of another tensor of this shape, as parametrizations do; torch dispatches no ``set_``.

        Raises:
            UnsupportedCodeError: for a storage, or another shape.
        """
        if not isinstance(source, Tensor) or args or kwargs or source.shape != self.shape:
            raise UnsupportedCodeError(
                f"set_ gives other memory to a sharded tensor of shape {tuple(self.shape)}, of which this rank has "
                "some rows. Give it a tensor of its shape, without offset or strides, or copy_ the values."
            )
        if source is not self:
            self.data = source
        return self

    @property
    def __tensor_flatten__(self) -> Any:
        """Absent, so that ``module.to()`` assigns to ``data``: torch can't swap a tensor that has weak references."""
        raise AttributeError("a sharded tensor is not made of plain ones")

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return all elements, as a plain tensor. Collective: every rank that has a shard must call it."""
        with without_torch_function():
            return whole(self, "full_tensor")

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedTensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]  # it is one
        with without_torch_function(), torch.no_grad():
            found = like(self, local_tensor(self).clone())
            found.requires_grad_(self.requires_grad)
        if is_marked_as_parameter(self):
            mark_as_parameter(found)
        memo[id(self)] = found
        if self.grad is not None:
            found.grad = self.grad.detach().clone()
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        warnings.warn(
            "a sharded tensor is being pickled, with the rows of this rank alone. For a file of whole tensors, call "
            "lightning_shardckpt.full_state_dict(module) on all ranks and save what it returns, or consolidate a "
            "checkpoint.",
            stacklevel=2,
        )
        kind, self.__class__ = self.__class__, DTensor  # type: ignore[assignment]  # as torch pickles it
        try:
            with without_torch_function():
                return DTensor.__reduce_ex__(self, protocol)  # type: ignore[no-untyped-call]  # torch's
        finally:
            self.__class__ = kind

    def __repr__(self) -> str:  # type: ignore[override]
        return (
            f"ShardedTensor(shape={tuple(self.shape)}, dtype={self.dtype}, placements={spec_of(self).placements}, "
            f"rows of this rank={local_tensor(self)})"
        )


@cache  # an enum computes its hash in Python
def _handler_of(func: Function) -> Handler:
    return HANDLERS[kind_of(func)]


def sharded(tensor: Tensor) -> ShardedTensor:
    """The DTensor itself, as a ShardedTensor from now on."""
    if type(tensor) is DTensor:
        tensor.__class__ = ShardedTensor  # its slots are the same
    assert isinstance(tensor, ShardedTensor)
    return tensor


def like(tensor: DTensor, local: Tensor) -> ShardedTensor:
    """A tensor that is laid out like another one, with these rows."""
    spec = spec_of(tensor)
    meta = spec.tensor_meta
    assert meta is not None
    if meta.dtype != local.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=TensorMeta(meta.shape, meta.stride, local.dtype))
    found = sharded(new_dtensor(local, spec))
    if (name := tensor.__dict__.get(NAME)) is not None:
        found.__dict__[NAME] = name
    return found


def is_sharded(value: object) -> bool:
    """Return whether a value is a sharded tensor of ours, whoever made it; not so a plan's activations."""
    if isinstance(value, ShardedTensor):
        return True
    return isinstance(value, DTensor) and not {*DATA_AXES}.isdisjoint(value.device_mesh.mesh_dim_names or ())


def is_alike(value: Tensor, tensor: DTensor) -> bool:
    """Return whether both are sharded in the same way."""
    if value is tensor:
        return True
    if not isinstance(value, DTensor):
        return False
    one, other = spec_of(value), spec_of(tensor)
    if one is other:
        return True
    return shape_of(value) == shape_of(tensor) and one.placements == other.placements and one.mesh == other.mesh


def rows_like(value: Tensor, tensor: DTensor, what: str) -> Tensor:
    """Return this rank's rows of a tensor that is sharded like ``tensor``, in another way, or not at all."""
    if is_alike(value, tensor):
        return local_tensor(value)
    where = where_is(tensor)
    if isinstance(value, DTensor):
        value = whole(value, what)
    else:
        check_same(value, where, what)
    return local_part(value.to(tensor.device), where).clone()


def scattered(value: Tensor, tensor: DTensor) -> ShardedTensor:
    """A plain tensor, the same on all ranks, laid out like ``tensor``; with its history."""
    return sharded(Scatter.apply(value, tensor))  # type: ignore[no-untyped-call]  # torch's


def refuse_leaf(target: Tensor, func: Function) -> None:
    """Raise what autograd raises if a leaf that needs a gradient is to be changed; the initializers may do that."""
    of_initializers = getattr(func, "__module__", None) == "torch.nn.init"
    if torch.is_grad_enabled() and target.requires_grad and target.is_leaf and not of_initializers:
        raise RuntimeError(LEAF)


def local_of(value: Tensor) -> Tensor:
    """Return this rank's rows of a sharded value."""
    return local_tensor(value) if is_sharded(value) else value


def tensors_in(args: Any, kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The tensors among arguments, also in lists."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value, {})
        elif isinstance(value, dict):
            yield from tensors_in(value.values(), {})


def mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """An argument with its tensors replaced."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        found = [mapped(item, change) for item in value]
        return type(value)(*found) if hasattr(value, "_fields") else _same_container(value, found)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    return value


def _same_container(value: Any, found: list[Any]) -> Any:
    """Return ``found`` in a container like ``value``, also in torch's own named tuples, such as that of ``max``."""
    return found if type(value) is list else type(value)(found)
