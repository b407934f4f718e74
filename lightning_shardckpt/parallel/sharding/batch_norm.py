"""Running statistics of batch norms, equal on all data-parallel ranks.

A batch norm collects statistics of its rank's batches. As under DDP, the statistics of the first data-parallel rank
count: they are broadcast after the backward, so that all ranks and checkpoints have the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from lightning_shardckpt.compat.torch_modules import BatchNorm, NormWithStatistics
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.fqn import walk_modules


@torch.no_grad()
def broadcast_statistics(root: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast the first rank's statistics of norms in training mode.

    Collective: every rank of ``group`` must call it.
    """
    if group.size() == 1:
        return
    norms = [m for _, m in walk_modules(root) if isinstance(m, NormWithStatistics) and m.training]
    statistics = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var) if buffer is not None]
    if not statistics:
        return
    flat = torch.cat([buffer.double().reshape(-1) for buffer in statistics])  # exact for every narrower dtype
    dist.broadcast(flat, group=group, group_src=0)
    for buffer, values in zip(statistics, torch.split(flat, [b.numel() for b in statistics]), strict=True):
        buffer.copy_(values.view_as(buffer))


def synchronize_batch_norms(root: nn.Module, group: dist.ProcessGroup, device: torch.device) -> None:
    """Convert the batch norms inside ``root`` to torch.nn.SyncBatchNorm, for ``sync_batchnorm=True``.

    SyncBatchNorm runs only on GPUs; this project has not run it.

    Raises:
        TopologyError: on CPUs, if there are batch norms.
    """
    norms = [name for name, module in root.named_modules() if isinstance(module, BatchNorm)]
    if not norms:
        return
    if device.type == "cpu":
        raise TopologyError(
            f"Trainer(sync_batchnorm=True): torch.nn.SyncBatchNorm, which would replace {norms[0]}, does not run on "
            "CPUs. Use GPUs, or a norm that does not depend on the batch, such as GroupNorm."
        )
    nn.SyncBatchNorm.convert_sync_batchnorm(root, group)  # type: ignore[no-untyped-call]  # torch's
