"""Numbers that ranks tell each other: out of host memory, over gloo, so that nothing waits for a GPU.

The strategies make process groups that have gloo for tensors of the CPU. A group that somebody else made for GPUs alone
gets one of the same ranks beside it. Only the main thread communicates here.
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

_STILL_WAITING = "Operation timed out!"
"""What torch says of a collective of gloo that goes on after a wait for it."""
_LOOK_S = 2.0
_beside: WeakKeyDictionary[dist.ProcessGroup, str] = WeakKeyDictionary()  # names, which keep no group alive


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Return a process group of the same ranks that takes tensors of the CPU; ``group`` itself if it does.

    Collective the first time: every rank of `group` must call it. ``None`` is the world.
    """
    group = group or dist.group.WORLD
    assert group is not None
    if backend_name(group, torch.device("cpu")) is not None:
        return group
    if group not in _beside:
        _beside[group] = new_gloo_group(dist.get_process_group_ranks(group)).group_name
    return group_of_name(_beside[group])


def new_gloo_group(ranks: list[int], *, timeout_s: float = 1800.0) -> dist.ProcessGroup:
    """Return a new process group of gloo. Collective: each of ``ranks``, and no other rank, must call it.

    Other ranks would have to take part in splitting NCCL's communicator, which a group of gloo has no use for.
    """
    timeout = timedelta(seconds=timeout_s)
    group: dist.ProcessGroup = dist.new_group(ranks, backend="gloo", timeout=timeout, use_local_synchronization=True)
    return group


def wait_for(work: dist.Work | None) -> None:
    """Wait for a collective of gloo, as long as no rank is lost.

    Raises:
        RankError: if one is.
    """
    assert work is not None  # this rank is in the group
    while not ends_within(work, _LOOK_S):
        raise_if_lost()


def ends_within(work: dist.Work, seconds: float) -> bool:
    """Wait for a collective of gloo, and return whether it ended; it goes on if it did not."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError as error:
        if _STILL_WAITING not in str(error):
            raise
        return False
    return True


def gathered(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the numbers of all ranks, in host memory, a row for each. Collective: every rank of `group` must call it.

    Waits for the device if ``numbers`` are on one.
    """
    ranks, own = host_group(group), numbers.detach().cpu().flatten()
    found = own.new_empty(ranks.size() * own.numel())
    wait_for(all_gather_single(found, own, group=ranks, async_op=True))
    return found.view(ranks.size(), *numbers.shape)


def any_rank(vote: bool, group: dist.ProcessGroup | None = None) -> bool:
    """Return whether one of the ranks says yes. Collective: every rank of `group` must call it."""
    return bool(highest(torch.tensor(int(vote)), group))


def highest(numbers: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return numbers of the host, each as the rank has it that has most. Collective, as `any_rank`."""
    wait_for(dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=host_group(group), async_op=True))
    return numbers


def on_device(numbers: Sequence[complex], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of these numbers; on a GPU, for which the host does not wait."""
    if device.type != "cuda":
        return torch.tensor(numbers, dtype=dtype, device=device)
    return torch.tensor(numbers, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def wait_for_copies(device: torch.device) -> None:
    """Let everything that was copied until now be there, on a GPU: one wait for all that is read next."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Copied:
    """A tensor of a device that is on its way to the host: made now, read later.

    Args:
        tensor: must not be written any more.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tensor
        if tensor.is_cuda:
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> Tensor:
        """Return the values, in host memory; wait if the copy has not come yet."""
        if self._event is not None and not self._event.query():  # type: ignore[no-untyped-call]  # torch's
            self._event.synchronize()
        return self._host
