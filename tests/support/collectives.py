"""What both collectives of the package make of dtypes that backends lack; run in the ranks of any device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import all_gather_single, reduce_scatter_single


def gathered_and_reduced(device: str) -> list[object]:
    found = list[object]()
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.bfloat16):
        own = (torch.arange(6) + dist.get_rank()).to(device, dtype).view(2, 3)
        every = own.new_empty(2, 2, 3)
        all_gather_single(every, own, group=None)
        found.append(every.tolist())
    for dtype in (torch.complex64, torch.float32):
        parts = (torch.arange(6) + dist.get_rank()).to(device, dtype)
        part = parts.new_empty(3)
        reduce_scatter_single(part, parts, group=None)
        found.append(part.tolist())
    return found
