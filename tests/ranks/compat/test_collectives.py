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
