"""Layouts of a checkpoint's tensors on another topology, told by names alone. No model, no torch.

FSDP shards dim 0 of every parameter. Tensor parallelism shards as the layouts of the checkpoint itself show; the
pipeline stage of a tensor is estimated from its name. Assumptions are noted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import MAX_RANKS, REPLICATED, Axis, DimShard, Holders, Layout
from lightning_shardckpt.system.text import count_text
from lightning_shardckpt.tools.listing import aliases_by_key

_TENSOR_AXES = ("tensor", "tensor_parallel", "tp")  # of the strategy, of Lightning's ModelParallelStrategy, of others
_NOT_FLOATING = ("I", "U", "BOOL")


# ── topologies as the command line writes them ────────────────────────────────────────────────────────────────────

AXES = ("pipeline", "replicate", "shard", "tensor")
"""The axes of the strategy's mesh, outermost first; ranks are laid out row-major."""

_NAMES = {
    "pp": "pipeline",
    "dp": "replicate",
    "fsdp": "shard",
    "tp": "tensor",
    "pipeline_parallel_size": "pipeline",
    "data_parallel_replicate_size": "replicate",
    "data_parallel_shard_size": "shard",
    "tensor_parallel_size": "tensor",
    **{axis: axis for axis in AXES},
}


def parse_topology(text: str) -> dict[str, int]:
    """Return sizes by axis from text such as ``tp=4,fsdp=2``; axes that are not named have one rank.

    >>> parse_topology("tp=4, data_parallel_shard_size=2")
    {'pipeline': 1, 'replicate': 1, 'shard': 2, 'tensor': 4}

    Raises:
        TopologyError: for an unknown axis, a size that is none, or an axis that is named twice.
    """
    sizes: dict[str, int] = {}
    for item in text.replace("×", ",").split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        axis = _NAMES.get(name)
        if axis is None or axis in sizes or not re.fullmatch(r"[1-9]\d{0,6}", size):
            raise TopologyError(
                f"{text!r} is no topology, because of {item.strip()!r}: give sizes such as tp=4,fsdp=2. The axes are "
                f"{', '.join(_NAMES)}; each has one size of at least 1"
            )
        sizes[axis] = int(size)
    if prod(sizes.values()) > MAX_RANKS:
        raise TopologyError(f"{text!r} has more than {MAX_RANKS} ranks")
    return {axis: sizes.get(axis, 1) for axis in AXES}


def topology_text(sizes: Mapping[str, int]) -> str:
    """Return the axes that have more than one rank as text.

    >>> topology_text({"pipeline": 1, "shard": 2, "tensor": 4}), topology_text({})
    ('shard 2 × tensor 4', 'one rank')
    """
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"


# ── layouts ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class TargetLayout:
    """The layout of a tensor on the target, and the ranks that hold it."""

    layout: Layout
    holders: Holders


