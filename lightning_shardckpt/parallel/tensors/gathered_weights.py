"""Gathered parameters as arguments of functions: saved for the backward, and in the dtype of autocast.

Hooks for saved tensors keep a reference to a sharded parameter in place of the gathered one, and detect changes of
parameters between the forward and the backward.

Autocast casts the arguments of linear layers and convolutions anyway, so a weight gathered in that dtype gives the same
values with half the bytes. All other functions get the parameter itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from lightning_shardckpt.compat.dtensor import DTensorSpec, local_tensor, new_dtensor, rows_of, spec_of
from lightning_shardckpt.compat.torch_autograd import packing_hook
from lightning_shardckpt.compat.torch_tensors import (
    in_functional_transform,
    memory_id,
    version_of,
    without_torch_function,
)
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.placement import ASSIGNMENTS


class SavedParameters:
    """Packs and unpacks the tensors that operations on gathered parameters save for their backward.

    As for plain tensors, a change of one is an error: autograd can't see changes of tensors that hooks have packed.

    Args:
        name: the name of the unit, for messages.
        leaves: the sharded parameters by the id of the gathered memory, which is not kept.
        regather: functions that return the memory of a parameter in a backward, by the id of the parameter, if torch's
            engine frees it.
    """

    def __init__(self, name: str, leaves: Mapping[int, DTensor], regather: Mapping[int, Callable[[], Tensor]]) -> None:
        self._name, self._leaves, self._regather = name, leaves, regather
        self._versions: dict[int, tuple[int, int]] = {}
        self._outer: SavedParameters | None = None  # of the unit around this one

    def hooks(self) -> AbstractContextManager[Any]:
        """Return the hooks as a context; an empty one where checkpointing or offloading has its own hooks."""
        if uses_other_hooks():
            return nullcontext()
        self._outer = _owner_of(packing_hook())
        return saved_tensors_hooks(self._pack, lambda unpack: unpack())

    def end_forward(self) -> None:
        """End the forward: from now on, parameters must not change."""
        self._versions = {id(leaf): self._key(leaf) for leaf in self._leaves.values()}

    def _key(self, leaf: DTensor) -> tuple[int, int]:
        """Return a key that changes if the backward would get other values, but not by assignments to ``data``."""
        return (version_of(leaf), 0) if id(leaf) in self._regather else version_key(leaf)

    def _pack(self, tensor: Tensor) -> Callable[[], Tensor]:
        local = local_tensor(tensor)
        leaf = self._leaves.get(memory_id(local)) if local.layout == torch.strided else None
        if leaf is None and self._outer is not None:
            return self._outer._pack(tensor)
        if leaf is None:  # not the tensor itself: the graph would form a cycle
            return partial(self._unpack_activation, tensor.detach(), version_of(tensor))
        kept = None if id(leaf) in self._regather else local.detach()
        spec = spec_of(tensor) if isinstance(tensor, DTensor) else None
        return partial(self._unpack, leaf, kept, (local.size(), local.stride(), local.storage_offset()), spec)

    def _unpack_activation(self, tensor: Tensor, version: int) -> Tensor:
        if version_of(tensor) != version:
            self._refuse(f"one of shape {tuple(tensor.shape)} that {self._name or 'the module'} computed with")
        return tensor

    def _unpack(self, leaf: DTensor, kept: Tensor | None, layout: Any, spec: DTensorSpec | None) -> Tensor:
        if self._versions and self._key(leaf) != self._versions[id(leaf)]:
            self._refuse(f"a parameter of {self._name or 'the module'}, of shape {tuple(leaf.shape)}")
        # not under no_grad: then it would not copy
        memory = None if kept is not None else local_tensor(self._regather[id(leaf)]())
        with torch.no_grad():
            local: Any = kept if memory is None else memory.as_strided(*layout)
            return local if spec is None else new_dtensor(local, spec)

    def _refuse(self, what: str) -> None:
        raise RuntimeError(
            f"one of the variables needed for gradient computation has been modified by an inplace operation: {what}. "
            "Change it before the forward or after the backward."
        )


def uses_other_hooks() -> bool:
    """Return whether hooks for saved tensors of checkpointing, offloading or the user are in place."""
    hook = packing_hook()
    return hook is not None and _owner_of(hook) is None


def version_key(tensor: DTensor) -> tuple[int, int]:
    """Return a key that changes with a tensor's values, in place or by an assignment to ``data``. No communication.

    It changes on all ranks or on none; for an inference tensor, which has no version, always. It has no address: a rank
    without rows has none, and freed memory is reused.
    """
    local = rows_of(tensor)
    if local.is_inference():
        return next(_keys), 0
    return version_of(local), tensor.__dict__.get(ASSIGNMENTS, 0)


_keys = count(-1, -1)


def _owner_of(hook: Any) -> SavedParameters | None:
    owner = getattr(hook, "__self__", None)
    return owner if isinstance(owner, SavedParameters) else None


# ── weights in the dtype of autocast ────────────────────────────────────────────────────────────────────────────────


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS)
"""The modules whose weights and biases are arguments of these functions only."""
_FUNCTIONS = {F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}


class CastWeight(NamedTuple):
    """A parameter, gathered in the dtype of autocast."""

    whole: Tensor
    history: Tensor
    """A tensor without memory in the parameter's dtype, which receives the gradient."""
    version: tuple[int, int]
    """The `version_key` of the parameter when it was gathered."""

    def fits(self, leaf: DTensor) -> bool:
        """Return whether autocast would now cast the parameter to these values, with the same history."""
        if not is_autocast(self.whole.device, self.whole.dtype) or self.version != version_key(leaf):
            return False
        return not torch.is_grad_enabled() or self.history.requires_grad == leaf.requires_grad

    def use(self) -> Tensor:
        """Return the values for one function call; gradients of several calls are added in the parameter's dtype."""
        if torch.is_grad_enabled() and self.history.requires_grad:
            return _Use.apply(self.history, self.whole)  # type: ignore[no-any-return, no-untyped-call]  # torch's
        return self.whole


