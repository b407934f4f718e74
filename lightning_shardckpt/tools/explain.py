"""Plan of a resume on another topology: ``python -m lightning_shardckpt explain PATH --onto tp=4,fsdp=2``.

The planner of the real load runs for every rank of the target. Reads indexes only: no model, no torch. Layouts on the
target follow from the checkpoint's own: FSDP shards dim 0 of every parameter, tensor parallelism shards the same dims
as before, and pipeline stages hold the same tensors. Assumptions are reported.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import (
    MAX_RANKS,
    REPLICATED,
    Axis,
    DimShard,
    Holders,
    Layout,
    Part,
    parts_of_rank,
)
from lightning_shardckpt.format.plan import Overlap, plan_load
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.did_you_mean import open_checkpoint
from lightning_shardckpt.system.text import count_text, size_text
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.tools.listing import long_table
from lightning_shardckpt.transfer.read_plan import Request, single_run
from lightning_shardckpt.transfer.reader import Checkpoint
from lightning_shardckpt.transfer.shard_reader import plan_reads

AXES = ("pipeline", "replicate", "shard", "tensor")
"""The axes of the strategy's mesh, outermost first; ranks are laid out row-major."""

_NAMES = {
    "pp": "pipeline",
    "dp": "replicate",
    "fsdp": "shard",
    "tp": "tensor",
    **{f"{axis}_parallel_size": axis for axis in ("pipeline", "tensor")},
    **{f"data_parallel_{axis}_size": axis for axis in ("replicate", "shard")},
    **{axis: axis for axis in AXES},
}
_TENSOR_AXES = ("tensor", "tensor_parallel", "tp")  # of the strategy, of Lightning's ModelParallelStrategy, of others
_NOT_FLOATING = ("I", "U", "BOOL")
_LISTED = 32


def explain(
    path: str | os.PathLike[str],
    onto: str | Mapping[str, int],
    *,
    storage_options: Mapping[str, Any] | None = None,
    tuning: Tuning = TUNING,
) -> dict[str, Any]:
    """Return the bytes that each rank of a target topology would need and read, as values that JSON can hold.

    Each item of ``ranks`` has the bytes that the rank ``needs``; the bytes that it ``reads`` and verifies: whole
    checksum blocks and small gaps between them; the number of ``calls``; and the needed bytes by rank of the checkpoint
    ``from`` which it reads. This holds for a resume in which every rank reads for itself, into host memory. Fabric,
    functions and ``verify="first"`` read live tensors once more.

    Args:
        path: the checkpoint.
        onto: sizes by axis, or text such as ``tp=4,fsdp=2``.
        storage_options: for URLs, see ``ShardCkptIO``.
        tuning: sizes of the load.

    Returns:
        The costs by rank and in total, the assumptions, and the state that would not continue exactly.

    Raises:
        CheckpointNotFoundError: if there is no checkpoint; describes the content of the path.
        TopologyError: if the target is malformed, or has another pipeline than the checkpoint.
    """
    text = onto if isinstance(onto, str) else ",".join(f"{axis}={size}" for axis, size in onto.items())
    sizes = parse_topology(text)
    with open_checkpoint(path, storage_options=storage_options) as checkpoint:
        root = checkpoint.root
        ranks = _plan_ranks(checkpoint, sizes, tuning)
    reads = [rank["reads"] for rank in ranks]
    mean = sum(reads) / len(reads)
    return {
        "path": os.fspath(path),
        "saved_on": root.topology,
        "onto": sizes,
        "ranks": ranks,
        "totals": {key: sum(rank[key] for rank in ranks) for key in ("needs", "reads", "calls")},
        "imbalance": max(reads) / mean if mean else 1.0,
        "assumed": note_assumptions(root, sizes),
        "continues": _describe_continuation(root, sizes),
    }


def parse_topology(text: str) -> dict[str, int]:
    """Return sizes by axis from text such as ``tp=4,fsdp=2``; other axes have size 1.

    >>> parse_topology("tp=4, data_parallel_shard_size=2")
    {'pipeline': 1, 'replicate': 1, 'shard': 2, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for item in text.replace("×", ",").split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        axis = _NAMES.get(name)
        if axis is None or axis in sizes or not re.fullmatch(r"[1-9]\d{0,6}", size):
            raise TopologyError(
                f"{text!r} is not a topology, because of {item.strip()!r}: give sizes such as tp=4,fsdp=2. The axes "
                f"are {', '.join(_NAMES)}; each has one size of at least 1"
            )
        sizes[axis] = int(size)
    if prod(sizes.values()) > MAX_RANKS:
        raise TopologyError(f"{text!r} has more than {MAX_RANKS} ranks")
    return {axis: sizes.get(axis, 1) for axis in AXES}


def topology_text(sizes: Mapping[str, int]) -> str:
    """Return a text of the axes with more than one rank.

    >>> topology_text({"pipeline": 1, "shard": 2, "tensor": 4}), topology_text({})
    ('shard 2 × tensor 4', 'one rank')
    """
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


# ── layouts on the target ─────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The layout of a tensor on the target, and the ranks that hold it."""

    layout: Layout
    holders: Holders


