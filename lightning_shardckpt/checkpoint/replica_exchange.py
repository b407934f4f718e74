"""Exchange what replicas of live tensors have read, over their process group.

Knows process groups, and nothing of where the bytes come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.collectives import all_gather_single
from lightning_shardckpt.compat.dtensor import spec_of
from lightning_shardckpt.compat.process_group import backend_name
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.system.tuning import TUNING, Tuning


def group_of(tensor: torch.Tensor) -> dist.ProcessGroup | None:
    """The replicas of what is here of a tensor, along the largest mesh axis that has some; None if it is not shared.

    That is a plain tensor, one whose memory is not contiguous, or one in host memory where the mesh has NCCL only.
    """
    if not isinstance(tensor, DTensor):
        return None
    spec = spec_of(tensor)
    mesh, found = spec.device_mesh, [axis for axis, p in enumerate(spec.placements) if p.is_replicate()]
    replicated = [axis for axis in found if mesh.size(axis) > 1]
    if not replicated:
        return None
    local = local_tensor(tensor)
    if not local.nbytes or not local.is_contiguous():
        return None
    try:
        group = mesh.get_group(max(replicated, key=mesh.size))
    except RuntimeError:  # a mesh without groups
        return None
    backend = backend_name(group, local.device)
    return group if backend is not None and (backend == "gloo") == (local.device.type == "cpu") else None


def exchange(
    group: dist.ProcessGroup, shares: Sequence[Sequence[torch.Tensor]], tuning: Tuning = TUNING
) -> None:
    """Fill each share with what the rank of that number in the group has of it, all at once, in rounds of some MiB.

    Collective: every rank of the group must call it, with tensors of the same sizes; contiguous ones on one device.
    """
    mine, everything = _buffers(group, shares, tuning)
    size, me = mine.numel(), group.rank()
    for runs in zip_longest(*(_runs(share, size) for share in shares), fillvalue=()):
        for view, at in _placed(runs[me]):
            mine[at : at + view.numel()].copy_(view)
        all_gather_single(everything, mine, group=group)
        for owner, run in enumerate(runs):
            for view, at in _placed(run) if owner != me else ():
                view.copy_(everything[owner * size + at : owner * size + at + view.numel()])


def _buffers(
    group: dist.ProcessGroup, shares: Sequence[Sequence[torch.Tensor]], tuning: Tuning
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return new buffers for what this rank gives in a round, and for what all give."""
    longest = max(sum(tensor.nbytes for tensor in share) for share in shares)
    device = next(tensor.device for share in shares for tensor in share)
    room = tuning.exchange_buffer_bytes if device.type == "cpu" else tuning.gpu_exchange_buffer_bytes
    size = max(min(room // group.size(), longest), 1)
    mine, everything = (torch.empty(n * size, dtype=torch.uint8, device=device) for n in (1, group.size()))
    return mine, everything


def _runs(tensors: Sequence[torch.Tensor], size: int) -> Iterator[Sequence[torch.Tensor]]:
    """The bytes of the tensors, one after the other, as views: ``size`` bytes in each run, the rest in the last."""
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
