"""The part of a tensor that each rank holds, and the ranks that hold the others.

A tensor is sharded by rows over the data axes (FSDP), with any placement over the others. The data axes are "replicate"
and "shard"; the others are tensor-parallel. A rank's tensor-parallel part is split over "shard" along dim 0, into equal
runs of rows as by ``torch.chunk``. Tensors without dims stay plain.

Collectives are matched by their order. If ranks run different code (a layer that only one of them uses, ``if rank == 0:
print(weight.norm())``), tensors would be mixed silently, or the ranks would hang. So ranks announce the next collective
over a separate gloo group:

* a gather or reduction of a module, if it differs from the one at this position of the previous step;
* a read by user code, always, with the line of code that reads.
"""

from __future__ import annotations

import sys
import time
import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_shardckpt.compat.dtensor import DTensorSpec, StridedShard, TensorMeta, local_tensor, spec_of
from lightning_shardckpt.compat.torch_distributed import PrefixStore, all_gather_single, get_if_set, group_of_name
from lightning_shardckpt.distributed.host_numbers import host_group, new_gloo_group, notices, wait_for
from lightning_shardckpt.distributed.world import current_world
from lightning_shardckpt.errors import RankError, UnsupportedCodeError

DATA_AXES = ("replicate", "shard")
NAME = "_shardckpt_name"
"""Attribute of a sharded parameter, its gradient and tensors like it: the name, which ranks compare in reads."""

ASSIGNMENTS = "_shardckpt_assignments"
"""Attribute of a sharded tensor: the number of assignments to its ``data``."""


@dataclass(frozen=True, slots=True, eq=False)
class Sharding:
    """The sharding of all tensors with the same mesh and placements.

    Attributes:
        shard: the ranks of the axis "shard", over which dim 0 is sharded; None for a size of 1.
        replicate: the ranks of the axis "replicate"; None for a size of 1.
        others: the ranks of each tensor-parallel axis with a size of more than 1.
        model_mesh: the tensor-parallel axes; None without tensor parallelism.
        model: the placements on ``model_mesh``.
    """

    shard: Peers | None
    replicate: Peers | None
    others: tuple[Peers, ...]
    model_mesh: DeviceMesh | None
    model: tuple[Placement, ...]

    @property
    def data_axes(self) -> list[Peers]:
        """The ranks of the data axes with a size of more than 1."""
        return [peers for peers in (self.shard, self.replicate) if peers is not None]

    @property
    def batches(self) -> int:
        """The number of data-parallel ranks."""
        return prod(peers.size for peers in self.data_axes)


def describe(tensor: DTensor) -> str:
    """Return the name and shape of a sharded tensor, for messages and comparisons."""
    return f"{tensor.__dict__.get(NAME, 'a tensor')} of shape {tuple(tensor.shape)}"


def sharding_of(tensor: DTensor | DTensorSpec) -> Sharding:
    """Return how a tensor is sharded, or tensors with a spec are."""
    spec = tensor if isinstance(tensor, DTensorSpec) else spec_of(tensor)
    return _resolve_sharding(spec.mesh, tuple(spec.placements))


@lru_cache(maxsize=4096)
def _resolve_sharding(mesh: DeviceMesh, placements: tuple[Placement, ...]) -> Sharding:
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    sizes = dict(zip(names, mesh.shape, strict=True))
    peers = {name: peers_of(mesh if mesh.ndim == 1 else mesh[name]) for name in names if sizes[name] > 1}
    others = tuple(name for name in names if name not in DATA_AXES)
    model_mesh = None if not others else mesh if len(others) == mesh.ndim else mesh[others]
    model = tuple(placement for name, placement in zip(names, placements, strict=True) if name in others)
    of_model = tuple(peers[name] for name in others if name in peers)
    return Sharding(peers.get("shard"), peers.get("replicate"), of_model, model_mesh, model)


def spec_over(tensor: Tensor, data_mesh: DeviceMesh, root: DeviceMesh) -> DTensorSpec:
    """Return the spec that shards a tensor's rows over ``data_mesh``, in addition to its tensor-parallel placements.

    The axes of ``data_mesh`` are "replicate" and "shard", or "shard" only; all axes are those of ``root``.
    """
    meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    rows: Placement = Shard(0)
    replicas = (Replicate(),) * (data_mesh.ndim - 1)
    if not isinstance(tensor, DTensor):
        return DTensorSpec(data_mesh, (*replicas, rows), tensor_meta=meta)
    parts = prod(
        size
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True)
        if isinstance(placement, Shard | StridedShard) and placement.dim == 0
    )
    if parts > 1:
        rows = StridedShard(0, split_factor=parts)
    mesh = _slice(root, (*(data_mesh.mesh_dim_names or ()), *(tensor.device_mesh.mesh_dim_names or ())))
    return DTensorSpec(mesh, (*replicas, rows, *tensor.placements), tensor_meta=meta)


