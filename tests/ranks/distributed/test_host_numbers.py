"""Numbers and values of the ranks, exchanged in host memory. Oracle: Lightning's spelling, and arithmetic."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.distributed.host_numbers import broadcast_object, reduce_tensor
from tests.support.pool import run_ranks


def reductions() -> list[float]:
    value, world = torch.tensor(float(dist.get_rank() + 1)), dist.group.WORLD
    assert world is not None
    return [reduce_tensor(value.clone(), world, op).item() for op in ("mean", "sum", dist.ReduceOp.MAX)]


def test_tensors_are_reduced_as_lightning_spells_it() -> None:
    assert run_ranks(2, reductions) == [[1.5, 3.0, 2.0]] * 2


def means_of_integers() -> list[tuple[torch.dtype, float]]:
    world = dist.group.WORLD
    assert world is not None
    values = [torch.tensor(number + dist.get_rank() * step) for number, step in ((1, 1), (1, 2))]
    found = [reduce_tensor(value, world, "mean") for value in values]
    return [(one.dtype, one.item()) for one in found] + [(values[0].dtype, values[0].item())]


def test_a_mean_of_integers_is_not_rounded() -> None:
    for rank, found in enumerate(run_ranks(2, means_of_integers)):
        assert found == [(torch.float32, 1.5), (torch.int64, 2), (torch.int64, 1 + rank)]


def broadcast_from(source: int) -> list[object]:
    values = [{"rank": dist.get_rank(), "path": "x" * 1000}, None, [dist.get_rank()]]
    return [broadcast_object(value, source) for value in values]


def test_a_broadcast_value_is_that_of_its_source() -> None:
    for source in (0, 1):
        assert run_ranks(2, broadcast_from, source) == [[{"rank": source, "path": "x" * 1000}, None, [source]]] * 2
