"""Keep the running statistics of norms equal on all data-parallel ranks.

Batch norm collects statistics of the batches that its rank saw. As under DDP, those of the first data-parallel rank
count; they are broadcast after the backward, so that every rank, and every checkpoint, has the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_shardckpt.compat.torch_modules import BatchNorm, NormWithStatistics
from lightning_shardckpt.errors import TopologyError


def running_statistics(root: nn.Module) -> list[Tensor]:
    """The running means and variances of the norms of ``root`` that are in training mode."""
    norms = [module for module in root.modules() if isinstance(module, NormWithStatistics) and module.training]
    return [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]


@torch.no_grad()
def broadcast_statistics(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Give every rank of ``group`` the running statistics of its first. Collective: every rank of it must call it."""
    if group.size() == 1 or not (statistics := running_statistics(root)):
        return
    flat = torch.cat([buffer.double().reshape(-1) for buffer in statistics])  # exact for every narrower dtype
    dist.broadcast(flat, group=group, group_src=0)
    for buffer, values in zip(statistics, torch.split(flat, [b.numel() for b in statistics]), strict=True):
        buffer.copy_(values.view_as(buffer))


def synchronize_batch_norms(root: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Let the batch norms inside ``root`` normalize over the batches of all ranks, as ``sync_batchnorm=True`` asks for.

    They are torch's, which run on GPUs only; that part has not been run by this project.

    Raises:
        TopologyError: on CPUs, if there are batch norms.
    """
    norms = [name for name, module in root.named_modules() if isinstance(module, BatchNorm)]
    if not norms:
        return
    if device.type == "cpu":
        raise TopologyError(
            f"Trainer(sync_batchnorm=True): torch.nn.SyncBatchNorm, which would take the place of {norms[0]}, does not "
            "run on CPUs. Use GPUs, or a norm that does not depend on the batch, such as GroupNorm."
        )
    nn.SyncBatchNorm.convert_sync_batchnorm(root, group)  # type: ignore[no-untyped-call]  # torch's
