"""Let a GradScaler work on sharded gradients, and skip a step on all ranks together.

``torch.amp.GradScaler`` hands all gradients to one kernel, which takes no mix of plain tensors and DTensors (torch
2.13), and each rank would skip a step for its own infinities only.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lightning_shardckpt.compat.dtensor import local_tensor
from lightning_shardckpt.compat.torch_autograd import replace_unscale, unscale


def unscale_over_ranks(scaler: torch.amp.GradScaler, device: torch.device) -> None:
    """Make ``scaler`` work on the local memory of gradients and find an infinity that any rank of the world has.

    Its ``unscale_`` becomes collective: every rank of the world must call it. Not run on CUDA.
    """

    def unscale_everywhere(
        optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = found_inf.to(device, copy=True)
        for (place, dtype), grads in _local_grads(optimizer).items():
            if dtype == torch.float16 and not allow_fp16:
                raise ValueError("Attempting to unscale FP16 gradients.")
            here = torch.zeros((), device=place)
            unscale(grads, inv_scale.to(place), here)
            found.copy_(torch.maximum(found, here.to(device)))
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return {device: found}

    replace_unscale(scaler, unscale_everywhere)


def _local_grads(optimizer: Optimizer) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                grad = local_tensor(parameter.grad)
                found[grad.device, grad.dtype].append(grad)
    return found
