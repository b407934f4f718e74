"""Which replica reads what, and how do the others get it?

Ranks that differ only along mesh axes on which a tensor is replicated (HSDP's first axis, tensor-parallel norms) hold
the same of it. Each may read and verify all of that, which is fastest from a page cache; or a share of it, and get the
rest from the others, which spares a shared file system. The mesh says who shares; what is faster is measured.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Sequence
from math import prod
from typing import TypedDict

import torch
import torch.distributed as dist

from lightning_shardckpt.box import Box, Shape
from lightning_shardckpt.exchange import exchange, group_of, trial
from lightning_shardckpt.sources import Source, Target

MEASURED_BYTES = 16 << 20
"""A rank that reads less learns nothing of the storage from it."""

_PIECE_BYTES = 4 << 20  # what a tensor is cut into: some blocks, since the one at an edge is read by both sides


class Measured(TypedDict):
    """What a rank read and how long that took, and of each of its groups what the others can give it.

    ``groups``: bytes to get, then bytes that a trial got and the seconds it took.
    """

    read_bytes: int
    read_s: float
    groups: list[tuple[int, int, float]]


def choose(wanted: bool | None, planned: Sequence[tuple[int, int]]) -> bool | None:
    """Whether to share, from what every rank would read and what it would get; None: that is to be measured.

    Pure.

    >>> choose(None, [(1 << 30, 1 << 30), (4096, 0)]), choose(None, [(4096, 4096)]), choose(True, [(4096, 0)])
    (None, False, False)
    """
    reads = [own for own, rest in planned if rest]
    if not reads or wanted is not None:
        return bool(reads and wanted)
    return None if min(reads) >= MEASURED_BYTES else False


def is_faster(reports: Sequence[Measured]) -> bool:
    """Whether the slowest rank gets the rest sooner from the others than from the storage. Pure.

    Ranks that read too little to tell how long it takes settle it: no. That a load reads most bytes a second time is
    left out, since the page cache often has them then.
    """
    sharing = [report for report in reports if report["groups"]]
    if not sharing or min(report["read_bytes"] for report in sharing) < MEASURED_BYTES:
        return False
    read_s = [sum(rest for rest, _, _ in r["groups"]) * r["read_s"] / r["read_bytes"] for r in sharing]
    exchange_s = [sum(rest * seconds / got for rest, got, seconds in r["groups"]) for r in sharing]
    return max(exchange_s) < max(read_s)


def cut(shape: Shape, itemsize: int, count: int) -> list[Box]:
    """At most ``count`` boxes of about the same size, each contiguous in a row-major tensor; one for a small tensor.

    >>> [(box.start, box.stop) for box in cut((1, 3, 1 << 20), 4, 2)]
    [((0, 0, 0), (1, 1, 1048576)), ((0, 1, 0), (1, 3, 1048576))]
    """
    dim = next((d for d, n in enumerate(shape) if n > 1), None)
    pieces = min(count, prod(shape) * itemsize // _PIECE_BYTES)
    if dim is None or pieces < 2:
        return [Box.whole(shape)]
    pieces, length = min(pieces, shape[dim]), shape[dim]
    edges = [length * i // pieces for i in range(pieces + 1)]
    before, behind = (0,) * dim, (0,) * (len(shape) - dim - 1)
    ones, rest = shape[:dim], shape[dim + 1 :]
    return [Box((*before, edges[i], *behind), (*ones, edges[i + 1], *rest)) for i in range(pieces)]


def deal(sizes: Sequence[int], count: int) -> list[int]:
    """Who of ``count`` takes which piece: the largest first, each to the one with the fewest bytes so far.

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

    def __init__(self, process: dist.ProcessGroup, targets: Sequence[Target]) -> None:
        self._process = process
        self._shares: list[list[Target]] = [[] for _ in range(process.size())]
        pieces = [piece for target in targets for piece in _pieces(target, process.size())]
        for piece, owner in zip(pieces, deal([p.local.nbytes for p in pieces], process.size()), strict=True):
            self._shares[owner].append(piece)
        self.mine = self._shares[process.rank()]
        self.others = [piece for share in self._shares if share is not self.mine for piece in share]

    def exchange(self) -> None:
        exchange(self._process, self._memory())

    def trial(self) -> tuple[int, int, float]:
        return _nbytes(self.others), *trial(self._process, self._memory())

    def _memory(self) -> list[list[torch.Tensor]]:
        return [[piece.local for piece in share] for share in self._shares]


def _pieces(target: Target, count: int) -> list[Target]:
    boxes = cut(tuple(target.local.shape), target.local.itemsize, count)
    if len(boxes) == 1:
        return [target]
    return [Target(target.component, target.key, target.tensor, target.fresh, box) for box in boxes]


def _nbytes(targets: Iterable[Target]) -> int:
    return sum(target.local.nbytes for target in targets)


class Sharing:
    """What one rank reads of a load's targets, and what it gets: planned, verified, measured, filled and exchanged.

    Each rank reads by itself what is no DTensor, and what is in host memory where the mesh has NCCL only. The exchange
    is where the tensors are; on a GPU, with NCCL, it has not been run by the tests.
    """

    def __init__(self, source: Source, wanted: bool | None) -> None:
        self._source, self._wanted = source, wanted
        self._all, self._alone = list[Target](), list[Target]()  # what there is, and what nobody shares
        self._groups: list[_Group] = []
        self._read_bytes, self._read_s = 0, 0.0

    def plan(self, targets: list[Target]) -> tuple[int, int]:
        """Divide the targets among replicas: the bytes that this rank would read, and those that it would get."""
        self._all, found = targets, dict[tuple[str, torch.device], tuple[dist.ProcessGroup, list[Target]]]()
        # by name: so each rank comes to the groups that it is in, and in them to the pieces, in one order of all ranks
        for target in sorted(targets, key=lambda t: (t.component, t.key)):
            group = None if self._wanted is False else group_of(target.tensor)
            if group is None:
                self._alone.append(target)
            else:
                found.setdefault((group.group_name, target.local.device), (group, []))[1].append(target)
        self._groups = [_Group(group, shared) for group, shared in found.values()]
        return _nbytes(self._own), _nbytes(self._rest)

    @property
    def _own(self) -> list[Target]:
        return [*self._alone, *(piece for group in self._groups for piece in group.mine)]

    @property
    def _rest(self) -> list[Target]:
        return [piece for group in self._groups for piece in group.others]

    def choose(self, planned: list[tuple[int, int]]) -> bool | None:
        """On rank 0: ``choose``."""
        return choose(self._wanted, planned)

    def verify(self, share: bool | None) -> None:
        """Verify what this rank reads: all, if nothing is shared."""
        if share is False:
            self._alone, self._groups = self._all, []
        started = time.monotonic()
        self._read_bytes = self._source.verify(self._own)
        self._read_s = time.monotonic() - started

    def measure(self) -> Measured:
        """Try the exchange. Collective: every rank must call it."""
        tried = [group.trial() for group in self._groups]
        return {"read_bytes": self._read_bytes, "read_s": self._read_s, "groups": tried}

    def verify_rest(self) -> None:
        """Verify the others' shares, too: from now on nothing is shared."""
        rest = self._rest
        self._source.verify(rest)
        self._alone, self._groups = [*self._own, *rest], []

    def fill(self) -> None:
        """Fill what this rank reads."""
        self._source.fill(self._own)

    def exchange(self) -> None:
        """Fill the rest with what the others read. Collective: every rank must call it."""
        for group in self._groups:
            group.exchange()
