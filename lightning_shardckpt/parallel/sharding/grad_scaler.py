"""How does a GradScaler see gradients that are cut, and when does it skip a step?

``torch.amp.GradScaler`` hands all gradients to one kernel, which takes no mix of plain tensors and DTensors (torch
2.13), and each rank would skip a step for its own infinities only.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_shardckpt.parallel.clip import local


def unscale_over_ranks(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Make ``scaler`` work on the local memory of gradients and find an infinity that any rank of the world has.

    Its ``unscale_`` becomes collective: every rank of the world must call it. Not run on CUDA.
    """

    def unscale(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = found_inf.to(device, copy=True)
        for (place, dtype), grads in _local_grads(optimizer).items():
            if dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            here = torch.zeros((), device=place)
            torch._amp_foreach_non_finite_check_and_unscale_(grads, here, inv_scale.to(place))
            found.copy_(torch.maximum(found, here.to(device)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {device: found}

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign]  # torch has no public seam for it


def _local_grads(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                grad = local(parameter.grad)
                found[grad.device, grad.dtype].append(grad)
    return found
