"""Kernels over lists of gradients, and the place where a GradScaler calls one.

Checked with torch 2.12 to 2.15.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

Unscale = Callable[[Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]
"""(optimizer, inverse scale, a zero, whether float16 is allowed) → by device, 1 if a gradient is infinite or NaN."""


def norms(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each of some tensors of one device and dtype, computed in ``dtype``; on CUDA by a few kernels."""
    return list(torch._foreach_norm(list(tensors), norm_type, dtype=dtype))


def unscale(gradients: Sequence[Tensor], inverse_scale: Tensor, found_inf: Tensor) -> None:
    """Multiply gradients of one device and dtype in place; writes 1 to ``found_inf`` if one is infinite or NaN."""
    torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found_inf, inverse_scale)


def replace_unscale(scaler: torch.amp.GradScaler, function: Unscale) -> None:
    """Let ``scaler.unscale_`` and ``scaler.step`` call a function of ours; torch has no public way to."""
    scaler._unscale_grads_ = function  # type: ignore[method-assign,assignment]  # called by position
