"""Sources of stored state, and the one that reads checkpoints of this package.

A source is a checkpoint of this package, or one of another format. All describe their tensors by the same specs, so
comparing and planning do not know which one it is; ``open_source`` finds out.
"""

from __future__ import annotations

import copy
from bisect import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import shape_of, spec_of
from lightning_shardckpt.distributed.liveness import local_rank_count
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.box import Box, Shape
from lightning_shardckpt.format.index import Component, ShardEntry
from lightning_shardckpt.format.layout import Part
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.state.documents import document_of
from lightning_shardckpt.state.dtensor_layout import local_tensor, parts_of, parts_within, this_rank, view_at
from lightning_shardckpt.state.json_tree import decode
from lightning_shardckpt.state.json_values import Pickled, lost_values
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES, bytes_of, is_host_memory
from lightning_shardckpt.state.trainer import HYPER_PARAMETERS
from lightning_shardckpt.system.memory import allocate_pages
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import Files, fetch
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, WholeTensors, windows

# ── whether stored tensors are equal ──────────────────────────────────────────────────────────────────────────────────
# Compare stored tensors with each other: names of one tensor may be stored apart.


_WINDOW_BYTES = 8 << 20  # of each of two tensors


def are_equal(source: Source, component: str, keys: Sequence[str], like: torch.Tensor | None = None) -> bool:
    """Return whether stored tensors have the same dtype, shape and bytes.

    Args:
        source: where they are stored.
        component: which they are of.
        keys: their keys.
        like: a live tensor; if they have its shape, they are compared where this rank has a slice of it.

    Raises:
        CorruptionError: naming file, tensor and rank, where the format has checksums.
    """
    specs = [source.components()[component].tensors[key] for key in keys]
    if any((spec.dtype, spec.shape) != (specs[0].dtype, specs[0].shape) for spec in specs):
        return False
    dtype = TORCH_DTYPES[specs[0].dtype]
    if like is None or tuple(shape_of(like)) != specs[0].shape:
        like = torch.empty(specs[0].shape, device="meta")
    for window in windows(tuple(local_tensor(like).shape), _WINDOW_BYTES // dtype.itemsize):
        first: memoryview | None = None
        for key in keys:
            target = ReadTarget(component, key, like, fresh=True, region=window, dtype=dtype)
            source.read([target])()
            found = bytes_of(target.local)
            if first is not None and first != found:
                return False
            first = found
    return True


_HIGH_LATENCY_HELD_SHARE = 2  # so as to read nothing twice: one in so many bytes of a rank's part of the free memory
_BATCH_BYTES = 64 << 20  # of host copies, where tensors are elsewhere; one larger tensor is a batch of its own


_NOTHING = torch.empty(0, device="cpu")  # whatever the default is
_NO_BYTES = memoryview(b"")


@dataclass(slots=True, eq=False)  # not frozen, which takes longer than all else: there is one for each tensor
class ReadTarget:
    """Memory to fill: the local part of ``tensor`` takes its region of the stored tensor ``key``.

    Nobody changes it, and it is equal to itself alone.

    ``fresh``: nobody minds what is in it if the load fails, as it was allocated for this load. ``region``: of the
    local tensor, if that is to be filled alone; ``local`` is its memory then. ``box``: of the stored tensor, if a plain
    tensor takes just that. ``dtype``: of the stored tensor, if that is another; ``local`` is memory on the host then
    that has nothing to do with the tensor's.
    """

    component: str
    key: str
    tensor: torch.Tensor
    fresh: bool = False
    region: Box | None = None
    box: Box | None = None
    dtype: torch.dtype | None = None
    local: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        local = local_tensor(self.tensor)
        local = local if self.region is None else view_at(local, self.region)
        self.local = local if self.dtype is None else torch.empty(local.shape, dtype=self.dtype, device="cpu")

    def renamed(self, component: str, key: str) -> ReadTarget:
        """Return the same memory, to be filled with another stored tensor."""
        found = copy.copy(self)  # dataclasses.replace would allocate ``local`` anew
        found.component, found.key = component, key
        return found

    def parts(self, rank: int) -> tuple[Part, ...]:
        """The boxes to fill, and where they lie in ``local``; ``rank``: this one's."""
        if self.box is not None:
            return (Part(self.box, (0,) * len(self.box.start)),)
        found = parts_of(self.tensor, rank)
        return found if self.region is None else parts_within(found, self.region)

    def copy_from(self, full: torch.Tensor) -> None:
        """Fill it from the stored tensor, which is in memory as a whole."""
        for part in self.parts(this_rank()):
            view_at(self.local, part.local).copy_(view_at(full, part.box))


class TensorSource(Protocol):
    """Stored tensors, on one rank."""

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor, after making sure that its bytes can be there."""

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Verify all bytes that the targets need, and change nothing but the fresh ones.

        Returns:
            The function that fills the targets. It reads again what is neither in place nor held in memory.

        Raises:
            CorruptionError: naming file, tensor and rank.
        """


class Source(TensorSource, Protocol):
    """Stored state, on one rank."""

    path: str

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in files, for those who copy them as a whole."""

    def close(self) -> None:
        """Release the files."""

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role of ``Snapshot.documents``, as JSON; None if nothing was."""

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state; ``stored`` gives the tensor of a key of the component trainer."""


class ShardedSource:
    """A checkpoint directory of this package."""

    def __init__(
        self, checkpoint: Checkpoint, verify: bool = True, tuning: Tuning = TUNING, *, weights_only: bool = True
    ) -> None:
        self.path, self.checkpoint, self._verify, self._tuning = checkpoint.path, checkpoint, verify, tuning
        self._weights_only = weights_only
        self._planned: dict[str, _ComponentReads] = {}

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as bytes in shard files."""
        return WholeTensors(self.checkpoint)

    def close(self) -> None:
        """Release the files."""
        self.checkpoint.close()

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, from the root index."""
        return self.checkpoint.root.components

    def document(self, role: str, rank: int = 0) -> Any:
        """The JSON of a role; of "model", "optimizer" and "frozen" the union of what groups of ranks stored."""
        return document_of(self.checkpoint, role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The decoded trainer state.

        Raises:
            StateError: for pickled objects that are not to be read, but for hyper-parameters.
        """
        found: dict[str, Any] = decode(self.document("trainer") or {}, stored, unpickles=not self._weights_only)
        lost = lost_values({key: value for key, value in found.items() if key not in HYPER_PARAMETERS})
        pickled = [f"{place}  {value.type_name}" for place, value in lost.items() if isinstance(value, Pickled)]
        if pickled:
            listed = "\n  ".join(pickled)
            raise StateError(
                f"checkpoint {self.path!r} has pickled objects, which are not read as they could execute anything:\n"
                f"  {listed}\nIf you trust whoever wrote it, load it with weights_only=False, which fit, validate, "
                "test, predict and load take."
            )
        return found

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor; memory for it may be allocated, since files of its size are there.

        Raises:
            ShardCkptError: if a box of it is not in an index, or a file is not the one that was saved.
        """
        spec = self.checkpoint.root.components[component].tensors[key]
        whole = Box.whole(spec.shape)
        for overlap in plan_load(spec, self.checkpoint.replicas(component)[key], (Part(whole, whole.start),)):
            file = self.checkpoint.entry(component, key, overlap).file
            self.checkpoint.check_file(component, overlap.writer, file)
        return spec.shape

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Read and check every block that the targets touch; sizes, headers and save ids only if told not to.

        Fresh targets are read once, into their memory. Small live ones are read once, too, into memory that is held
        until they are filled; with high latency all of them, while there is room. The rest is read again to be filled.
        """
        held = self._held_memory([target for target in targets if not target.fresh])
        wanted, rest = list[tuple[torch.Tensor, list[Request]]](), list[tuple[torch.Tensor, list[Request]]]()
        for target in targets:
            local, memory = target.local, held.get(target)
            is_here = memory is not None or is_host_memory(local)
            place = memory if memory is not None else bytes_of(local) if is_here else _NO_BYTES
            requests, elsewhere = self._reads(target.component).requests(target, place), _NOTHING if is_here else local
            if target.fresh or memory is not None:
                wanted.append((elsewhere, requests))
            else:
                wanted.append((_NOTHING, [request.untargeted() for request in requests]))
                rest.append((elsewhere, requests))
        fetch_into(self.checkpoint, wanted, verify=self._verify, tuning=self._tuning)

        def fill() -> None:
            for target, memory in held.items():
                _put(memory, target.local)
            fetch_into(self.checkpoint, rest, verify=False, tuning=self._tuning)

        return fill

    def _held_memory(self, live: list[ReadTarget]) -> dict[ReadTarget, memoryview]:
        """Return memory for the live targets that are read once."""
        limit = self._tuning.held_bytes
        if self.checkpoint.reader.high_latency:
            return _spare_memory(live, max(_free_share(), limit)) if live else {}
        small = [t for t in live if t.local.nbytes <= self._tuning.held_tensor_bytes and is_host_memory(t.local)]
        return _spare_memory(small, limit) if small and self._verify else {}

    def _reads(self, component: str) -> _ComponentReads:
        if component not in self._planned:
            self._planned[component] = _ComponentReads(self.checkpoint, component)
        return self._planned[component]


class _Need(NamedTuple):
    """What tensors of one kind need of a stored box: as in ``Request``.

    ``stored``: box, global shape and dtype of the entry that each of them has in ``of_writer``, the boxes by key.
    ``checked``: the writer's files that were.
    """

    overlap: Overlap
    run: tuple[int, int, int] | None
    stored: tuple[Box, Shape, str]
    of_writer: Mapping[str, tuple[ShardEntry, ...]]
    checked: set[str]


class _ComponentReads:
    """The reads that targets of one component need. What is the same for all tensors of one kind is found once."""

    def __init__(self, checkpoint: Checkpoint, component: str) -> None:
        self._checkpoint, self._component, self._rank = checkpoint, component, this_rank()
        self._specs, self._replicas = checkpoint.root.components[component].tensors, checkpoint.replicas(component)
        self._kinds: dict[tuple[Any, ...], tuple[list[_Need], Shape, object]] = {}
        self._checked: dict[int, set[str]] = {}  # files by writer

    def requests(self, target: ReadTarget, memory: memoryview) -> list[Request]:
        """The byte ranges that this rank needs for one tensor, whose local part is ``memory``."""
        key, tensor, size = target.key, target.tensor, target.local.shape
        if isinstance(tensor, DTensor) and target.region is None and target.box is None:
            laid_out: object = spec_of(tensor)  # by identity: to compare two takes long
        else:
            laid_out = target.parts(self._rank)
        kind = id(self._specs[key]), self._replicas[key], id(laid_out), size
        found = self._kinds.get(kind)
        if found is None:
            parts, shape = target.parts(self._rank), tuple(size)
            of_parts = *kind[:2], id(parts), size
            needs = self._kinds[of_parts][0] if of_parts in self._kinds else self._needs(key, parts, shape)
            self._kinds[of_parts] = needs, shape, parts  # while they are here, nothing else has their ids
            found = self._kinds[kind] = needs, shape, laid_out
        needs, shape, _ = found
        requests = []
        for overlap, run, stored, of_writer, checked in needs:
            entries = of_writer.get(key, ())
            is_alike = len(entries) == 1 and entries[0][:3] == stored
            entry = entries[0] if is_alike else self._checkpoint.entry(self._component, key, overlap)
            if entry.file not in checked:
                self._checkpoint.check_file(self._component, overlap.writer, entry.file)
                checked.add(entry.file)
            requests.append(Request(key, overlap, entry, shape, run, memory))
        return requests

    def _needs(self, key: str, parts: tuple[Part, ...], shape: Shape) -> list[_Need]:
        """Return what a tensor needs of which stored boxes.

        Each box is looked up as it is found: of those that a hostile layout claims, most are not there.
        """
        spec, found = self._specs[key], list[_Need]()
        for overlap in plan_load(spec, self._replicas[key], parts):
            stored = self._checkpoint.entry(self._component, key, overlap)[:3]
            run = single_run(overlap, shape, DTYPE_BYTES[spec.dtype])
            of_writer = self._checkpoint.index(self._component, overlap.writer).shards
            found.append(_Need(overlap, run, stored, of_writer, self._checked.setdefault(overlap.writer, set())))
        return found


def fetch_into(
    files: Files, wanted: Iterable[tuple[torch.Tensor, list[Request]]], *, verify: bool, tuning: Tuning = TUNING
) -> None:
    """Fill local tensors; where the memory is not the host's, through copies, a batch of them at a time.

    For a GPU these are pinned and copied in the order of the current stream, while the next batch is read; that has
    not been run by the tests.

    Args:
        files: where the requests' boxes are.
        wanted: local tensors with their requests, whose targets are their memory where that is the host's; requests
            that have other targets, or none, with an empty tensor.
        verify: compare every block that is touched with its checksum.
        tuning: sizes of reads.
    """
    batch: list[tuple[torch.Tensor, torch.Tensor]] = []
    requests: list[Request] = []
    nbytes = 0  # of the batch
    for local, found in wanted:
        if local is not _NOTHING and not is_host_memory(local):
            if nbytes + local.nbytes > _BATCH_BYTES:
                _flush(files, batch, requests, verify, tuning)
                nbytes = 0
            host = torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.is_cuda)
            batch.append((local, host))
            nbytes += host.nbytes
            memory = bytes_of(host)
            found = [request._replace(target=memory) for request in found]
        requests += found
    _flush(files, batch, requests, verify, tuning)