@lru_cache(maxsize=64)
def _slice(root: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    return root[names]


def own_rows(part: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's rows of its tensor-parallel part of a tensor; they share its memory."""
    if sharding.shard is None:
        return part
    each = -(-part.shape[0] // sharding.shard.size)
    return part[sharding.shard.rank * each :][:each]


def local_part(whole: Tensor, sharding: Sharding) -> Tensor:
    """Return this rank's part of a whole tensor; may share its memory. No communication."""
    return own_rows(_model_part(whole, sharding), sharding)


@lru_cache(maxsize=4096)
def model_shape(shape: torch.Size, sharding: Sharding) -> torch.Size:
    """Return the shape of this rank's tensor-parallel part."""
    return _model_part(torch.empty(shape, device="meta"), sharding).shape


def _model_part(whole: Tensor, sharding: Sharding) -> Tensor:
    if sharding.model_mesh is None:
        return whole
    return local_tensor(distribute_tensor(whole, sharding.model_mesh, sharding.model, src_data_rank=None))


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


READ_TIMEOUT_S = 300.0
_OURS = ("compat.", "parallel.tensors.", "parallel.sharding.")
_FRAMEWORKS = ("torch.", *(f"lightning_shardckpt.{room}" for room in _OURS))
_SAME_MODULES = (
    "All ranks that share parameters must run the same modules in the same order: control flow that depends on a rank, "
    "its batch or its random numbers (such as layer dropout) must decide alike on all of them."
)
_SAME_READS = (
    "Reading a sharded parameter is collective: every rank must execute that line, not only rank zero. So read it on "
    "every rank, and print or log it on one"
)
_peers: dict[DeviceMesh, Peers] = {}


@dataclass(slots=True)
class Peers:
    """The ranks of one mesh axis. Groups are stored by name, so that they can be destroyed.

    Attributes:
        group_name: the group for gathers of modules and reductions of gradients.
        reads_name: the gloo group for announcements and reads of user code.
        timeout_s: the time that a read waits for the other ranks.
    """

    group_name: str
    reads_name: str
    timeout_s: float = READ_TIMEOUT_S
    _entered: list[str] = field(default_factory=list)
    _entered_before: list[str] = field(default_factory=list)
    _announcements: int = 0

    @property
    def group(self) -> dist.ProcessGroup:
        return group_of_name(self.group_name)

    @property
    def reads(self) -> dist.ProcessGroup:
        return group_of_name(self.reads_name)

    @property
    def size(self) -> int:
        return self.group.size()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.group)

    # --- collectives of modules ---

    def enter(self, purpose: str) -> None:
        """Announce the next collective, unless it is the one at this position of the previous step.

        A rank that announces waits here; ranks that don't find its notice while they wait for a collective. If the
        ranks announce different ones, every rank raises an UnsupportedCodeError.
        """
        self._entered.append(purpose)
        if self._entered_before[len(self._entered) - 1 : len(self._entered)] != [purpose]:
            self.compare(purpose)

    def end_step(self, *, is_alike: bool) -> None:
        """Begin the next step; ``is_alike``: the ranks have verified that they entered the same collectives."""
        self._entered_before, self._entered = self._entered if is_alike else [], []

    def compare(self, done: str, *numbers: float, before: int = 0) -> list[list[float]]:
        """Compare what each rank did last, and a digest of ``before``; return the numbers of every rank.

        Raises:
            UnsupportedCodeError: on every rank, if these differ, or a rank reads a value instead.
        """
        return self._announce(done, numbers, is_read=False, before=before)

    # --- reads of user code ---

    def share(self, what: str, numbers: Sequence[float] = ()) -> list[list[float]]:
        """Return the numbers of every rank, as many on each, for a read by the running line of user code.

        Raises:
            UnsupportedCodeError: on every rank, if the ranks read different values.
            RankError: if a rank does not read within the timeout.
        """
        return self._announce(f"{what} ({calling_line()})", numbers, is_read=True)

    # --- announcements ---

    def _announce(self, what: str, numbers: Sequence[float], *, is_read: bool, before: int = 0) -> list[list[float]]:
        self._announcements += 1
        own = torch.zeros(4, dtype=torch.float64)  # of one length: ranks may announce with and without a number
        own[: 2 + len(numbers)] = torch.tensor(
            [self._announcements, zlib.crc32(what.encode(), before), *numbers], dtype=torch.float64
        )
        gathered = own.new_empty(self.size * own.numel())
        self.wait(all_gather_single(gathered, own, group=self.reads, async_op=True), what, is_read=is_read)
        every = gathered.view(self.size, -1).tolist()
        if any(row[:2] != every[0][:2] for row in every):
            self._refuse(what, is_read=is_read)
        return [row[2 : 2 + len(numbers)] for row in every]

    def _refuse(self, what: str, *, is_read: bool) -> None:
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, (is_read, what), group=self.reads)
        if len({*every}) == 1:
            raise UnsupportedCodeError(f"the ranks ran different modules before {what}. {_SAME_MODULES}")
        if any(reads for reads, _ in every):
            problem, advice = "the ranks ask for values of different sharded tensors at a time", _SAME_READS
        else:
            problem, advice = "the ranks gather parameters of different modules at a time", _SAME_MODULES
        each = "; ".join(f"rank {rank}: {text}" for rank, (_, text) in zip(self.ranks, every, strict=True))
        raise UnsupportedCodeError(f"{problem}: {each}. {advice}")

    def wait(self, work: dist.Work | None, what: str, *, is_read: bool = True) -> None:
        """Wait for the last announcement, or for the read on CPUs after it. Only reads have a timeout.

        Posts to the store where this rank waits, and raises if another rank has found that it waits elsewhere.
        """
        begun, number = time.monotonic(), self._announcements
        verb, advice = ("asks for", _SAME_READS) if is_read else ("has come to", _SAME_MODULES)

        def look() -> None:
            self._store.set(f"waits/{number}", f"{dist.get_rank()}\n{verb} {what}\n{advice}")
            if (conflict := get_if_set(self._store, f"conflict/{number}")) is not None:
                raise UnsupportedCodeError(conflict.decode())
            if is_read and time.monotonic() - begun > self.timeout_s:
                raise RankError(
                    f"rank {dist.get_rank()} asks for {what}, but within {self.timeout_s:g} s not all of the ranks "
                    f"{self.ranks} did. {_SAME_READS}"
                )

        wait_for(work, what, self.ranks, look)

    def raise_if_awaited(self, purpose: str, ranks: Collection[int], seen: set[str]) -> None:
        """Look for the notice of a rank that waits in the next announcement, which this rank has not made.

        Raises:
            UnsupportedCodeError: for a notice of one of ``ranks``, for which this rank waits, that an earlier look has
                ``seen``: the wait is no delay.
        """
        following = self._announcements + 1
        notice = get_if_set(self._store, f"waits/{following}")
        if notice is None:
            return
        rank, waits, advice = notice.decode().split("\n")
        key = f"{self.reads_name}/{following}"
        if int(rank) in ranks and key in seen:
            message = f"rank {rank} {waits}, while rank {dist.get_rank()} waits for it in {purpose}. {advice}"
            self._store.set(f"conflict/{following}", message)
            notices.remove(self.raise_if_awaited)  # said once: nobody reads values here any more
            raise UnsupportedCodeError(message)
        seen.add(key)

    @property
    def _store(self) -> PrefixStore:
        return PrefixStore(f"shardckpt-reads-{self.reads_name}", current_world().store)


def build_peers(mesh: DeviceMesh, timeout_s: float) -> None:
    """Create the gloo group for announcements and reads on every axis of ``mesh``, a mesh of the world.

    Collective: every rank of the world must call it.
    """
    for axis, size in zip(mesh.mesh_dim_names or (), mesh.shape, strict=True):
        if size > 1 and axis != "pipeline":
            ranks = dist.get_process_group_ranks(mesh.get_group(axis))
            _add_peers(mesh[axis], new_gloo_group(ranks, timeout_s=4 * timeout_s), timeout_s)


def peers_of(mesh: DeviceMesh) -> Peers:
    """Return the ranks of a mesh of one axis, the same object for the same mesh.

    Collective the first time, for a mesh without groups from `build_peers`.
    """
    if mesh not in _peers:
        _add_peers(mesh, host_group(mesh.get_group()), READ_TIMEOUT_S)
    return _peers[mesh]


def _add_peers(mesh: DeviceMesh, reads: dist.ProcessGroup, timeout_s: float) -> None:
    _peers[mesh] = Peers(mesh.get_group().group_name, reads.group_name, timeout_s)  # in place of an earlier world's
    notices.append(_peers[mesh].raise_if_awaited)


def calling_line() -> str:
    """Return the running line of user code, as ``file:number``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not f"{frame.f_globals.get('__name__', '')}.".startswith(_FRAMEWORKS):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
