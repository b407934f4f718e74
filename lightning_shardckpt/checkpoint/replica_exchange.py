"""Which ranks hold the same of a live tensor, and how do they get what one of them read?

Knows process groups, and nothing of where the bytes come from.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from lightning_shardckpt.state.geometry import local_tensor

_BUFFER_BYTES = 2 << 20  # of one round, over all ranks of a group; gloo needs as much and is no faster with more
_GPU_BUFFER_BYTES = 32 << 20
_TRIALS = 3  # rounds


def group_of(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The replicas of what is here of a tensor, along the largest mesh axis that has some; None if it is not shared.

    That is a plain tensor, one whose memory is not contiguous, or one in host memory where the mesh has NCCL only.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh = tensor.device_mesh
    replicated = [axis for axis, p in enumerate(tensor.placements) if isinstance(p, Replicate) and mesh.size(axis) > 1]
    if not replicated:
        return None
    local = local_tensor(tensor)
    if not local.nbytes or not local.is_contiguous():
        return None
    try:
        group = mesh.get_group(max(replicated, key=mesh.size))
        backend = group._get_backend(local.device).name()
    except RuntimeError:  # a mesh without groups, or a group without a backend for this device
        return None
    return group if (backend == "gloo") == (local.device.type == "cpu") else None


def exchange(group: dist.ProcessGroup, shares: Sequence[Sequence[torch.Tensor]]) -> None:
    """Fill each share with what the rank of that number in the group has of it, all at once, in rounds of some MiB.

    Collective: every rank of the group must call it, with tensors of the same sizes; contiguous ones on one device.
    """
    mine, everything = _buffers(group, shares)
    size, me = mine.numel(), group.rank()
    for runs in zip_longest(*(_runs(share, size) for share in shares), fillvalue=()):
        for view, at in _placed(runs[me]):
            mine[at : at + view.numel()].copy_(view)
        dist.all_gather_single(everything, mine, group=group)
        for owner, run in enumerate(runs):
            for view, at in _placed(run) if owner != me else ():
                view.copy_(everything[owner * size + at : owner * size + at + view.numel()])


def trial(group: dist.ProcessGroup, shares: Sequence[Sequence[torch.Tensor]]) -> tuple[int, float]:
    """Bytes that some rounds of such an exchange bring, and the seconds that they take; changes nothing.

    Collective: every rank of the group must call it.
    """
    mine, everything = _buffers(group, shares)
    started = 0.0
    for number in range(1 + _TRIALS):
        if number == 1:  # in the first round the ranks may still have to connect
            started = time.monotonic()
        mine.zero_()
        dist.all_gather_single(everything, mine, group=group)
        everything.add_(1)[-1].item()  # about what copying it into place takes; waits for a GPU
    return _TRIALS * (everything.numel() - mine.numel()), time.monotonic() - started


def _buffers(group: dist.ProcessGroup, shares: Sequence[Sequence[torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """For what this rank gives in a round, and for what all give."""
    longest = max(sum(tensor.nbytes for tensor in share) for share in shares)
    device = next(tensor.device for share in shares for tensor in share)
    room = _BUFFER_BYTES if device.type == "cpu" else _GPU_BUFFER_BYTES
    size = max(min(room // group.size(), longest), 1)
    mine, everything = (torch.empty(n * size, dtype=torch.uint8, device=device) for n in (1, group.size()))
    return mine, everything


def _runs(tensors: Sequence[torch.Tensor], size: int) -> Iterator[Sequence[torch.Tensor]]:
    """The bytes of the tensors, one behind the other, as views: ``size`` bytes in each run, the rest in the last."""
    run, room = list[torch.Tensor](), size
    for tensor in tensors:
        content = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)  # it is contiguous: its memory
        while content.numel():
            run.append(content[:room])
            room, content = room - run[-1].numel(), content[room:]
            if not room:
                yield run
                run, room = [], size
    if run:
        yield run


def _placed(run: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    """The views, each with the offset of its bytes in the run."""
    at = 0
    for view in run:
        yield view, at
        at += view.numel()
