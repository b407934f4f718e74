"""Divide what replicas read, and let them give each other the rest.

Ranks that differ only along mesh axes on which a tensor is replicated (HSDP's first axis, tensor-parallel norms) hold
the same of it. Each may read and verify all of that, or a share of it and get the rest from the others. The mesh says
who shares. Ranks of one host have one page cache, from which each is faster alone; where a byte that two ranks read
crosses a network twice, sharing spares that. So it is done by default for an object store, and for ranks of several
hosts, if there is much to read.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from math import prod
from typing import TypedDict

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import spec_of
from lightning_shardckpt.compat.torch_distributed import all_gather_single, backend_name
from lightning_shardckpt.distributed.liveness import host
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.sources.source import ReadTarget, ShardedSource, Source
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.system.tuning import TUNING, Tuning

# ── exchange between replicas ─────────────────────────────────────────────────────────────────────────────────────────
# Exchange what replicas of live tensors have read, over their process group.
#
# Knows process groups, and nothing of where the bytes come from.


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


class PlannedReads(TypedDict):
    """The work of one rank if reads are shared: the bytes that it reads, those that it gets, and where it runs.

    As JSON, which is what a step of ranks exchanges.
    """

    read_bytes: int
    received_bytes: int
    host: str


def choose(
    wanted: bool | None, planned: Sequence[PlannedReads], *, high_latency: bool, tuning: Tuning = TUNING
) -> bool:
    """Decide whether replicas share what they read. Pure.

    Args:
        wanted: what the caller says; None to decide by the rest.
        planned: of every rank.
        high_latency: whether each read crosses a network, as in an object store.
        tuning: how much is worth it.

    >>> one, other = (PlannedReads(read_bytes=1 << 30, received_bytes=1 << 30, host=host) for host in ("a", "b"))
    >>> choose(None, [one, other], high_latency=False), choose(None, [one, one], high_latency=False)
    (True, False)
    """
    sharing = [rank for rank in planned if rank["received_bytes"]]
    if not sharing or wanted is not None:
        return bool(sharing and wanted)
    crosses_network = high_latency or len({rank["host"] for rank in planned}) > 1
    return crosses_network and min(rank["read_bytes"] for rank in sharing) >= tuning.shared_read_bytes


def is_high_latency(source: Source) -> bool:
    """Return whether each read of a source crosses a network.

    Other programs' checkpoints are read from local copies.
    """
    return isinstance(source, ShardedSource) and source.checkpoint.reader.high_latency


def split_tensor(shape: Shape, itemsize: int, count: int, piece_bytes: int) -> list[Box]:
    """Return at most ``count`` boxes of about the same size, each contiguous in a row-major tensor.

    They have ``piece_bytes`` at least: some blocks of a file, since both readers read the one at an edge.

    >>> [(box.start, box.stop) for box in split_tensor((1, 3, 1 << 20), 4, 2, 4 << 20)]
    [((0, 0, 0), (1, 1, 1048576)), ((0, 1, 0), (1, 3, 1048576))]
    """
    dim = next((d for d, n in enumerate(shape) if n > 1), None)
    pieces = min(count, prod(shape) * itemsize // piece_bytes)
    if dim is None or pieces < 2:
        return [Box.whole(shape)]
    pieces, length = min(pieces, shape[dim]), shape[dim]
    edges = [length * i // pieces for i in range(pieces + 1)]
    before, after = (0,) * dim, (0,) * (len(shape) - dim - 1)
    ones, rest = shape[:dim], shape[dim + 1 :]
    return [Box((*before, edges[i], *after), (*ones, edges[i + 1], *rest)) for i in range(pieces)]


def deal(sizes: Sequence[int], count: int) -> list[int]:
    """The owner of each piece, of ``count``: the largest pieces first, each to the one with the fewest bytes so far.

    >>> deal([1, 5, 2, 2], 2)
    [1, 0, 1, 1]
    """
    heap, taken = [(0, owner) for owner in range(count)], [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        load, taken[number] = heap[0]
        heapq.heapreplace(heap, (load + sizes[number], taken[number]))
    return taken


class _Group:
    """Replicas that share tensors, and which pieces each of them reads; all of them come to the same."""

    def __init__(self, process: dist.ProcessGroup, targets: Sequence[ReadTarget], tuning: Tuning) -> None:
        self._process, self._tuning = process, tuning
        self._shares: list[list[ReadTarget]] = [[] for _ in range(process.size())]
        pieces = [piece for target in targets for piece in _pieces(target, process.size(), tuning)]
        for piece, owner in zip(pieces, deal([p.local.nbytes for p in pieces], process.size()), strict=True):
            self._shares[owner].append(piece)
        self.mine = self._shares[process.rank()]
        self.others = [piece for share in self._shares if share is not self.mine for piece in share]

    def exchange(self) -> None:
        exchange(self._process, [[piece.local for piece in share] for share in self._shares], self._tuning)


def _pieces(target: ReadTarget, count: int, tuning: Tuning) -> list[ReadTarget]:
    boxes = split_tensor(tuple(target.local.shape), target.local.itemsize, count, tuning.shared_piece_bytes)
    if len(boxes) == 1:
        return [target]
    return [ReadTarget(target.component, target.key, target.tensor, target.fresh, box) for box in boxes]


def _nbytes(targets: Iterable[ReadTarget]) -> int:
    return sum(target.local.nbytes for target in targets)


class ReplicaReads:
    """One rank's share of a load's reads, and what it gets from others: planned, verified, filled and exchanged.

    Each rank reads by itself what is no DTensor, and what is in host memory where the mesh has NCCL only. The exchange
    is where the tensors are; on a GPU, with NCCL, it has not been run by the tests.

    Args:
        source: what the targets are of.
        wanted: whether to share; None to decide by what there is.
        high_latency: whether each read crosses a network.
        tuning: sizes.
    """

    def __init__(
        self, source: Source, wanted: bool | None, *, high_latency: bool = False, tuning: Tuning = TUNING
    ) -> None:
        self._source, self._wanted, self._high_latency, self._tuning = source, wanted, high_latency, tuning
        self._all, self._alone = list[ReadTarget](), list[ReadTarget]()  # what there is, and what nobody shares
        self._groups: list[_Group] = []

    def plan(self, targets: list[ReadTarget]) -> PlannedReads:
        """Divide the targets among replicas. Runs on every rank."""
        self._all, found = targets, dict[tuple[str, torch.device], tuple[dist.ProcessGroup, list[ReadTarget]]]()
        shared = list[tuple[ReadTarget, dist.ProcessGroup]]()
        for target in targets:
            group = None if self._wanted is False else group_of(target.tensor)
            if group is None:
                self._alone.append(target)
            else:
                shared.append((target, group))
        # by name: so each rank comes to the groups that it is in, and in them to the pieces, in one order of all ranks
        for target, group in sorted(shared, key=lambda one: (one[0].component, one[0].key)):
            found.setdefault((group.group_name, target.local.device), (group, []))[1].append(target)
        self._groups = [_Group(group, shared, self._tuning) for group, shared in found.values()]
        received = sum(_nbytes(group.others) for group in self._groups)
        return {"read_bytes": _nbytes(self._own), "received_bytes": received, "host": host()}

    @property
    def _own(self) -> list[ReadTarget]:
        return [*self._alone, *(piece for group in self._groups for piece in group.mine)]

    def choose(self, planned: list[PlannedReads]) -> bool:
        """Decide whether to share. Runs on rank 0."""
        return choose(self._wanted, planned, high_latency=self._high_latency, tuning=self._tuning)

    def verify(self, *, share: bool) -> None:
        """Verify what this rank reads, which is everything if nothing is shared. Runs on every rank."""
        if not share:
            self._alone, self._groups = self._all, []
        self._source.verify(self._own)

    def fill(self) -> None:
        """Fill what this rank reads. Runs on every rank."""
        self._source.fill(self._own)

    def exchange(self) -> None:
        """Fill the rest with what the others read. Collective: every rank must call it."""
        for group in self._groups:
            group.exchange()
