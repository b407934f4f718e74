"""How would another topology cut the tensors of a checkpoint? What the strategy does to a model, told by names alone.

FSDP cuts dim 0 of every parameter. What tensor parallelism cuts is in a plan, or seen from the cuts of the checkpoint
itself; which pipeline stage has a tensor follows from the numbered layers in the names. What is assumed is noted.
No model, no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.layout import MAX_RANKS, REPLICATED, Axis, Cut, Holders, Layout
from lightning_shardckpt.text import count_text

AXES = ("pipeline", "replicate", "shard", "tensor")
"""Of the strategy's mesh, outermost first; ranks are laid out row-major."""

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
_TENSOR_AXES = ("tensor", "tensor_parallel", "tp")  # of the strategy, of Lightning's ModelParallelStrategy, of others
_NOT_FLOATING = ("I", "U", "BOOL")
_ROWS, _COLUMNS, _WHOLE = (0, 0), (1, None), (None, None)  # the dims of a weight and a bias that are cut
STYLES: dict[str, tuple[int | None, int | None]] = {
    "colwise": _ROWS,
    "colwise_rep": _ROWS,
    "colwise_gather_output": _ROWS,
    "rowwise": _COLUMNS,
    "rowwise_rep": _COLUMNS,
    "rowwise_split_input": _COLUMNS,
    "embedding_rowwise": _ROWS,
    "embedding_colwise": _COLUMNS,
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,
}
"""What each style of a tensor parallel plan cuts."""