_weights: dict[int, CastWeight] = {}


@contextmanager
def cast_weights(weights: Mapping[int, CastWeight]) -> Iterator[None]:
    """Inside, functions of `LAYERS` get these weights in place of the parameters with these ids."""
    _weights.update(weights)
    try:
        yield
    finally:
        for number in weights:
            del _weights[number]


def has_cast_weight(leaf: Tensor) -> bool:
    """Return whether a running forward has gathered a parameter in the dtype of autocast."""
    return id(leaf) in _weights


def cast_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments of a function with parameters replaced by gathered weights; None if there are none."""
    if not _weights or func not in _FUNCTIONS:
        return None
    values = (*args, *kwargs.values())
    if any(isinstance(value, str) for value in values):  # with padding="same", other functions are called inside
        return None
    with without_torch_function():
        cast = {id(v): weight.use() for v in values if (weight := _weights.get(id(v))) is not None and weight.fits(v)}
    if not cast:
        return None
    if torch.is_grad_enabled() and in_functional_transform():
        raise UnsupportedCodeError(
            f"torch.func or torch.vmap calls {func.__name__} in a forward under autocast, and fully_shard has gathered "
            "its weight in the dtype of autocast. Leave it whole: ShardedStrategy(fsdp=FSDP(ignored=[…]))."
        )
    return [cast.get(id(v), v) for v in args], {name: cast.get(id(v), v) for name, v in kwargs.items()}


def is_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether autocast is enabled and casts to ``dtype``."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == dtype


class _Use(torch.autograd.Function):
    """Returns a tensor over the memory of the weight; for gradients, a cast of ``history``."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, whole: Tensor) -> Tensor:
        ctx.dtype = history.dtype
        return whole.new_empty(0).set_(whole.untyped_storage(), whole.storage_offset(), whole.shape)  # type: ignore[call-overload, no-any-return]  # typed since 2.13

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
