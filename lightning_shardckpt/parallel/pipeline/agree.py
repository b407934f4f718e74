"""Agreement of a group's ranks on whether what they did together worked on all of them.

A stage that fails must not leave the others waiting, and its error must be the one that everybody sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.pipelining import pickled, unpickled
from lightning_shardckpt.errors import RankError, TopologyError
from lightning_shardckpt.parallel.pipeline.p2p import PeerFailed

T = TypeVar("T")
_FINE, _FAILED, _PEER_FAILED = 0, 1, 2


def agree(what: str, work: Callable[[], T], group: dist.ProcessGroup, device: torch.device) -> T:
    """Do ``work`` and return its result if it worked on every rank of ``group``.

    Collective: every rank of ``group`` must call it, and ``work`` must end on each, whatever happens on others.

    Raises:
        Exception: the rank's own error, or the first failing rank's: TopologyError if it was one, else RankError.
    """
    failure: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except Exception as error:
        failure = error
    status = _FINE if failure is None else _PEER_FAILED if isinstance(failure, PeerFailed) else _FAILED
    every = [one for (one,) in gathered([status], group, device)]
    if not any(every):
        return result[0]
    first = next((rank for rank, one in enumerate(every) if one == _FAILED), None)
    box = [f"{type(failure).__name__}: {failure}", isinstance(failure, TopologyError)]
    source = dist.get_global_rank(group, first or 0)
    dist.broadcast_object_list(box, source, group=group)
    if failure is not None and status == _FAILED:
        failure.add_note(f"(on rank {dist.get_rank()}, while {what})")
        raise failure
    kind = TopologyError if box[1] else RankError
    raise kind(f"rank {source} failed while {what}: {box[0]}") from failure


Packed = tuple[Tensor, Tensor]
"""The bytes of an object, and how many."""


def packed(value: Any, group: dist.ProcessGroup, device: torch.device) -> Packed:
    """``value`` to be sent. No communication.

    Raises:
        TopologyError: if it cannot be pickled.
    """
    try:
        return pickled(value, group, device)
    except Exception as error:
        raise TopologyError(
            "what a step returns, logs and leaves in attributes is sent to the other pipeline stages, and this cannot "
            f"be pickled: {error}"
        ) from error


def broadcast_packed(value: Packed | None, source: int, group: dist.ProcessGroup, device: torch.device) -> Any:
    """The object that the rank ``source`` packed. Collective: every rank of ``group`` must call it."""
    count = torch.zeros(1, dtype=torch.int64, device=device) if value is None else value[1]
    dist.broadcast(count, source, group=group)
    content = torch.empty(int(count), dtype=torch.uint8, device=device) if value is None else value[0]
    dist.broadcast(content, source, group=group)
    return unpickled(content, count, group)


def gathered(numbers: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> list[list[int]]:
    """The numbers of every rank of ``group``. Collective: every rank of ``group`` must call it."""
    own = torch.tensor(list(numbers), dtype=torch.int64, device=device)
    found = [torch.zeros_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, own, group=group)
    return [one.tolist() for one in found]
