"""Exchange numbers between ranks from host memory over gloo, so that no rank waits for a GPU; in the main thread.

For a user's process group with only a GPU backend, a gloo group of the same ranks is created.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import all_gather_single, backend_name, group_of_name
from lightning_shardckpt.distributed.world import current_world, is_collective_failure, raise_if_lost
from lightning_shardckpt.errors import RankError

_WAIT_TIMED_OUT = "Operation timed out!"  # torch's message if a wait for a gloo collective ends; the collective goes on
_LOOK_S = 2.0
_gloo_groups: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # by name, which keeps no group alive


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a process group of the same ranks that takes CPU tensors; ``group`` itself if it does.

    Collective: every rank of ``group``, by default the world, must call it, the first time.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if backend_name(group, torch.device("cpu")) is not None:
        return group
    if group not in _gloo_groups:
        _gloo_groups[group] = new_gloo_group(dist.get_process_group_ranks(group)).group_name
    return group_of_name(_gloo_groups[group])


def new_gloo_group(ranks: list[int], *, timeout_s: float = 1800.0) -> dist.ProcessGroup:
    """Return a new gloo process group. Collective: each of ``ranks``, and no other rank, must call it."""
    timeout = timedelta(seconds=timeout_s)
    # in the split of NCCL's communicator, which local synchronization avoids, all ranks would have to take part
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
    return group


notices: list[Callable[[str, Collection[int], set[str]], None]] = []
"""For ``look_for_notices``; the list is emptied when the groups in which ranks wait are given up."""


def look_for_notices(purpose: str, ranks: Collection[int], seen: set[str]) -> None:
    """Raise an UnsupportedCodeError if one of ``ranks`` waits for this one elsewhere, for longer than a moment.

    Each wait calls it every few seconds, with its purpose, the ranks that it waits for, and what it has seen before.
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

    If it ends with an error, the collective may go on, so no later run of a Trainer begins in this world. Raises a
    RankError in place of gloo's if a rank is lost. Every few seconds, calls ``look``, by default `look_for_notices`
    with ``purpose`` and ``ranks``, those for which it waits, by default all.
    """
    assert work is not None  # since this rank is in the group
    look = look or partial(look_for_notices, purpose, range(dist.get_world_size()) if ranks is None else ranks, set())
    try:
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError as error:
                if _WAIT_TIMED_OUT not in str(error):
                    raise
            look()
            raise_if_lost()
    except BaseException as error:
        if dist.is_initialized():
            current_world().is_usable = False
            if is_collective_failure(error) and (lost := current_world().find_lost()) is not None:
                raise RankError(lost) from error
        raise


def gather_numbers(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the numbers of all ranks in host memory, one row each. Collective: every rank of `group` must call it."""
    ranks, own = host_group(group), numbers.detach().cpu().flatten()
    rows = own.new_empty(ranks.size() * own.numel())
    wait_for(all_gather_single(rows, own, group=ranks, async_op=True), ranks=dist.get_process_group_ranks(ranks))
    return rows.view(ranks.size(), *numbers.shape)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if ``flag`` is True on any rank. Collective: every rank of `group` must call it."""
    return bool(gather_numbers(torch.tensor(flag), group).any())


def reduce_tensor(tensor: Tensor, group: dist.ProcessGroup, reduce_op: dist.ReduceOp | str | None) -> Tensor:
    """Reduce a tensor over a group, in place, and return it. Collective: every rank of ``group`` must call it.

    Unlike Lightning's own, a mean of integers is not rounded down: Lightning divides sums of epochs by mean numbers of
    samples. Gradients remain those of this rank's value, so that a loss that is reduced for a log trains unchanged.
    ``reduce_op`` is torch's, or its name in any case; ``"mean"`` is ``"avg"``, and None is ``"sum"``.
    """
    op: Any = reduce_op or "sum"
    is_mean = isinstance(op, str) and op in ("mean", "avg")
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    total = tensor.to(torch.int64, copy=True) if is_mean and is_integer else tensor.detach()
    sums = is_mean and (is_integer or backend_name(group, tensor.device) == "gloo")  # which has no mean
    name = "sum" if sums else "avg" if is_mean else op
    op = getattr(dist.ReduceOp, name.upper()) if isinstance(name, str) else op
    work = dist.all_reduce(total, op=op, group=group, async_op=True)
    if tensor.is_cpu:
        wait_for(work, "a reduction", dist.get_process_group_ranks(group))
    else:
        work.wait()  # only the stream waits
    if is_mean and is_integer:
        mean = total / group.size()
        return mean.to(tensor.dtype) if bool((mean == mean.floor()).all()) else mean
    if sums:
        total.div_(group.size())
    return tensor


def pickle_to_tensor(value: Any) -> Tensor:
    """Pickle an object into a tensor of its bytes (uint8), for other ranks of this run."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def unpickle_tensor(content: Tensor) -> Any:
    """Return the object of bytes from `pickle_to_tensor`, after which other bytes may follow."""
    return pickle.loads(content.numpy().data)


def broadcast_object(value: Any, source: int = 0, group: dist.ProcessGroup | None = None) -> Any:
    """Return the value of the rank ``source`` in a group, by default the world, pickled for the others.

    Collective: every rank of ``group`` must call it.
    """
    group = host_group(group)
    if group.size() == 1:
        return value
    is_source, ranks = group.rank() == source, [dist.get_global_rank(group, source)]
    content = pickle_to_tensor(value if is_source else None)
    count = torch.tensor(content.numel())
    wait_for(dist.broadcast(count, group=group, group_src=source, async_op=True), "a broadcast", ranks)
    if not is_source:
        content = torch.empty(int(count), dtype=torch.uint8)
    wait_for(dist.broadcast(content, group=group, group_src=source, async_op=True), "a broadcast", ranks)
    return value if is_source else unpickle_tensor(content)


def on_device(numbers: Sequence[complex], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of the numbers on ``device``, without waiting for a GPU."""
    is_gpu = device.type == "cuda"
    return torch.tensor(numbers, dtype=dtype, pin_memory=is_gpu).to(device, non_blocking=is_gpu)


def wait_for_copies(device: torch.device) -> None:
    """Wait until all copies that were started on the current stream are complete, once for many of them."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class HostCopy:
    """An asynchronous copy of a tensor, which must not be written to any more, to pinned memory of the host."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._event = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.current_stream(tensor.device).record_event()

    def read(self) -> Tensor:
        """Return the copy in host memory; waits if it is not complete yet."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._host
