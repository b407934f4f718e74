"""Numbers and values of the ranks, exchanged in host memory. Oracle: Lightning's spelling, and arithmetic."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.distributed.host_numbers import broadcast_object, reduce_tensor
from tests.support.pool import run_ranks


def exchange() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    value = torch.tensor(float(rank + 1))
    found = [reduce_tensor(value.clone(), world, op).item() for op in ("mean", "sum", dist.ReduceOp.MAX)]
    assert found == [1.5, 3.0, 2.0]
    integers = [torch.tensor(1 + rank), torch.tensor(1 + 2 * rank)]
    means = [reduce_tensor(value, world, "mean") for value in integers]
    assert [(one.dtype, one.item()) for one in means] == [(torch.float32, 1.5), (torch.int64, 2)], "not rounded"
    assert integers[0] == 1 + rank
    for source in (0, 1):
        sent = [{"rank": rank, "path": "x" * 1000}, None, [rank]]
        expected = [{"rank": source, "path": "x" * 1000}, None, [source]]
        assert [broadcast_object(value, source) for value in sent] == expected


def test_numbers_are_reduced_as_lightning_spells_it_and_values_are_those_of_their_source() -> None:
    run_ranks(2, exchange)
