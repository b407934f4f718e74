"""Exchange numbers between ranks from host memory over gloo, so that no rank waits for a GPU.

The strategies create process groups with gloo for CPU tensors. For a user's group with only a GPU backend, a gloo group
of the same ranks is created. Only the main thread communicates here.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_shardckpt.compat.torch_distributed import all_gather_single, backend_name, group_of_name
from lightning_shardckpt.distributed.heartbeat import raise_if_lost

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


def wait_for(work: dist.Work | None) -> None:
    """Wait for a gloo collective.

    Raises:
        RankError: if a rank is lost meanwhile.
    """
    assert work is not None  # since this rank is in the group
    while not ends_within(work, _LOOK_S):
        raise_if_lost()


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
    wait_for(all_gather_single(rows, own, group=ranks, async_op=True))
    return rows.view(ranks.size(), *numbers.shape)


def any_rank(flag: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if ``flag`` is True on any rank. Collective: every rank of `group` must call it."""
    return bool(max_over_ranks(torch.tensor(int(flag)), group))


def max_over_ranks(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce a CPU tensor in place to the elementwise maximum over the ranks, and return it.

    Collective: every rank of `group` must call it.
    """
    wait_for(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=host_group(group), async_op=True))
    return numbers


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
