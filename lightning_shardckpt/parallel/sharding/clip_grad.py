"""Clipping and unscaling of gradients with different shardings.

``torch.nn.utils.clip_grad_norm_`` and ``torch.amp.GradScaler`` refuse a mix of plain tensors and DTensors (torch 2.13).
Here, every rank sums over its own memory with weight 1/k for an element that k ranks hold, and one all-reduce of a
single number gives the norm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import norms as foreach_norms
from lightning_shardckpt.compat.torch_autograd import replace_unscale, unscale
from lightning_shardckpt.distributed.host_numbers import on_device

RanksOf = Callable[[Tensor], int]
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def _replica_count(tensor: Tensor, ranks: int) -> float:
    """Return how many of ``ranks`` processes hold each element of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return float(ranks)
    axes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return ranks / math.prod(size for size, placement in axes if not placement.is_replicate())


def _gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters that have gradients, each with its gradient."""
    return [(p, gradient) for p in parameters if (gradient := p.grad) is not None]


def _norm_of(
    gradients: Sequence[tuple[Tensor, Tensor]], *, device: torch.device, ranks_of: RanksOf | None, norm_type: float
) -> Tensor:
    """Return the norm of all gradients together. Collective: every rank of the world must call it."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    present = [(p, g, local) for p, g in gradients if (local := local_tensor(g)).numel()]
    total = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    if present:
        values = [local.abs() if local.is_complex() else local for _, _, local in present]
        wide = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
        norms = torch.stack([n.to(device) for n in foreach_norms(values, norm_type, wide)]).to(total.dtype)
        if math.isinf(norm_type):
            total = norms.max()
        else:
            powers = norms.pow(norm_type)
            if ranks > 1:
                weights = [1 / _replica_count(g, ranks_of(p) if ranks_of else ranks) for p, g, _ in present]
                powers = powers * on_device(weights, total.dtype, device)
            total = powers.sum()
    if ranks > 1:
        dist.all_reduce(total, op=dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM)
    return total if math.isinf(norm_type) else total.pow(1 / norm_type)


def clip_by_norm(
    parameters: Sequence[Tensor],
    max_norm: float,
    *,
    device: torch.device,
    ranks_of: RanksOf | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most ``max_norm``; return the norm before.

    Collective: every rank of the world must call it. Gradients must be reduced, with their parameter's sharding. Waits
    for the device only with ``error_if_nonfinite``.

    Args:
        parameters: the parameters whose gradients are scaled.
        max_norm: the largest norm afterwards, of the order ``norm_type``.
        device: the device of the result.
        ranks_of: returns the number of ranks that hold a parameter or a part of it; by default the world size.
        error_if_nonfinite: whether to raise a RuntimeError, before anything is scaled, for an infinite norm or NaN.
    """
    gradients = _gradients(parameters)
    norm = _norm_of(gradients, device=device, ranks_of=ranks_of, norm_type=norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {norm.item():g}, so they cannot be clipped")
    scale_on = cache((max_norm / (norm + _EPSILON)).clamp(max=1.0).to)
    for _, gradient in gradients:
        local = local_tensor(gradient)
        local.mul_(scale_on(local.device, local.dtype))
    return norm


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit] in place. No communication."""
    for _, gradient in _gradients(parameters):
        local_tensor(gradient).clamp_(-limit, limit)


# ── loss scaling ────────────────────────────────────────────────────────────────────────────────────────────────────


def unscale_over_ranks(scaler: torch.amp.GradScaler, device: torch.device) -> Callable[[], None]:
    """Make ``scaler`` unscale this rank's part of gradients, and find infinities of all ranks; return the undo.

    Its ``unscale_`` becomes collective: every rank of the world must call it. Not run on CUDA.
    """

    def unscale_everywhere(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        any_inf, alike = found_inf.to(device, copy=True), defaultdict[Any, list[Tensor]](list)
        for _, gradient in _gradients(p for group in optimizer.param_groups for p in group["params"]):
            local = local_tensor(gradient)
            alike[local.device, local.dtype].append(local)
        for (grad_device, dtype), grads in alike.items():
            if dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            own_inf = torch.zeros((), device=grad_device)
            unscale(grads, inv_scale.to(grad_device), own_inf)
            any_inf.copy_(torch.maximum(any_inf, own_inf.to(device)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(any_inf, op=dist.ReduceOp.MAX)
        return {device: any_inf}

    return replace_unscale(scaler, unscale_everywhere)