def _flush(
    files: Files,
    batch: list[tuple[torch.Tensor, torch.Tensor]],
    requests: list[Request],
    verify: bool,
    tuning: Tuning,
) -> None:
    fetch(files, requests, verify=verify, tuning=tuning)
    for local, host in batch:
        local.copy_(host, non_blocking=local.is_cuda)  # torch gives pinned memory out again when that is done
    batch.clear()
    requests.clear()


def _free_share() -> int:
    """Return this rank's part of the memory that is free now, or can be made free."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), 0)
    return free // _HIGH_LATENCY_HELD_SHARE // local_rank_count()


def _put(data: memoryview, local: torch.Tensor) -> None:
    host = local if is_host_memory(local) else torch.empty(local.shape, dtype=local.dtype, device="cpu")
    bytes_of(host)[:] = data
    if host is not local:
        local.copy_(host)


def _spare_memory(targets: list[ReadTarget], room: int) -> dict[ReadTarget, memoryview]:
    """Return memory for as many targets as there is room for, the smallest first."""
    ordered = sorted(targets, key=lambda target: target.local.nbytes)
    ends = list(accumulate(target.local.nbytes for target in ordered))
    count = bisect(ends, room)
    memory = memoryview(allocate_pages(ends[count - 1] if count else 0))
    pairs = zip(ordered[:count], ends[:count], strict=True)
    return {target: memory[end - target.local.nbytes : end] for target, end in pairs}
