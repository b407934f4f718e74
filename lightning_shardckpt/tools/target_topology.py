"""Layouts of a checkpoint's tensors on another topology, told by names alone. No model, no torch.

FSDP shards dim 0 of every parameter. What tensor parallelism shards is in a plan, or follows from the layouts of the
checkpoint itself; the pipeline stage of a tensor is estimated from its name. What is assumed is noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import matching_fqns
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import REPLICATED, Axis, DimShard, Holders, Layout
from lightning_shardckpt.tools.stage_estimate import EstimatedStages, estimate_stages, modules_of
from lightning_shardckpt.tools.tensor_names import aliases_by_key
from lightning_shardckpt.tools.topology_arguments import AXES, STYLES, WHOLE, ShardedDims

_TENSOR_AXES = ("tensor", "tensor_parallel", "tp")  # of the strategy, of Lightning's ModelParallelStrategy, of others
_NOT_FLOATING = ("I", "U", "BOOL")


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
        plan: styles by module pattern; by default tensor parallelism shards what it sharded in the checkpoint.
        layers: patterns that name the layers of a pipeline.
        notes: takes sentences that say what is assumed.

    Raises:
        TopologyError: if the plan or the layers do not fit the checkpoint.
    """

    root: RootIndex
    sizes: Mapping[str, int]
    plan: Mapping[str, str] = field(default_factory=dict)
    layers: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = self.root.components.get("model", Component({}))
        aliases = aliases_by_key(self._model)
        self._names = {key: [key, *aliases.get(key, ())] for key in self._model.tensors}
        self._tells_buffers = any(spec.layout.axes or spec.pinned for spec in self._model.tensors.values())
        self._dims = self._planned_dims()
        self._stages = self._estimated_stages()
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
        """Return the layout of the weight of that name and shape, for optimizer state and for what callbacks keep."""
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
        by_tensor_axis, cuts = self._tensor_parallel_dim(key, spec), list[DimShard]()
        if by_tensor_axis is not None and self.sizes["tensor"] > 1:
            cuts.append(DimShard(names.index("tensor"), *by_tensor_axis))
        if self.sizes["shard"] > 1:
            cuts.append(DimShard(names.index("shard"), 0))  # FSDP shards what tensor parallelism left
        return TargetLayout(Layout(axes, tuple(cuts)), holders)

    def _is_parameter(self, spec: TensorSpec) -> bool:
        if self._tells_buffers:
            return bool(spec.shape) and not spec.pinned
        return bool(spec.shape) and not spec.dtype.startswith(_NOT_FLOATING)

    def _tensor_parallel_dim(self, key: str, spec: TensorSpec) -> tuple[int, int] | None:
        """Return the dim that the tensor axis shards, and its blocks; None if it does not shard the tensor."""
        if self.plan:
            modules = [name.rpartition(".")[0] for name in self._names[key]]
            weight, bias = next((self._dims[m] for m in modules if m in self._dims), WHOLE)
            dim = weight if len(spec.shape) > 1 else bias
            return None if dim is None else (dim, 1)
        cuts = (c for c in spec.layout.cuts if spec.layout.axes[c.axis].name in _TENSOR_AXES)
        return next(((c.dim, c.blocks) for c in cuts), None)

    def _planned_dims(self) -> dict[str, ShardedDims]:
        """Return what the plan shards, by module."""
        modules, found = modules_of([*self._model.tensors, *self._model.aliases]), dict[str, ShardedDims]()
        for pattern, style in self.plan.items():
            named = matching_fqns(modules, pattern)
            if not named:
                raise TopologyError(f"--tp-plan: {pattern!r} matches no module of the checkpoint")
            found.update(dict.fromkeys(named, STYLES[style]))
        return found

    def _estimated_stages(self) -> EstimatedStages | None:
        if self.sizes["pipeline"] == 1:
            return None
        return estimate_stages(self._model, self.sizes["pipeline"], self.layers, self._known_ends())

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
        if self.sizes["tensor"] > 1 and not self.plan:
            if any(self._tensor_parallel_dim(key, spec) for key, spec in self._model.tensors.items()):
                self.notes.append("Tensor parallelism is taken to shard the dims that it sharded when this was saved.")
            else:
                self.notes.append(
                    "Tensors are taken as not sharded by tensor parallelism: this was saved without it. Give the plan, "
                    "such as --tp-plan 'layers.*.up=colwise' 'layers.*.down=rowwise'."
                )
        if self._stages is not None:
            layers, count = list(self._stages.stage_of), self._stages.count
            how = f"{layers[0]} … {layers[-1]} over {count} stages evenly, one stage per rank of the pipeline"
            self.notes.append(f"Pipeline stages are an estimate from names: {how}. --layers names others.")
        if any(spec.layout.order for spec in specs):
            self.notes.append("The mesh that saved does not number its ranks in order; the target's is taken to do so.")
