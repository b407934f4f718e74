"""Exchange numbers between ranks from host memory over gloo, so that no rank waits for a GPU.

The strategies create process groups with gloo for CPU tensors. For a user's group with only a GPU backend, a gloo group
of the same ranks is created. Only the main thread communicates here.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import (
    all_gather_single,
    backend_name,
    group_of_name,
)
from lightning_shardckpt.distributed.world import current_world, find_lost, is_collective_failure, raise_if_lost
from lightning_shardckpt.errors import RankError

_WAIT_TIMED_OUT = "Operation timed out!"
"""torch's message if a wait for a gloo collective timed out; the collective goes on."""
_LOOK_S = 2.0
_gloo_groups: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # by name, which keeps no group alive


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a process group of the same ranks that takes CPU tensors; ``group`` itself if it does.

    Collective: every rank of `group` must call it, the first time. ``None`` is the world.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if backend_name(group, torch.device("cpu")) is not None:
        return group
    if group not in _gloo_groups:
        _gloo_groups[group] = new_gloo_group(dist.get_process_group_ranks(group)).group_name
    return group_of_name(_gloo_groups[group])


def new_gloo_group(ranks: list[int], *, timeout_s: float = 1800.0) -> dist.ProcessGroup:
    """Return a new gloo process group. Collective: each of ``ranks``, and no other rank, must call it.

    ``use_local_synchronization`` avoids the split of NCCL's communicator, in which all ranks would have to take part.
    """
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
    return group


Notice: TypeAlias = Callable[[str, Collection[int], set[str]], None]
notices: list[Notice] = []
"""Called by each wait every few seconds, with its purpose, the ranks that it waits for, and what it has seen before.

They raise if one of these ranks waits for this one elsewhere. The list is emptied when the groups in which ranks wait
are given up."""


def look_for_notices(purpose: str, ranks: Collection[int], seen: set[str]) -> None:
    """Raise an UnsupportedCodeError if one of ``ranks`` waits for this one elsewhere, for longer than a moment.

    Args:
        purpose: of the wait of this rank, for the message.
        ranks: for which this rank waits.
        seen: the same set in each look of one wait.
    """
    for notice in notices:
        notice(purpose, ranks, seen)


def wait_for(
    work: dist.Work | None,
    purpose: str = "an agreement of the ranks",
    ranks: Collection[int] | None = None,
    look: Callable[[], None] | None = None,
) -> None:
    """Wait for a gloo collective; every wait of this package for other ranks in a collective is one of these.

    If it ends with an error, the connections are of no use any more, since the collective may go on: no later run of
    a Trainer begins in this world.

    Args:
        work: the collective.
        purpose: for messages.
        ranks: for which it waits; None for all of the world.
        look: called every few seconds, in place of `look_for_notices`.

    Raises:
        RankError: if a rank is lost meanwhile, in place of gloo's error.
        UnsupportedCodeError: if a rank waits for this one elsewhere.
    """
    assert work is not None  # since this rank is in the group
    look = look or partial(look_for_notices, purpose, range(dist.get_world_size()) if ranks is None else ranks, set())
    try:
        while not ends_within(work, _LOOK_S):
            look()
            raise_if_lost()
    except BaseException as error:
        if dist.is_initialized():
            current_world().is_usable = False
        lost = find_lost() if is_collective_failure(error) else None
        if lost is not None:
            raise RankError(lost) from error
        raise


