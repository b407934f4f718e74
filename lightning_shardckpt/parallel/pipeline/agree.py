"""Agreement of a group's ranks on whether what they did together worked on all of them.

A stage that fails must not leave the others waiting, and its error must be the one that everybody sees. All groups here
are on gloo: what the ranks tell each other are numbers of the host, for which nobody waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import pickled, unpickled
from lightning_shardckpt.distributed.host_numbers import gather_numbers
from lightning_shardckpt.errors import RankError, UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.p2p import PeerFailed

T = TypeVar("T")
_FINE, _FAILED, _PEER_FAILED = 0, 1, 2
_INLINE = 512  # int64 numbers of a report that travel with the agreement on whether there is one
_interrupted = WeakSet[dist.ProcessGroup]()


@contextmanager
def refused_once_interrupted(what: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Surround what the ranks of ``group`` do together; what Ctrl-C or an exit left half done, none goes on from.

    The ranks are then at different places, and what they sent each other would be taken for that of their next step.

    Raises:
        UnsupportedCodeError: if something was interrupted before.
    """
    if group in _interrupted:
        raise UnsupportedCodeError(
            f"{what} cannot run: an earlier step was interrupted, and messages between the pipeline stages of ranks "
            f"{dist.get_process_group_ranks(group)} may still be on their way. Start the processes again, from the "
            "last checkpoint"
        )
    try:
        yield
    except Exception:  # all ranks have heard of it
        raise
    except BaseException:
        _interrupted.add(group)
        raise


def agree_on_numbers(
    what: str,
    work: Callable[[], Sequence[int]],
    count: int,
    group: dist.ProcessGroup,
) -> list[list[int]]:
    """Do ``work``, which gives ``count`` numbers; if it worked on every rank of ``group``, return those of each.

    Collective: every rank of ``group`` must call it, and ``work`` must end on each, whatever happens on others.

    Args:
        what: is agreed on, for the message of an error.
        work: gives the numbers of this rank.
        count: of them, the same on all ranks.
        group: whose ranks take part.

    Returns:
        The numbers of each rank, by its place in the group.

    Raises:
        Exception: the rank's own error, or the first failing rank's: in its class if that is TopologyError or
            UnsupportedCodeError, else RankError.
    """
    every: list[list[int]] = _met(what, work, lambda result: result, count, group)[1].tolist()
    return every


def agree_on_report(
    what: str, work: Callable[[], tuple[Packed | None, int]], source: int, group: dist.ProcessGroup
) -> tuple[Any, list[int]]:
    """Do ``work``, and return the object that it packed on the rank ``source``, and each rank's number; as
    `agree_on_numbers`."""
    (own, _), every = _met(what, work, _inline, 2 + _INLINE, group)
    numbers, row = every[:, 0].tolist(), every[source, 1:]
    count = int(row[0])
    content = row[1:].view(torch.uint8)
    if count > content.numel():
        content = torch.empty(count, dtype=torch.uint8) if own is None else own[0]
        dist.broadcast(content, group=group, group_src=source)
    return unpickled(content, torch.tensor([count]), group), numbers


def _met(
    what: str,
    work: Callable[[], T],
    numbers: Callable[[T], Sequence[int] | Tensor],
    count: int,
    group: dist.ProcessGroup,
) -> tuple[T, Tensor]:
    """Return the result of ``work``, and ``count`` numbers that each rank made of its own."""
    failure: Exception | None = None
    result: list[T] = []
    own = torch.zeros(1 + count, dtype=torch.int64)
    try:
        result.append(work())
        found = torch.as_tensor(numbers(result[0]), dtype=torch.int64)
        own[1 : 1 + len(found)] = found
    except Exception as error:
        failure = error
        own[0] = _PEER_FAILED if isinstance(failure, PeerFailed) else _FAILED
    table = gather_numbers(own, group)
    every = table[:, 0].tolist()
    if not any(every):
        return result[0], table[:, 1:]
    first = next((rank for rank, one in enumerate(every) if one == _FAILED), None)
    box = [f"{type(failure).__name__}: {failure}", isinstance(failure, UnsupportedCodeError)]
    source = dist.get_global_rank(group, first or 0)
    dist.broadcast_object_list(box, source, group=group)
    if failure is not None and int(own[0]) == _FAILED:
        failure.add_note(f"(on rank {dist.get_rank()}, while {what})")
        raise failure
    kind = UnsupportedCodeError if box[1] else RankError
    raise kind(f"rank {source} failed while {what}: {box[0]}") from failure


Packed = tuple[Tensor, Tensor]
"""The bytes of an object, and how many."""


def packed(value: Any, group: dist.ProcessGroup) -> Packed:
    """``value`` to be sent. No communication.

    Raises:
        UnsupportedCodeError: if it cannot be pickled.
    """
    try:
        return pickled(value, group, torch.device("cpu"))
    except Exception as error:
        raise UnsupportedCodeError(
            "what a step returns, logs and leaves in attributes is sent to the other pipeline stages, and this cannot "
            f"be pickled: {error}"
        ) from error


def _inline(result: tuple[Packed | None, int]) -> Tensor:
    """Return a rank's number, and, where there is a report, how many bytes it has, and the bytes if they are few."""
    value, number = result
    first = torch.tensor([number])
    if value is None:
        return first
    content, count = value[0], value[1].view(1)
    if content.numel() > _INLINE * count.itemsize:
        return torch.cat([first, count])
    words = torch.zeros(_INLINE, dtype=torch.int64)
    words.view(torch.uint8)[: content.numel()] = content
    return torch.cat([first, count, words])
