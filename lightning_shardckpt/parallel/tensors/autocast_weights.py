"""Weights of linear layers and convolutions, gathered in the dtype of autocast.

Autocast casts the arguments of these functions anyway, so a weight gathered in that dtype gives the same values with
half the bytes. All other functions get the parameter itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_shardckpt.compat.torch_tensors import in_functional_transform, without_torch_function
from lightning_shardckpt.errors import UnsupportedCodeError
from lightning_shardckpt.parallel.tensors.saved_parameters import version_key

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS)
"""The modules whose weights and biases are arguments of `FUNCTIONS` only."""
FUNCTIONS = frozenset(
    (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)


class CastWeight(NamedTuple):
    """A parameter, gathered in the dtype of autocast.

    Attributes:
        whole: the values.
        history: a tensor without memory in the parameter's dtype, which receives the gradient.
        version: the `version_key` of the parameter when it was gathered.
    """

    whole: Tensor
    history: Tensor
    version: tuple[int, int]

    @classmethod
    def of(cls, leaf: Tensor, whole: Tensor, history: Tensor) -> CastWeight:
        return cls(whole, history, version_key(leaf))

    def fits(self, leaf: Tensor) -> bool:
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
    """Inside, `FUNCTIONS` get these weights in place of parameters; the keys are the ids of the parameters."""
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
    if not _weights or func not in FUNCTIONS:
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
