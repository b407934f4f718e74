"""Agreement of the ranks of a pipeline on results and failures.

A failure of one stage is raised on all ranks, and no rank is left waiting. All groups here use gloo and exchange
numbers from host memory, so no rank waits for its device: GPU tensors in a report are copied without a wait, and read
when it is pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_tensors import tree_map
from lightning_shardckpt.distributed.host_numbers import (
    HostCopy,
    gather_numbers,
    on_device,
    pickle_to_tensor,
    unpickle_tensor,
)
from lightning_shardckpt.errors import RankError, UnsupportedCodeError
from lightning_shardckpt.parallel.pipeline.p2p import PeerFailed

_FAILED, _PEER_FAILED = 1, 2
_INLINE = 512  # int64 numbers: a smaller report is sent together with the status of the ranks
_interrupted = WeakSet[dist.ProcessGroup]()


@contextmanager
def refuse_after_interrupt(name: str, group: dist.ProcessGroup) -> Iterator[None]:
    """Run a step of the ranks of ``group``, unless Ctrl-C or an exit interrupted an earlier one.

    After an interruption, messages of that step may be pending, and the next step would receive them as its own.

    Raises:
        UnsupportedCodeError: if an earlier step was interrupted.
    """
    if group in _interrupted:
        raise UnsupportedCodeError(
            f"{name} cannot run: an earlier step was interrupted, and messages between the pipeline stages of ranks "
            f"{dist.get_process_group_ranks(group)} may still be pending. Start the processes again, from the last "
            "checkpoint"
        )
    try:
        yield
    except Exception:  # raised on all ranks
        raise
    except BaseException:
        _interrupted.add(group)
        raise


def agree_on_numbers(
    name: str, work: Callable[[], Sequence[int] | Tensor], count: int, group: dist.ProcessGroup
) -> Tensor:
    """Call ``work`` on every rank, and return its numbers, by rank in ``group``; filled up with zeros to ``count``.

    Collective: every rank of ``group`` must call it, and ``work`` must end on each, even if it fails on others.

    Raises:
        Exception: this rank's own error; else the first rank's, as RankError or UnsupportedCodeError.
    """
    failure: Exception | None = None
    own = torch.zeros(1 + count, dtype=torch.int64)  # a status, then the numbers
    try:
        numbers = torch.as_tensor(work(), dtype=torch.int64)
        own[1 : 1 + len(numbers)] = numbers
    except Exception as error:
        failure = error
        own[0] = _PEER_FAILED if isinstance(failure, PeerFailed) else _FAILED
    table = gather_numbers(own, group)
    statuses = table[:, 0].tolist()
    if not any(statuses):
        return table[:, 1:]
    first = statuses.index(_FAILED) if _FAILED in statuses else 0
    notes = getattr(failure, "__notes__", ())
    report = ["\n".join([f"{type(failure).__name__}: {failure}", *notes]), isinstance(failure, UnsupportedCodeError)]
    source = dist.get_global_rank(group, first)
    dist.broadcast_object_list(report, source, group=group)
    if failure is not None and int(own[0]) == _FAILED:
        failure.add_note(f"(on rank {dist.get_rank()}, while {name})")
        raise failure
    kind = UnsupportedCodeError if report[1] else RankError
    raise kind(f"rank {source} failed while {name}: {report[0]}") from failure


def agree_on_report(
    name: str, work: Callable[[], tuple[Any, int]], source: int, group: dist.ProcessGroup
) -> tuple[Any, list[int]]:
    """Call ``work`` on every rank, and return the report of rank ``source`` of ``group`` and the number of each rank.

    Collective, with the errors of `agree_on_numbers`.
    """
    own = list[Tensor]()

    def encode() -> Tensor:
        """Return the number; on the source also the size of its report, and the pickled bytes if they are few."""
        report, number = work()
        row = torch.zeros(2 + _INLINE, dtype=torch.int64)
        row[0] = number
        if group.rank() == source:
            try:
                content = pickle_to_tensor(report)
            except Exception as error:
                raise UnsupportedCodeError(
                    "a pipelined step sends its output, its logged values and changed attributes to the other pipeline "
                    f"stages, and one of them cannot be pickled: {error}"
                ) from error
            own.append(content)
            row[1] = size = content.numel()
            if size <= _INLINE * row.itemsize:
                row[2:].view(torch.uint8)[:size] = content
        return row

    table = agree_on_numbers(name, encode, 2 + _INLINE, group)
    size, content = int(table[source, 1]), table[source, 2:].view(torch.uint8)
    if size > content.numel():
        content = own[0] if own else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(content, group=group, group_src=source)
    return unpickle_tensor(content), table[:, 0].tolist()


# ── values in reports ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Number:
    """A 0-dim tensor as a number, since pickling a tensor takes half a millisecond."""

    value: complex
    dtype: torch.dtype


class _GpuTensor:
    """A GPU tensor that is being copied; it is unpickled as a tensor or number in host memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = HostCopy(tensor.resolve_conj().resolve_neg())

    def __reduce__(self) -> tuple[Any, ...]:
        return _identity, (_encode(self._copy.read()),)


def _identity(value: Any) -> Any:
    return value


def _encode(tensor: Tensor) -> Any:
    return _Number(tensor.item(), tensor.dtype) if type(tensor) is Tensor and not tensor.ndim else tensor


def to_portable(value: Any) -> Any:
    """Return a nested structure to be pickled, with tensors detached and in host memory; `from_portable` reverts it.

    Waits for no device. Pickling waits for the copies, once for all after `wait_for_copies`.
    """

    def convert(item: Any) -> Any:
        if not isinstance(item, Tensor):
            return item
        return _GpuTensor(item.detach()) if item.is_cuda else _encode(item.detach().cpu().clone())

    return tree_map(convert, value)


def from_portable(value: Any, device: torch.device) -> Any:
    """Return an unpickled structure of `to_portable` with its tensors on ``device``. Waits for no device."""

    def convert(item: Any) -> Any:
        if isinstance(item, _Number):
            return on_device([item.value], item.dtype, device)[0]
        if not isinstance(item, Tensor) or device.type != "cuda":
            return item.to(device) if isinstance(item, Tensor) else item
        return item.pin_memory().to(device, non_blocking=True)

    return tree_map(convert, value)