def parse_topology(text: str) -> dict[str, int]:
    """Sizes by axis from text such as ``tp=4,fsdp=2``; axes that are not named have one rank.

    >>> parse_topology("tp=4, data_parallel_shard_size=2")
    {'pipeline': 1, 'replicate': 1, 'shard': 2, 'tensor': 4}

    Raises:
        TopologyError: for what is no axis, no size, or named twice.
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


def parse_plan(rules: Sequence[str]) -> dict[str, str]:
    """Module pattern -> style, from rules such as ``layers.*.up=colwise``.

    Raises:
        TopologyError: for a rule without a style that is known.
    """
    plan = {}
    for rule in (part.strip() for text in rules for part in text.split(",")):
        pattern, _, style = rule.rpartition("=")
        if not pattern or style not in STYLES:
            raise TopologyError(f"{rule!r} is no rule: give pattern=style, where style is one of {', '.join(STYLES)}")
        plan[pattern] = style
    return plan


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """The module names that a pattern means: ``*`` is any part of one component, ``**`` any number of components.

    >>> matching(["a", "a.b", "a.b.c"], "a.*"), matching(["a", "a.b", "a.b.c"], "**.c")
    (['a.b'], ['a.b.c'])
    """
    pieces = {"**": ".*", "*": "[^.]*"}
    regex = re.compile("".join(pieces.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)))
    return [name for name in names if regex.fullmatch(name)]


def modules_of(names: Iterable[str]) -> list[str]:
    """Every module that a tensor's name lies in, in the order in which they come first.

    >>> modules_of(["a.b.weight", "scale"])
    ['a', 'a.b']
    """
    found: dict[str, None] = {}
    for name in names:
        parts = name.split(".")[:-1]
        found |= dict.fromkeys(".".join(parts[: i + 1]) for i in range(min(len(parts), 64)))
    return list(found)


# ── pipeline stages ───────────────────────────────────────────────────────────────────────────────────────────────


def stages_of(model: Component, stages: int, layers: Sequence[str], known: Mapping[str, frozenset[int]]) -> _Stages:
    """Which stages hold which tensor, as the strategy decides by default.

    Args:
        model: the tensors.
        stages: how many there are to be.
        layers: patterns that name the layers; none: the largest numbered list in the names.
        known: of tensors outside of the layers, the stages where that is known.

    Raises:
        TopologyError: if there are too few layers.
    """
    modules = modules_of([*model.tensors, *model.aliases])
    trunk = _named(modules, layers) if layers else _largest_list(model, modules, stages)
    if len(trunk) < stages:
        raise TopologyError(
            f"{count_text(len(trunk), 'layer')}{f' ({trunk[0]} …)' if trunk else ''} cannot be cut into {stages} "
            "pipeline stages: use fewer stages, or name the layers with --layers"
        )
    each, more = divmod(len(trunk), stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    stage_of = {trunk[i]: s for s in range(stages) for i in range(starts[s], starts[s + 1])}
    return _Stages(stages, stage_of, {name: i for i, name in enumerate(modules)}, known)


@dataclass(frozen=True, slots=True)
class _Stages:
    count: int
    stage_of: Mapping[str, int]
    order: Mapping[str, int]
    known: Mapping[str, frozenset[int]]

    def of(self, name: str) -> frozenset[int]:
        """The stages that hold the tensor of this name."""
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


def _named(modules: Sequence[str], patterns: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in matching(modules, pattern) if name not in chosen]
        if len(found) == 1 and (children := _numbered(modules, found[0])):
            found = children
        if not found:
            raise TopologyError(f"--layers: {pattern!r} names no module of the checkpoint")
        chosen += found
    return chosen


def _numbered(modules: Iterable[str], parent: str) -> list[str]:
    """The children of a module that have numbers for names, in order."""
    prefix = f"{parent}." if parent else ""
    found = [m for m in modules if re.fullmatch(rf"{re.escape(prefix)}\d{{1,9}}", m)]
    return sorted(found, key=lambda name: int(name.rpartition(".")[2]))


def _largest_list(model: Component, modules: Sequence[str], stages: int) -> list[str]:
    """The numbered list with most elements, of those with enough layers if there are such."""
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


# ── cuts ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Aim:
    """How the target cuts a tensor, and which ranks hold it."""

    layout: Layout
    holders: Holders


@dataclass
class Onto:
    """A checkpoint's tensors as another topology would have them; ``notes`` says what was taken for granted."""

    root: RootIndex
    sizes: Mapping[str, int]
    plan: Mapping[str, str] = field(default_factory=dict)
    layers: Sequence[str] = ()
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._model = self.root.components.get("model", Component({}))
        self._names: dict[str, list[str]] = {key: [key] for key in self._model.tensors}
        for alias, of in self._model.aliases.items():
            self._names[of].append(alias)
        self._tells_buffers = any(spec.layout.axes or spec.pinned for spec in self._model.tensors.values())
        self._styles = self._planned()
        self._stages = self._staged()
        self._note_what_is_assumed()

    @property
    def world(self) -> int:
        """Number of ranks."""
        return prod(self.sizes.values())

    def aims(self) -> dict[str, dict[str, Aim]]:
        """By component and key how every tensor is to be cut."""
        model = {key: self._of_model(key, spec) for key, spec in self._model.tensors.items()}
        found = {"model": model} if "model" in self.root.components else {}
        for name in self.root.components.keys() - {"model"}:
            tensors = self.root.components[name].tensors
            found[name] = {key: self._like_weight(name, key, spec, model) for key, spec in tensors.items()}
        return found

    def _like_weight(self, component: str, key: str, spec: TensorSpec, model: Mapping[str, Aim]) -> Aim:
        """State of an optimizer, or what a callback keeps by name, is cut as the weight of that name and shape."""
        everywhere, is_optimizer = Aim(REPLICATED, ((0, self.world),)), component == "optimizer"
        name = key.partition("/")[2].rpartition("/")[0] if is_optimizer else key.rpartition("/")[2]
        while name and not spec.pinned:
            of = self._model.aliases.get(name, name)
            if of in model and self._model.tensors[of].shape == spec.shape:
                return model[of]
            if is_optimizer:
                return Aim(REPLICATED, model[of].holders) if of in model else everywhere
            name = name.partition(".")[2]
        return everywhere

    def _of_model(self, key: str, spec: TensorSpec) -> Aim:
        holders = self._holders(key)
        if not self._is_parameter(spec):
            return Aim(REPLICATED, holders)
        names = [axis for axis in AXES[1:] if axis == "shard" or self.sizes[axis] > 1]
        strides = {"tensor": 1, "shard": self.sizes["tensor"], "replicate": self.sizes["tensor"] * self.sizes["shard"]}
        axes = tuple(Axis(name, self.sizes[name], strides[name]) for name in names)
        tensor, cuts = self._tensor_cut(key, spec), list[Cut]()
        if tensor is not None and self.sizes["tensor"] > 1:
            cuts.append(Cut(names.index("tensor"), *tensor))
        if self.sizes["shard"] > 1:
            cuts.append(Cut(names.index("shard"), 0))  # FSDP cuts what tensor parallelism left
        return Aim(Layout(axes, tuple(cuts)), holders)

    def _is_parameter(self, spec: TensorSpec) -> bool:
        if self._tells_buffers:
            return bool(spec.shape) and not spec.pinned
        return bool(spec.shape) and not spec.dtype.startswith(_NOT_FLOATING)

    def _tensor_cut(self, key: str, spec: TensorSpec) -> tuple[int, int] | None:
        """Dim and blocks that the tensor axis cuts."""
        if self.plan:
            modules = [name.rpartition(".")[0] for name in self._names[key]]
            weight, bias = next((self._styles[m] for m in modules if m in self._styles), _WHOLE)
            dim = weight if len(spec.shape) > 1 else bias
            return None if dim is None else (dim, 1)
        cuts = (c for c in spec.layout.cuts if spec.layout.axes[c.axis].name in _TENSOR_AXES)
        return next(((c.dim, c.blocks) for c in cuts), None)

    def _planned(self) -> dict[str, tuple[int | None, int | None]]:
        modules, found = modules_of([*self._model.tensors, *self._model.aliases]), {}
        for pattern, style in self.plan.items():
            named = matching(modules, pattern)
            if not named:
                raise TopologyError(f"--tp-plan: {pattern!r} matches no module of the checkpoint")
            found.update(dict.fromkeys(named, STYLES[style]))
        return found

    def _staged(self) -> _Stages | None:
        if self.sizes["pipeline"] == 1:
            return None
        return stages_of(self._model, self.sizes["pipeline"], self.layers, self._known_ends())

    def _known_ends(self) -> dict[str, frozenset[int]]:
        """The stages of tensors that were at one end of the pipeline that saved: they are there again."""
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

    def _note_what_is_assumed(self) -> None:
        specs = self._model.tensors.values()
        if not self._tells_buffers and self._model.tensors:
            self.notes.append("Nothing tells buffers from parameters: floating tensors with dims are taken for those.")
        if self.sizes["tensor"] > 1 and not self.plan:
            if any(self._tensor_cut(key, spec) for key, spec in self._model.tensors.items()):
                self.notes.append("Tensor parallelism is taken to cut the dims that it cut when this was saved.")
            else:
                self.notes.append(
                    "Tensors are taken as not cut by tensor parallelism: this was saved without it. Give the plan, "
                    "such as --tp-plan 'layers.*.up=colwise' 'layers.*.down=rowwise'."
                )
        if self._stages is not None:
            layers, count = list(self._stages.stage_of), self._stages.count
            how = f"{layers[0]} … {layers[-1]} over {count} stages evenly, one stage per rank of the pipeline"
            self.notes.append(f"Pipeline stages are an estimate from names: {how}. --layers names others.")
        if any(spec.layout.order for spec in specs):
            self.notes.append("The mesh that saved does not number its ranks in order; the target's is taken to do so.")