def target_layouts(root: RootIndex, sizes: Mapping[str, int]) -> dict[str, dict[str, TargetLayout]]:
    """Return the layout of every tensor on a target topology, by component and key."""
    stages, stages_before = sizes["pipeline"], root.topology.get("pipeline", 1)
    if stages not in (1, stages_before):
        raise TopologyError(
            f"a checkpoint does not tell how its layers would be split into {stages} pipeline stages: give pp=1"
            + (f" or pp={stages_before}, with which it was saved" if stages_before > 1 else "")
        )
    model, world = root.components.get("model", Component({})), prod(sizes.values())
    per_stage, per_stage_before = world // stages, max(root.world_size // stages_before, 1)

    def holders(spec: TensorSpec) -> Holders:
        """Return the ranks of the same stages."""
        if stages == 1:
            return ((0, world),)
        held = sorted({rank // per_stage_before for a, b in spec.holders for rank in range(a, b)})
        return tuple((stage * per_stage, (stage + 1) * per_stage) for stage in held)

    of_model = {
        key: TargetLayout(_layout(spec, sizes) if _is_parameter(spec, model) else REPLICATED, holders(spec))
        for key, spec in model.tensors.items()
    }

    def like_weight(component: str, key: str, spec: TensorSpec) -> TargetLayout:
        """Return the layout of the weight of the same name and shape, for optimizer state and tensors of callbacks."""
        everywhere, is_optimizer = TargetLayout(REPLICATED, ((0, world),)), component == "optimizer"
        name = key.partition("/")[2].rpartition("/")[0] if is_optimizer else key.rpartition("/")[2]
        while name and not spec.pinned:
            of = model.aliases.get(name, name)
            if of in of_model and model.tensors[of].shape == spec.shape:
                return of_model[of]
            if is_optimizer:
                return TargetLayout(REPLICATED, of_model[of].holders) if of in of_model else everywhere
            name = name.partition(".")[2]
        return everywhere

    return {
        name: of_model
        if name == "model"
        else {key: like_weight(name, key, spec) for key, spec in component.tensors.items()}
        for name, component in root.components.items()
    }


def _layout(spec: TensorSpec, sizes: Mapping[str, int]) -> Layout:
    names = [axis for axis in AXES[1:] if axis == "shard" or sizes[axis] > 1]
    strides = {"tensor": 1, "shard": sizes["tensor"], "replicate": sizes["tensor"] * sizes["shard"]}
    by_tensor_axis, cuts = _tensor_parallel_dim(spec), list[DimShard]()
    if by_tensor_axis is not None and sizes["tensor"] > 1:
        cuts.append(DimShard(names.index("tensor"), *by_tensor_axis))
    if sizes["shard"] > 1:
        cuts.append(DimShard(names.index("shard"), 0))  # FSDP shards the shards of tensor parallelism
    return Layout(tuple(Axis(name, sizes[name], strides[name]) for name in names), tuple(cuts))


def _tensor_parallel_dim(spec: TensorSpec) -> tuple[int, int] | None:
    """Return the dim that the tensor axis sharded, and its blocks; None if it did not shard the tensor."""
    cuts = (c for c in spec.layout.cuts if spec.layout.axes[c.axis].name in _TENSOR_AXES)
    return next(((c.dim, c.blocks) for c in cuts), None)


def _is_parameter(spec: TensorSpec, model: Component) -> bool:
    if not spec.shape:
        return False
    return not spec.pinned if _has_buffers_marked(model) else not spec.dtype.startswith(_NOT_FLOATING)


def _has_buffers_marked(model: Component) -> bool:
    return any(spec.layout.axes or spec.pinned for spec in model.tensors.values())


def note_assumptions(root: RootIndex, sizes: Mapping[str, int]) -> list[str]:
    """Return sentences on the assumptions of `target_layouts`."""
    model, notes = root.components.get("model", Component({})), list[str]()
    if not _has_buffers_marked(model) and model.tensors:
        notes.append("No tensor is marked as a buffer: floating tensors with dims are assumed to be parameters.")
    if sizes["tensor"] > 1 and any(map(_tensor_parallel_dim, model.tensors.values())):
        notes.append("Tensor parallelism is assumed to shard the same dims as in the checkpoint.")
    elif sizes["tensor"] > 1:
        notes.append(
            "Tensors are assumed not to be sharded by tensor parallelism: the checkpoint was saved without it, so the "
            "tensors that the target's plan shards are not known. The target reads less than this."
        )
    if any(spec.layout.order for spec in model.tensors.values()):
        notes.append("The checkpoint's mesh does not number its ranks in order; the target's mesh is assumed to do so.")
    return notes


# ── costs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _plan_ranks(checkpoint: Checkpoint, sizes: Mapping[str, int], tuning: Tuning) -> list[dict[str, Any]]:
    """Return the costs of all ranks; replicas read the same bytes, so they are planned once."""
    layouts = target_layouts(checkpoint.root, sizes)
    per_replica = sizes["shard"] * sizes["tensor"]
    per_stage = per_replica * sizes["replicate"]

    @cache
    def overlaps_of(
        spec: TensorSpec, replica: int | None, parts: tuple[Part, ...]
    ) -> tuple[Shape, list[tuple[Overlap, tuple[int, int, int] | None]]]:
        """Return the shape of a rank's part, and the overlaps that fill it, as ``sources.source`` plans them."""
        shape = tuple(max(ends) for ends in zip(*(part.local.stop for part in parts), strict=True))
        shape = shape if parts else (0,) * len(spec.shape)
        size = DTYPE_BYTES[spec.dtype]
        return shape, [(one, single_run(one, shape, size)) for one in plan_load(spec, replica, parts)]

    def cost(rank: int) -> dict[str, Any]:
        requests, needs = list[Request](), 0
        for name, component in layouts.items():
            tensors, replicas = checkpoint.root.components[name].tensors, checkpoint.replicas(name)
            for key, target in component.items():
                if any(a <= rank < b for a, b in target.holders):
                    spec = tensors[key]
                    parts = parts_of_rank(target.layout, spec.shape, rank)
                    needs += sum(part.box.numel for part in parts) * DTYPE_BYTES[spec.dtype]
                    shape, overlaps = overlaps_of(spec, replicas[key], parts)
                    for one, run in overlaps:
                        entry = checkpoint.entry(name, key, one)
                        requests.append(Request(key, one, entry, shape, run, memoryview(b"")))
        reads = list(plan_reads(checkpoint, requests, verify=True, tuning=tuning))
        by_writer = Counter[int]()
        for request in requests:
            by_writer[request.overlap.writer] += request.nbytes
        totals = {"needs": needs, "reads": sum(length for _, _, length in reads), "calls": len(reads)}
        return totals | {"from": dict(sorted(by_writer.items()))}

    cost_of_replica = cache(lambda stage, place: cost(stage * per_stage + place))
    return [
        {"rank": rank, **cost_of_replica(rank // per_stage, rank % per_replica)} for rank in range(prod(sizes.values()))
    ]


# ── continuation ──────────────────────────────────────────────────────────────────────────────────────────────────


def _describe_continuation(root: RootIndex, sizes: Mapping[str, int]) -> list[str]:
    """Return sentences on all state that a resume would not continue exactly; see "Resume" in the guide."""
    before = {axis: root.topology.get(axis, 1) for axis in sizes}
    data_before, data = before["replicate"] * before["shard"], sizes["replicate"] * sizes["shard"]
    if not root.topology:
        return ["The checkpoint has no topology, so it is unknown if random numbers and data continue."]
    if before == dict(sizes):
        return ["The topology is the same: the run continues exactly, if its hardware computes the same twice."]
    sentences = ["Weights, buffers and optimizer state are bit-equal; sums in another order round differently."]
    if data != data_before:
        become = "1 data-parallel rank becomes" if data_before == 1 else f"{data_before} data-parallel ranks become"
        sentences.append(
            f"{become} {data}: the order of the data in mid-epoch continues with a DistributedSampler. "
            "Change batch_size with it, so that the global batch keeps its size."
        )
    if data != data_before or before["pipeline"] != sizes["pipeline"]:
        sentences.append("Random numbers (dropout) are drawn anew: the data-parallel ranks or the pipeline change.")
    return sentences


# ── text ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(report: dict[str, Any], everything: bool = False) -> str:
    """Render the result of ``explain`` as text for people."""
    ranks, totals = report["ranks"], report["totals"]

    def row(rank: dict[str, Any]) -> tuple[str, ...]:
        ratio = f"{rank['reads'] / rank['needs']:.2f} ×" if rank["needs"] else ""
        sizes = size_text(rank["needs"]), size_text(rank["reads"])
        return str(rank["rank"]), *sizes, ratio, f"{rank['calls']:,}", f"{len(rank['from'])}"

    header = ("rank", "needs", "reads", "ratio", "calls", "of ranks")
    costs = long_table(header, ranks, row, limit=None if everything else _LISTED, noun="rank", right=header)
    summary = (
        f"{report['path']}: from {topology_text(report['saved_on'])} onto {topology_text(report['onto'])}\n"
        f"All {count_text(len(ranks), 'rank')} need {size_text(totals['needs'])} and read {size_text(totals['reads'])}"
        f", by {totals['calls']:,} calls. The largest rank reads {report['imbalance']:.2f} × the mean."
    )
    notes = [f"- {note}" for note in [*report["assumed"], *report["continues"]]]
    return "\n\n".join([summary, costs, "\n".join(notes)])
