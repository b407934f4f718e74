"""Agree before every batch whether to end, and that the ranks have not drifted apart, in one reduction."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.parallel.sharding.mesh import Meshes
from lightning_shardckpt.parallel.tensors import written_numbers


def any_rank_told(told: bool, meshes: Meshes, device: torch.device) -> bool:
    """Return whether any rank was told to end.

    Collective: every rank of the world must call it.

    Raises:
        TopologyError: if ranks wrote different numbers into sharded tensors since they met last.
    """
    votes = [int(told), *written_numbers.votes(meshes.pipeline_rank, meshes.topology.pipeline)]
    found = torch.tensor(votes, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    anybody, *maxima = found.tolist()
    if written_numbers.differ(maxima):
        raise TopologyError(
            "the ranks wrote different numbers into sharded parameters or optimizer state since the last batch, "
            "so their shards belong to different models now. Here the last was "
            f"{written_numbers.last_noted()}. Reduce "
            "what is computed from a rank's own batch before it is used: self.all_gather(loss).mean(), or "
            "self.log(…, sync_dist=True) for what schedulers and callbacks read."
        )
    return bool(anybody)
