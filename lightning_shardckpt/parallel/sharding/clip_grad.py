"""Clip gradients over parameters that are sharded in different ways.

``torch.nn.utils.clip_grad_norm_`` refuses a mix of plain tensors and DTensors, and DTensors of different meshes
(torch 2.13). Here every rank sums over its own memory, counts an element that k ranks hold as 1/k, and one
all-reduce of a single number makes the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import norms as foreach_norms
from lightning_shardckpt.distributed.host_numbers import on_device

RanksOf = Callable[[Tensor], int]
_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def replica_count(tensor: Tensor, ranks: int) -> float:
    """Return how many of ``ranks`` processes hold each element of ``tensor``."""
    if not isinstance(tensor, DTensor):
        return float(ranks)
    parts = math.prod(
        size
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        if not placement.is_replicate()
    )
    return ranks / parts


def grad_norm(
    parameters: Iterable[Tensor], *, device: torch.device, ranks_of: RanksOf | None = None, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of all gradients together, equal on every rank, a 0-dim tensor on ``device``.

    ``ranks_of`` a parameter says how many ranks hold it or a part of it; by default all of the world.
    Collective: every rank of the world must call it. Gradients must be reduced and in their parameter's layout.
    """
    return _norm_of(_gradients(parameters), device=device, ranks_of=ranks_of, norm_type=norm_type)


def _gradients(parameters: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Return the parameters that have gradients, with these."""
    return [(p, gradient) for p in parameters if (gradient := p.grad) is not None]


def _norm_of(
    gradients: Sequence[tuple[Tensor, Tensor]], *, device: torch.device, ranks_of: RanksOf | None, norm_type: float
) -> Tensor:
    """Return the norm of the gradients of some parameters together. Collective, as `grad_norm`."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    kept = [(p, g, local) for p, g in gradients if (local := local_tensor(g)).numel()]
    total = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    if kept:
        sizes = [local.abs() if local.is_complex() else local for _, _, local in kept]
        norms = torch.stack([n.to(device) for n in _norms(sizes, norm_type)]).to(total.dtype)
        if math.isinf(norm_type):
            total = norms.max()
        else:
            powers = norms.pow(norm_type)
            if ranks > 1:
                weights = [1 / replica_count(g, ranks_of(p) if ranks_of else ranks) for p, g, _ in kept]
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
    """Scale the gradients in place so that their norm is at most ``max_norm``; returns the norm before.

    ``ranks_of``: see `grad_norm`. Collective: every rank of the world must call it. Does not wait for the device, but
    for ``error_if_nonfinite``.

    Raises:
        RuntimeError: on every rank, with ``error_if_nonfinite``, if the norm is infinite or NaN. Nothing is scaled.
    """
    gradients = _gradients(parameters)
    norm = _norm_of(gradients, device=device, ranks_of=ranks_of, norm_type=norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {norm.item():g}, so they cannot be clipped")
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    scales: dict[tuple[torch.device, torch.dtype], Tensor] = {}
    for _, gradient in gradients:
        local = local_tensor(gradient)
        kind = local.device, local.dtype
        if kind not in scales:
            scales[kind] = scale.to(device=local.device, dtype=local.dtype)
        local.mul_(scales[kind])
    return norm


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit] in place. No communication."""
    for _, gradient in _gradients(parameters):
        local_tensor(gradient).clamp_(-limit, limit)


def _norms(tensors: list[Tensor], norm_type: float) -> list[Tensor]:
    """Return the norm of each tensor, in float64 if one is of that dtype, else in float32."""
    wide = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    if len({(tensor.device, tensor.dtype) for tensor in tensors}) == 1:
        return foreach_norms(tensors, norm_type, wide)
    return [torch.linalg.vector_norm(tensor, norm_type, dtype=wide) for tensor in tensors]
