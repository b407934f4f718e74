"""Plan a resume on another topology: ``python -m lightning_shardckpt explain PATH --onto tp=4,fsdp=2``.

The planner of the real load runs for every rank of the target. Reads indexes only; no torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.index import ROOT_NAME, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import Part, parts_of_rank
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.system.text import count_text, size_text
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.tools.listing import long_table
from lightning_shardckpt.tools.target_topology import (
    TargetLayout,
    TargetTopology,
    parse_topology,
    topology_text,
)
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import planned_reads

_LISTED = 32


def explain(
    path: str | os.PathLike[str],
    onto: str | Mapping[str, int],
    *,
    storage_options: Mapping[str, Any] | None = None,
    tuning: Tuning = TUNING,
) -> dict[str, Any]:
    """Return the bytes that each rank of a target topology would need and read, as values that JSON can hold.

    Each item of ``ranks`` has the bytes that the rank ``needs``; those it ``reads`` and verifies, which are whole
    checksum blocks and small gaps between them; the numbers of ``calls`` and ``files``; and the ranks of the checkpoint
    ``from`` which it reads, with the bytes needed of each. This holds for a resume where every rank reads for itself,
    into host memory. Fabric, functions and ``verify="first"`` read live tensors once more.

    Args:
        path: the checkpoint.
        onto: sizes by axis, or text such as ``tp=4,fsdp=2``.
        storage_options: for URLs, see ``ShardCkptIO``.
        tuning: sizes of the load.

    Raises:
        CheckpointNotFoundError: if there is none; says what is there.
        TopologyError: if the target fits neither itself nor the checkpoint.
    """
    text = onto if isinstance(onto, str) else ",".join(f"{axis}={size}" for axis, size in onto.items())
    sizes = parse_topology(text)
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        target = TargetTopology(checkpoint.root, sizes)
        ranks = _ranks(checkpoint, target, tuning)
        root = checkpoint.root
    reads = [rank["reads"] for rank in ranks]
    mean = sum(reads) / len(reads)
    return {
        "path": os.fspath(path),
        "saved_on": root.topology,
        "onto": sizes,
        "ranks": ranks,
        "totals": {key: sum(rank[key] for rank in ranks) for key in ("needs", "reads", "calls", "indexes")},
        "imbalance": max(reads) / mean if mean else 1.0,
        "assumed": target.notes,
        "continues": what_continues(root, sizes),
    }


def _ranks(checkpoint: Checkpoint, target: TargetTopology, tuning: Tuning) -> list[dict[str, Any]]:
    """Return the costs of all ranks; replicas read the same, so they are planned once."""
    layouts, sizes = target.layouts(), target.sizes
    plans, found = _PlannedReads(checkpoint, tuning), list[dict[str, Any]]()
    per_replica = sizes["shard"] * sizes["tensor"]
    per_stage = per_replica * sizes["replicate"]
    known: dict[tuple[int, int], dict[str, Any]] = {}
    for rank in range(target.world):
        alike = rank // per_stage, rank % per_replica
        if alike not in known:
            known[alike] = plans.cost(rank, layouts)
        found.append({"rank": rank, **known[alike]})
    return found


@dataclass(slots=True)
class _Wanted:
    """A tensor to fill on one rank, and the requests for it."""

    component: str
    nbytes: int
    requests: list[Request]


@dataclass(slots=True)
class _PlannedReads:
    """The requests of a load, made as ``sources.source`` makes them; equal ones are planned once."""

    checkpoint: Checkpoint
    tuning: Tuning
    _overlaps: dict[tuple[Any, ...], list[tuple[Overlap, tuple[int, int, int] | None]]] = field(default_factory=dict)

    def cost(self, rank: int, layouts: Mapping[str, Mapping[str, TargetLayout]]) -> dict[str, Any]:
        """Return the bytes that a rank needs and reads."""
        wanted = [
            self._wanted(name, key, target, rank)
            for name, component in layouts.items()
            for key, target in component.items()
            if any(a <= rank < b for a, b in target.holders)
        ]
        requests = [request for one in wanted for request in one.requests]
        reads = list(planned_reads(self.checkpoint, requests, verify=True, tuning=self.tuning))
        given = Counter[int]()
        for one in wanted:
            for request in one.requests:
                given[request.overlap.writer] += request.nbytes
        sources = {(one.component, request.overlap.writer) for one in wanted for request in one.requests}
        return {
            "needs": sum(one.nbytes for one in wanted),
            "reads": sum(length for _, _, length in reads),
            "calls": len(reads),
            "files": len({request.entry.file for one in wanted for request in one.requests}),
            "from": dict(sorted(given.items())),
            "indexes": self._index_bytes(sources),
        }

    def _index_bytes(self, sources: Iterable[tuple[str, int]]) -> int:
        """Return the bytes of the root index and of the rank indexes of the ranks that wrote the needed boxes."""
        components = self.checkpoint.root.components
        ranks = (components[name].indexes[writer].nbytes for name, writer in sources)
        return self.checkpoint.reader.size(ROOT_NAME) + sum(ranks)

    def _wanted(self, component: str, key: str, target: TargetLayout, rank: int) -> _Wanted:
        spec = self.checkpoint.root.components[component].tensors[key]
        parts = parts_of_rank(target.layout, spec.shape, rank)
        shape = _local_shape(spec, parts)
        found = []
        for overlap, run in self._overlaps_of(component, key, spec, parts, shape):
            entry = self.checkpoint.entry(component, key, overlap)
            found.append(Request(key, overlap, entry, shape, run, memoryview(b"")))
        nbytes = sum(part.box.numel for part in parts) * DTYPE_BYTES[spec.dtype]
        return _Wanted(component, nbytes, found)

    def _overlaps_of(
        self, component: str, key: str, spec: TensorSpec, parts: tuple[Part, ...], shape: Shape
    ) -> list[tuple[Overlap, tuple[int, int, int] | None]]:
        replica = self.checkpoint.replicas(component)[key]
        kind = spec, replica, parts
        if kind not in self._overlaps:
            overlaps = list(plan_load(spec, replica, parts))
            self._overlaps[kind] = [(one, single_run(one, shape, DTYPE_BYTES[spec.dtype])) for one in overlaps]
        return self._overlaps[kind]


def _local_shape(spec: TensorSpec, parts: tuple[Part, ...]) -> Shape:
    if not parts:
        return (0,) * len(spec.shape)
    return tuple(max(ends) for ends in zip(*(part.local.stop for part in parts), strict=True))


# ── continuation ──────────────────────────────────────────────────────────────────────────────────────────────────


def what_continues(root: RootIndex, sizes: Mapping[str, int]) -> list[str]:
    """Return sentences about everything that a resume there would not continue exactly; see "Resume" in the guide."""
    before = {axis: root.topology.get(axis, 1) for axis in sizes}
    data_before, data = before["replicate"] * before["shard"], sizes["replicate"] * sizes["shard"]
    if not root.topology:
        return ["This was saved without a topology: whether random numbers and data continue cannot be told."]
    if before == dict(sizes):
        return ["The topology is the same: the run continues exactly, as far as its hardware computes the same twice."]
    found = ["Weights, buffers and optimizer state are bit-equal; sums in another order round differently."]
    if data != data_before:
        become = "1 data-parallel rank becomes" if data_before == 1 else f"{data_before} data-parallel ranks become"
        found.append(
            f"{become} {data}: the order of the data in mid-epoch goes on where a DistributedSampler gives it. "
            "Change batch_size with it, so that the global batch keeps its size."
        )
    if data != data_before or before["pipeline"] != sizes["pipeline"]:
        found.append("Random numbers (dropout) are drawn anew: the data-parallel ranks or the pipeline are others.")
    return found


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(found: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``explain`` as text for people."""
    ranks, totals = found["ranks"], found["totals"]

    def row(rank: dict[str, Any]) -> tuple[str, ...]:
        return (
            str(rank["rank"]),
            size_text(rank["needs"]),
            size_text(rank["reads"]),
            f"{rank['reads'] / rank['needs']:.2f} ×" if rank["needs"] else "",
            f"{rank['calls']:,}",
            f"{rank['files']:,}",
            f"{len(rank['from'])}",
        )

    header = ("rank", "needs", "reads", "ratio", "calls", "files", "of ranks")
    costs = long_table(header, ranks, row, limit=None if everything else _LISTED, noun="rank", right=header)
    summary = (
        f"{found['path']}: from {topology_text(found['saved_on'])} onto {topology_text(found['onto'])}\n"
        f"All {count_text(len(ranks), 'rank')} need {size_text(totals['needs'])} and read {size_text(totals['reads'])}"
        f", by {totals['calls']:,} calls.\n"
        f"Besides, they read {size_text(totals['indexes'])} of indexes. "
        f"The largest rank reads {found['imbalance']:.2f} × the mean."
    )
    notes = [f"- {note}" for note in [*found["assumed"], *found["continues"]]]
    return "\n\n".join([summary, costs, "\n".join(notes)])
