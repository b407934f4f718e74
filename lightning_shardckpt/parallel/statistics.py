"""Which buffers does training change, and whose copy counts?

Batch norm collects statistics of the batches that its rank saw. As under DDP, the first data-parallel rank's count;
they are sent round after the backward, so that every rank, and every checkpoint, has the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


def running_statistics(root: nn.Module) -> list[Tensor]:
    """The running means and variances of the norms of ``root`` that are in training mode."""
    norms = [module for module in root.modules() if isinstance(module, _NormBase) and module.training]
    return [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]


@torch.no_grad()
def broadcast_statistics(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the running statistics of its first. Collective: every rank of it must call it."""
    statistics = running_statistics(root)
    if not statistics or dist.get_world_size(group) == 1:
        return
    flat = torch.cat([buffer.double().reshape(-1) for buffer in statistics])  # exact for every narrower dtype
    dist.broadcast(flat, group=group, group_src=0)
    for buffer, values in zip(statistics, torch.split(flat, [b.numel() for b in statistics]), strict=True):
        buffer.copy_(values.view_as(buffer))
