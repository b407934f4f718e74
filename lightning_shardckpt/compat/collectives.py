"""Collectives whose names differ between versions of torch. Checked with torch 2.12 to 2.15.

``all_gather_into_tensor`` and ``reduce_scatter_tensor`` are called ``all_gather_single`` and ``reduce_scatter_single``
since torch 2.13, which warns of the old names; torch 2.12 has these alone. They are looked up at each call, so that
`pipelining.watched_collectives` sees it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
_REDUCE_SCATTER = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"


def all_gather_single(output: Tensor, own: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """Fill ``output`` with the ``own`` of each rank in turn. Collective: every rank of ``group`` must call it.

    Args:
        output: contiguous, with as many elements as all ranks have.
        own: contiguous, of the same shape on every rank.
        group: None for the world.
        async_op: return at once.

    Returns:
        The work to wait for, with ``async_op``; else None.
    """
    return getattr(dist, _ALL_GATHER)(_bytes(output), _bytes(own), group=group, async_op=async_op)


def reduce_scatter_single(
    output: Tensor, all_parts: Tensor, *, group: dist.ProcessGroup | None, async_op: bool = False
) -> Any:
    """Fill ``output`` with the ranks' sum of this rank's part. Collective: every rank of ``group`` must call it.

    Args:
        output: contiguous, of the shape of a part.
        all_parts: contiguous, the parts of all ranks in turn.
        group: None for the world.
        async_op: return at once.

    Returns:
        The work to wait for, with ``async_op``; else None.
    """
    if output.is_complex():  # which NCCL lacks
        output, all_parts = torch.view_as_real(output), torch.view_as_real(all_parts)
    return getattr(dist, _REDUCE_SCATTER)(output, all_parts, group=group, async_op=async_op)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a tensor as it travels: NCCL lacks complex and short dtypes, gloo others."""
    return tensor.view(-1).view(torch.uint8)
