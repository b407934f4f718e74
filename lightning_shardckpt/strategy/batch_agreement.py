"""Agree before every batch whether to end, and that the ranks have not drifted apart, in one reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors import written_numbers
from lightning_shardckpt.strategy.replicated_values import ReplicatedValues


def any_rank_told(
    told: bool, meshes: Meshes, device: torch.device, values: ReplicatedValues | None = None
) -> bool:
    """Return whether any rank was told to end.

    Collective: every rank of the world must call it.

    Args:
        told: whether this one was.
        meshes: of the topology.
        device: where the ranks meet.
        values: the next of which are compared, too.

    Raises:
        TopologyError: if ranks wrote different numbers into sharded tensors since they met last, or have other values
            where they must have the same.
    """
    votes = [int(told), *written_numbers.votes(meshes.pipeline_rank, meshes.topology.pipeline)]
    found = torch.tensor(votes, device=device)
    if values is not None:
        found = torch.cat([found, _votes_on(values, meshes, device)])
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    anybody, *maxima = found.tolist()
    if written_numbers.differ(maxima[: len(votes) - 1]):
        raise TopologyError(
            "the ranks wrote different numbers into sharded parameters or optimizer state since the last batch, "
            "so their shards belong to different models now. Here the last was "
            f"{written_numbers.last_noted()}. Reduce "
            "what is computed from a rank's own batch before it is used: self.all_gather(loss).mean(), or "
            "self.log(…, sync_dist=True) for what schedulers and callbacks read."
        )
    if values is not None and written_numbers.differ(maxima[len(votes) - 1 :]):
        values.refuse(meshes.data_parallel_group, device)
    return bool(anybody)


def _votes_on(values: ReplicatedValues, meshes: Meshes, device: torch.device) -> Tensor:
    """Return this rank's part of a maximum over all ranks, as `written_numbers.votes`: each data-parallel group has its
    place."""
    digest, tensor = values.digest(device), meshes.topology.tensor
    place = meshes.pipeline_rank * tensor + (meshes.root.get_local_rank("tensor") if tensor > 1 else 0)
    found = torch.full((meshes.topology.pipeline * tensor, 2), written_numbers.NOTHING, device=device)
    found[place] = torch.stack([digest, -digest])
    return found.flatten()
