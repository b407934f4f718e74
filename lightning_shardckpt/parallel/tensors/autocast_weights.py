"""Give linear layers and convolutions the weights that were gathered in the dtype of autocast.

Autocast casts the arguments of these functions. So a weight that is gathered in its dtype gives the same values with
half the bytes, in these functions alone: any other use of the parameter sees the parameter.
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
from lightning_shardckpt.parallel.tensors.saved_parameters import state_of

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS: tuple[type[nn.Module], ...] = (nn.Linear, *_CONVOLUTIONS)
"""The modules that give their weights and biases to nothing but `FUNCTIONS`."""
FUNCTIONS = frozenset(
    (F.linear, F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)


class CastWeight(NamedTuple):
    """A parameter that was gathered in the dtype of autocast.

    Attributes:
        whole: the values.
        history: a tensor without memory in the parameter's dtype, whose gradient is that of the parameter.
        state: of the parameter when it was gathered.
    """

    whole: Tensor
    history: Tensor
    state: tuple[int, int]

    @classmethod
    def of(cls, leaf: Tensor, whole: Tensor, history: Tensor) -> CastWeight:
        return cls(whole, history, state_of(leaf))

    def fits(self, leaf: Tensor) -> bool:
        """Return whether autocast would make these values of a parameter now, with the same history."""
        if not is_autocast(self.whole.device, self.whole.dtype) or self.state != state_of(leaf):
            return False
        return not torch.is_grad_enabled() or self.history.requires_grad == leaf.requires_grad

    def use(self) -> Tensor:
        """Return the values for one function: gradients of several are added in the parameter's dtype, as without."""
        if torch.is_grad_enabled() and self.history.requires_grad:
            return _Use.apply(self.history, self.whole)  # type: ignore[no-any-return, no-untyped-call]  # torch's
        return self.whole


_weights: dict[int, CastWeight] = {}


@contextmanager
def cast_weights(weights: Mapping[int, CastWeight]) -> Iterator[None]:
    """Inside, functions take these weights in place of the parameters with these ids."""
    _weights.update(weights)
    try:
        yield
    finally:
        for number in weights:
            del _weights[number]


def has_cast_weight(leaf: Tensor) -> bool:
    """Return whether a forward that is running has a parameter's values in the dtype of autocast."""
    return id(leaf) in _weights


def cast_arguments(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the arguments of a function with the weights that were gathered for it; None if there are none."""
    if not _weights or func not in FUNCTIONS:
        return None
    values = (*args, *kwargs.values())
    if any(isinstance(value, str) for value in values):  # convolutions that pad by name call others inside
        return None
    with without_torch_function():
        cast = {id(v): weight.use() for v in values if (weight := _weights.get(id(v))) is not None and weight.fits(v)}
    if not cast:
        return None
    if torch.is_grad_enabled() and in_functional_transform():
        raise UnsupportedCodeError(
            f"torch.func or torch.vmap calls {func.__name__} in a forward under autocast, whose weight fully_shard has "
            'gathered in another dtype. Use ShardedStrategy(fsdp_engine="exact").'
        )
    return [cast.get(id(v), v) for v in args], {name: cast.get(id(v), v) for name, v in kwargs.items()}


def is_autocast(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether autocast is on, and casts to ``dtype``."""
    return torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == dtype


class _Use(torch.autograd.Function):
    """A tensor without memory → one over the memory of the weight; a cast, as far as gradients see."""

    @staticmethod
    def forward(ctx: Any, history: Tensor, whole: Tensor) -> Tensor:
        ctx.dtype = history.dtype
        return whole.new_empty(0).set_(whole.untyped_storage(), whole.storage_offset(), whole.shape)  # type: ignore[call-overload, no-any-return]  # typed since 2.13

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
