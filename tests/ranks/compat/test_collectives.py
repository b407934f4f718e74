"""The collectives with two names do under either what the simpler ones do."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.compat.collectives import all_gather_single, reduce_scatter_single
from tests.support.pool import run_ranks


def both() -> list[bool]:
    own = torch.arange(3.0) + 10 * dist.get_rank()
    listed = [torch.empty(3) for _ in range(2)]
    dist.all_gather(listed, own)
    gathered, part, parts = torch.empty(6), torch.empty(3), torch.arange(6.0) * (1 + dist.get_rank())
    at_once = all_gather_single(gathered, own, group=None)
    reduce_scatter_single(part, parts, group=dist.group.WORLD, async_op=True).wait()
    dist.all_reduce(parts)
    expected = parts.view(2, 3)[dist.get_rank()]
    return [at_once is None, torch.equal(gathered, torch.cat(listed)), torch.equal(part, expected)]


def test_each_rank_has_what_the_simpler_collectives_give() -> None:
    assert run_ranks(2, both) == [[True] * 3] * 2


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


def test_dtypes_that_backends_lack_travel_too() -> None:
    own = [torch.arange(6).view(2, 3) + rank for rank in range(2)]
    for rank, found in enumerate(run_ranks(2, gathered_and_reduced, "cpu")):
        for dtype, every in zip((torch.int16, torch.bool, torch.complex64, torch.bfloat16), found[:4], strict=True):
            assert every == [each.to(dtype).tolist() for each in own]
        total = (own[0] + own[1]).view(-1)[3 * rank : 3 * rank + 3]
        assert found[4:] == [total.to(torch.complex64).tolist(), total.float().tolist()]
