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
from lightning_shardckpt.compat.gradient_kernels import norms as foreach_norms

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
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    held = [(p.grad, ranks_of(p) if ranks_of else ranks) for p in parameters if p.grad is not None]
    counts = [count for g, count in held if local_tensor(g).numel()]
    kept = [g for g, _ in held if local_tensor(g).numel()]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in kept) else torch.float32
    total = torch.zeros((), dtype=torch.float64 if device.type != "mps" else torch.float32, device=device)
    if kept:
        norms = torch.stack(
            [torch.as_tensor(n, device=device) for n in _norms([local_tensor(g) for g in kept], norm_type, wide)]
        ).to(total.dtype)
        if math.isinf(norm_type):
            total = norms.max()
        else:
            weights = [1 / replica_count(g, count) for g, count in zip(kept, counts, strict=True)]
            total = (norms.pow(norm_type) * torch.tensor(weights, dtype=total.dtype, device=device)).sum()
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
    norm = grad_norm(parameters, device=device, ranks_of=ranks_of, norm_type=norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"the norm of the gradients is {norm.item():g}, so they cannot be clipped")
    scale = (max_norm / (norm + _EPSILON)).clamp(max=1.0)
    for grad in _local_grads(parameters):
        grad.mul_(scale.to(device=grad.device, dtype=grad.dtype))
    return norm


def clip_by_value(parameters: Iterable[Tensor], limit: float) -> None:
    """Clamp every element of the gradients to [-limit, limit] in place. No communication."""
    for grad in _local_grads(parameters):
        grad.clamp_(-limit, limit)


def _local_grads(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [local_tensor(p.grad) for p in parameters if p.grad is not None]


def _norms(grads: list[Tensor], norm_type: float, dtype: torch.dtype) -> list[Tensor]:
    if len({(g.device, g.dtype) for g in grads}) == 1 and grads[0].is_cuda:
        return foreach_norms(grads, norm_type, dtype)
    return [torch.linalg.vector_norm(g, norm_type, dtype=dtype) for g in grads]