@dataclass
class TargetTopology:
    """A checkpoint's tensors as another topology would have them.

    Args:
        root: the root index of the checkpoint.
        sizes: of the target, by axis.
        notes: takes sentences about assumptions.

    Raises:
        TopologyError: if the checkpoint has fewer layers than the target has stages.
    """

    root: RootIndex
    sizes: Mapping[str, int]
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = self.root.components.get("model", Component({}))
        aliases = aliases_by_key(self._model)
        self._names = {key: [key, *aliases.get(key, ())] for key in self._model.tensors}
        self._tells_buffers = any(spec.layout.axes or spec.pinned for spec in self._model.tensors.values())
        stages = self.sizes["pipeline"]
        self._stages = estimate_stages(self._model, stages, self._known_ends()) if stages > 1 else None
        self._note_assumptions()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def layouts(self) -> dict[str, dict[str, TargetLayout]]:
        """Return how the target shards every tensor, by component and key."""
        model = {key: self._of_model(key, spec) for key, spec in self._model.tensors.items()}
        found = {"model": model} if "model" in self.root.components else {}
        for name in self.root.components.keys() - {"model"}:
            tensors = self.root.components[name].tensors
            found[name] = {key: self._like_weight(name, key, spec, model) for key, spec in tensors.items()}
        return found

    def _like_weight(
        self, component: str, key: str, spec: TensorSpec, model: Mapping[str, TargetLayout]
    ) -> TargetLayout:
        """Return the layout of the weight of that name and shape, for optimizer state and the tensors of callbacks."""
        everywhere, is_optimizer = TargetLayout(REPLICATED, ((0, self.world),)), component == "optimizer"
        name = key.partition("/")[2].rpartition("/")[0] if is_optimizer else key.rpartition("/")[2]
        while name and not spec.pinned:
            of = self._model.aliases.get(name, name)
            if of in model and self._model.tensors[of].shape == spec.shape:
                return model[of]
            if is_optimizer:
                return TargetLayout(REPLICATED, model[of].holders) if of in model else everywhere
            name = name.partition(".")[2]
        return everywhere

    def _of_model(self, key: str, spec: TensorSpec) -> TargetLayout:
        holders = self._holders(key)
        if not self._is_parameter(spec):
            return TargetLayout(REPLICATED, holders)
        names = [axis for axis in AXES[1:] if axis == "shard" or self.sizes[axis] > 1]
        strides = {"tensor": 1, "shard": self.sizes["tensor"], "replicate": self.sizes["tensor"] * self.sizes["shard"]}
        axes = tuple(Axis(name, self.sizes[name], strides[name]) for name in names)
        by_tensor_axis, cuts = _tensor_parallel_dim(spec), list[DimShard]()
        if by_tensor_axis is not None and self.sizes["tensor"] > 1:
            cuts.append(DimShard(names.index("tensor"), *by_tensor_axis))
        if self.sizes["shard"] > 1:
            cuts.append(DimShard(names.index("shard"), 0))  # FSDP shards the shards of tensor parallelism
        return TargetLayout(Layout(axes, tuple(cuts)), holders)

    def _is_parameter(self, spec: TensorSpec) -> bool:
        if self._tells_buffers:
            return bool(spec.shape) and not spec.pinned
        return bool(spec.shape) and not spec.dtype.startswith(_NOT_FLOATING)

    def _known_ends(self) -> dict[str, frozenset[int]]:
        """Return the stages of tensors that were at one end of the pipeline that saved: they are there again."""
        before, last = self.root.topology.get("pipeline", 1), self.sizes["pipeline"] - 1
        each = max(self.root.world_size // max(before, 1), 1)
        found: dict[str, frozenset[int]] = {}
        for key, spec in self._model.tensors.items() if before > 1 else ():
            held = {rank // each for a, b in spec.holders for rank in (a, b - 1)}
            if held == {0} or held == {before - 1}:
                found |= dict.fromkeys(self._names[key], frozenset({0 if held == {0} else last}))
        return found

    def _holders(self, key: str) -> Holders:
        if self._stages is None:
            return ((0, self.world),)
        each = self.world // self.sizes["pipeline"]
        stages = sorted(frozenset().union(*(self._stages.of(name) for name in self._names[key])))
        return tuple((s * each, (s + 1) * each) for s in stages)

    def _note_assumptions(self) -> None:
        specs = self._model.tensors.values()
        if not self._tells_buffers and self._model.tensors:
            self.notes.append("Nothing tells buffers from parameters: floating tensors with dims are taken for those.")
        if self.sizes["tensor"] > 1:
            if any(map(_tensor_parallel_dim, specs)):
                self.notes.append("Tensor parallelism is taken to shard the dims that it sharded when this was saved.")
            else:
                self.notes.append(
                    "Tensors are taken as not sharded by tensor parallelism: this was saved without it, so which ones "
                    "the plan of the target shards is not known, and it reads less than this."
                )
        if self._stages is not None:
            layers, count = list(self._stages.stage_of), self._stages.count
            how = f"{layers[0]} … {layers[-1]} over {count} stages evenly, one stage per rank of the pipeline"
            self.notes.append(f"Pipeline stages are an estimate from names: {how}.")
        if any(spec.layout.order for spec in specs):
            self.notes.append("The mesh that saved does not number its ranks in order; the target's is taken to do so.")


def _tensor_parallel_dim(spec: TensorSpec) -> tuple[int, int] | None:
    """Return the dim that the tensor axis sharded, and its blocks; None if it did not shard the tensor."""
    cuts = (c for c in spec.layout.cuts if spec.layout.axes[c.axis].name in _TENSOR_AXES)
    return next(((c.dim, c.blocks) for c in cuts), None)


# ── pipeline stages, estimated from names as the strategy divides layers by default ───────────────────────────────


def modules_of(names: Iterable[str]) -> list[str]:
    """Return every module that a tensor's name lies in, in the order in which they come first.

    >>> modules_of(["a.b.weight", "scale"])
    ['a', 'a.b']
    """
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")[:-1]
        found |= dict.fromkeys(".".join(parts[: i + 1]) for i in range(min(len(parts), 64)))
    return list(found)


def estimate_stages(model: Component, stages: int, known: Mapping[str, frozenset[int]]) -> EstimatedStages:
    """Return which stages hold which tensor, as the strategy decides by default: by the largest list of layers.

    Args:
        model: the tensors.
        stages: number of stages.
        known: the stages of tensors outside of the layers, where they are known.

    Raises:
        TopologyError: if there are too few layers.
    """
    modules = modules_of([*model.tensors, *model.aliases])
    trunk = _largest_list(model, modules, stages)
    if len(trunk) < stages:
        raise TopologyError(
            f"{count_text(len(trunk), 'layer')}{f' ({trunk[0]} …)' if trunk else ''} cannot be split into {stages} "
            "pipeline stages: use fewer stages"
        )
    each, more = divmod(len(trunk), stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    stage_of = {trunk[i]: s for s in range(stages) for i in range(starts[s], starts[s + 1])}
    return EstimatedStages(stages, stage_of, {name: i for i, name in enumerate(modules)}, known)


@dataclass(frozen=True, slots=True)
class EstimatedStages:
    """The stage of each layer, and the order of modules, which decides the stages of the other tensors."""

    count: int
    stage_of: Mapping[str, int]
    order: Mapping[str, int]
    known: Mapping[str, frozenset[int]]

    def of(self, name: str) -> frozenset[int]:
        """Return the stages that hold the tensor of this name."""
        parts = name.split(".")
        above = [".".join(parts[:n]) for n in range(1, min(len(parts), 65))]
        for module in above:
            if module in self.stage_of:
                return frozenset({self.stage_of[module]})
        if name in self.known:
            return self.known[name]
        around = {layer.rpartition(".")[0] for layer in self.stage_of}
        unit = next((m for m in above if not any(a == m or a.startswith(f"{m}.") for a in around)), None)
        if unit is None:  # a parameter of a module that the layers lie in
            return frozenset(range(self.count))
        first = min(self.order[layer] for layer in self.stage_of)
        return frozenset({0 if self.order[unit] < first else self.count - 1})


def _largest_list(model: Component, modules: Sequence[str], stages: int) -> list[str]:
    """Return the numbered list with most elements, of those with enough layers if there are any."""
    lists: dict[str, list[str]] = {}
    for name in modules:
        parent, _, last = name.rpartition(".")
        if last.isascii() and last.isdigit():
            lists.setdefault(parent, []).append(name)
    best: tuple[tuple[bool, int], list[str]] | None = None
    for parent, members in lists.items():
        prefix = f"{parent}." if parent else ""
        size = sum(prod(spec.shape) for key, spec in model.tensors.items() if key.startswith(prefix))
        rank = len(members) >= stages, size
        if len(members) > 1 and (best is None or rank > best[0]):
            best = rank, sorted(members, key=lambda name: int(name.rpartition(".")[2]))
    return best[1] if best else []
