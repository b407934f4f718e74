"""What the all-gather of the package makes of dtypes that backends lack; run in the ranks of any device."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.compat.torch_distributed import all_gather_single


def gathered(device: str) -> list[object]:
    found = list[object]()
    for dtype in (torch.int16, torch.bool, torch.complex64, torch.bfloat16):
        own = (torch.arange(6) + dist.get_rank()).to(device, dtype).view(2, 3)
        every = own.new_empty(2, 2, 3)
        all_gather_single(every, own, group=None)
        found.append(every.tolist())
    return found