def ends_within(work: dist.Work, seconds: float) -> bool:
    """Wait for a gloo collective for up to ``seconds``; return True if it ended. After False it goes on."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if _WAIT_TIMED_OUT not in str(error):
            raise
        return False
    return True


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the numbers of all ranks in host memory, one row per rank. Collective: every rank of `group` must call it.

    Waits for the device if ``numbers`` is on one.
    """
    ranks, own = host_group(group), numbers.detach().cpu().flatten()
    rows = own.new_empty(ranks.size() * own.numel())
    wait_for(all_gather_single(rows, own, group=ranks, async_op=True), ranks=dist.get_process_group_ranks(ranks))
    return rows.view(ranks.size(), *numbers.shape)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if ``flag`` is True on any rank. Collective: every rank of `group` must call it."""
    return bool(max_over_ranks(torch.tensor(int(flag)), group))


def max_over_ranks(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce a CPU tensor in place to the elementwise maximum over the ranks, and return it.

    Collective: every rank of `group` must call it.
    """
    ranks = host_group(group)
    work = dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=ranks, async_op=True)
    wait_for(work, ranks=dist.get_process_group_ranks(ranks))
    return numbers


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, reduce_op: dist.ReduceOp | str | None) -> Tensor:
    """Reduce a tensor over a group, in place, and return it. Collective: every rank of ``group`` must call it.

    Unlike Lightning's own, a mean of integers is not rounded down: Lightning divides sums of epochs by mean numbers of
    samples. Gradients remain those of this rank's value, so that a loss that is reduced for a log trains unchanged.

    Args:
        tensor: on any device.
        group: the ranks.
        reduce_op: of torch, or its name in any case; ``"mean"`` is ``"avg"``, and None is ``"sum"``.
    """
    name = {"mean": "avg"}.get(reduce_op, reduce_op) if isinstance(reduce_op, str) else None
    is_mean, total = name == "avg", tensor.detach()
    if is_mean and not (tensor.is_floating_point() or tensor.is_complex()):
        _reduce(total := tensor.to(torch.int64, copy=True), group, dist.ReduceOp.SUM)
        mean = total / group.size()
        return mean.to(tensor.dtype) if bool((mean == mean.floor()).all()) else mean
    if is_mean and backend_name(group, tensor.device) == "gloo":  # which has no mean
        _reduce(total, group, dist.ReduceOp.SUM)
        total.div_(group.size())
    else:
        _reduce(total, group, getattr(dist.ReduceOp, name.upper()) if name else reduce_op or dist.ReduceOp.SUM)
    return tensor


def _reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    work = dist.all_reduce(tensor, op=op, group=group, async_op=True)
    if tensor.is_cpu:
        wait_for(work, "a reduction", dist.get_process_group_ranks(group))
    else:
        work.wait()  # only the stream waits


def pickle_to_tensors(value: Any) -> tuple[Tensor, Tensor]:
    """Pickle an object into tensors of its bytes (uint8) and their number (int64), for other ranks of this run."""
    content = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return content, torch.tensor([content.numel()])


def unpickle_tensor(content: Tensor) -> Any:
    """Return the object of bytes from `pickle_to_tensors`, after which other bytes may follow."""
    return pickle.loads(content.numpy().data)


def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of one rank, pickled and unpickled on the others.

    Collective: every rank of ``group`` must call it.

    Args:
        value: of this rank.
        source: the rank in ``group`` whose value is returned.
        group: the ranks; None for the world.
    """
    group = host_group(group)
    if group.size() == 1:
        return value
    is_source, ranks = group.rank() == source, [dist.get_global_rank(group, source)]
    content, count = pickle_to_tensors(value if is_source else None)
    wait_for(dist.broadcast(count, group=group, group_src=source, async_op=True), "a broadcast", ranks)
    if not is_source:
        content = torch.empty(int(count), dtype=torch.uint8)
    wait_for(dist.broadcast(content, group=group, group_src=source, async_op=True), "a broadcast", ranks)
    return value if is_source else unpickle_tensor(content)


def on_device(numbers: Sequence[complex], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of the numbers on ``device``, without waiting for a GPU."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Wait until all copies that were started on the current stream are complete, once for many of them."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class HostCopy:
    """An asynchronous copy of a tensor to the host: started at construction, read later.

    Args:
        tensor: must not be written to any more.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Return the copy in host memory; waits if it is not complete yet."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]  # torch's
            self._event.synchronize()
        return self._host
