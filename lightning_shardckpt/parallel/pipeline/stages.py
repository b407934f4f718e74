"""Assignment of modules to pipeline stages. Pure: the module is not changed.

The *layers* (the trunk) are split into consecutive ranges, one per stage. Every other module with parameters goes to
the first stage if it is registered before the layers, to the last one if after. All stages have modules without
parameters, and parameters outside of these modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, cast, get_args

from torch import nn

from lightning_shardckpt.compat.torch_modules import NormWithStatistics, child_slots
from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.parallel.sharding.fqn import are_layers, is_inside, module_names, named_modules, select_modules

Where = Literal["first", "last", "every"]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The assignment of modules with parameters to stages; names are clean FQNs.

    Attributes:
        layers: the trunk, in the order in which a step calls the layers.
        ranges: the half-open range of layers of each stage.
        others: the place of every other module with parameters.
    """

    layers: tuple[str, ...]
    ranges: tuple[tuple[int, int], ...]
    others: Mapping[str, Where]

    @property
    def stages(self) -> int:
        return len(self.ranges)

    def holders(self, name: str) -> frozenset[int]:
        """Return the stages that have the parameter, the buffer or the module of this clean FQN."""
        units = self.units().items()
        holders = (stages for unit, stages in units if name == unit or name.startswith(f"{unit}."))
        return next(holders, frozenset(range(self.stages)))

    def units(self) -> dict[str, frozenset[int]]:
        """Return the stages of every layer and every other module with parameters, by clean FQN."""
        last = self.stages - 1
        where = {"first": frozenset({0}), "last": frozenset({last}), "every": frozenset(range(self.stages))}
        units = {self.layers[i]: frozenset({s}) for s, (a, b) in enumerate(self.ranges) for i in range(a, b)}
        return units | {name: where[place] for name, place in self.others.items()}


def plan_stages(
    root: nn.Module,
    stages: int,
    *,
    layers: Sequence[str] | None = None,
    split: str | Sequence[str] = "even",
    modules: Mapping[str, Where] | None = None,
) -> StagePlan:
    """Return the assignment of the modules of ``root`` to stages.

    Args:
        root: the whole module.
        stages: their number.
        layers: patterns for the names of the layers; by default the largest list of layers.
        split: "even" by number of layers, or the names of the first layers of all stages but the first.
        modules: places of modules other than layers, by pattern.

    Raises:
        TopologyError: if there are no or too few layers, or a pattern matches no module.
    """
    trunk = _named_layers(root, layers) if layers is not None else _largest_trunk(root, stages)
    others = _place_others(root, trunk, modules or {})
    ranges = _split_evenly(root, trunk, stages) if split == "even" else _split_at(trunk, split, stages)
    return StagePlan(tuple(trunk), tuple(ranges), others)


def _largest_trunk(root: nn.Module, stages: int) -> list[str]:
    """Return the layers of the list with most parameters, preferring lists with enough layers."""
    best: tuple[tuple[bool, int], list[str]] | None = None
    names = module_names(root)
    for module in named_modules(root).values():
        if not _is_trunk(module):
            continue
        layers = sum(any(True for _ in child.parameters()) for child in module.children())
        size = layers >= stages, sum(p.numel() for p in module.parameters())
        if best is None or size > best[0]:
            best = size, [names[child] for child in module.children()]
    if best is None:
        raise TopologyError(
            f"{type(root).__name__} has no list of layers (ModuleList, ModuleDict or Sequential) to split into "
            "pipeline stages. Name the layers in the order in which they run: "
            "Pipeline(layers=['net.layer1', 'net.layer2', …])."
        )
    return best[1]


def _is_trunk(module: nn.Module) -> bool:
    """Return True for a Sequential, or a list or dict of layers, with at least two children that have parameters."""
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    if len(children) < 2:
        return False
    if isinstance(module, nn.Sequential):
        return True
    alike = isinstance(module, nn.ModuleList | nn.ModuleDict) and are_layers(children)
    return alike and not isinstance(children[0], nn.ModuleList | nn.ModuleDict | nn.ParameterList)


def _named_layers(root: nn.Module, patterns: Sequence[str]) -> list[str]:
    modules, names = named_modules(root), module_names(root)
    chosen: list[str] = []
    for pattern in patterns:
        new = [name for name in select_modules(root, [pattern], "Pipeline(layers=…)") if name not in chosen]
        if not new:
            raise TopologyError(f"Pipeline(layers=…): {pattern!r} matches only layers that are named already")
        if len(new) == 1 and isinstance(modules[new[0]], nn.ModuleList | nn.ModuleDict):
            new = [names[child] for child in modules[new[0]].children()]
        chosen += new
    nested = [a for a in chosen if any(a.startswith(f"{b}.") for b in chosen)]
    if nested:
        raise TopologyError(f"Pipeline(layers=…): {nested[0]} is a part of another layer that is named")
    return chosen


def _place_others(root: nn.Module, layers: Sequence[str], wanted: Mapping[str, Where]) -> dict[str, Where]:
    """Return the places of all modules with parameters outside of the trunk, outermost first, by registration.

    A module that is registered on both sides of the layers is placed on every stage.
    """
    modules, names = named_modules(root), module_names(root)
    trunk = {modules[name] for name in layers}
    requested: dict[str, Where] = {}
    for pattern, where in wanted.items():
        if where not in get_args(Where):
            raise TopologyError(f"Pipeline(modules=…): {pattern!r} must be one of {get_args(Where)}, found {where!r}")
        matching = select_modules(root, [pattern], "Pipeline(modules=…)")
        outermost = [n for n in matching if not any(n.startswith(f"{m}.") for m in matching)]
        requested |= dict.fromkeys(outermost, where)
    places = dict[str, set[Where | None]]()

    def walk(prefix: str, parent: nn.Module) -> None:
        children = [(prefix + slot, child) for slot, child in child_slots(parent).items() if child is not None]
        around = [k for k, (_, child) in enumerate(children) if not trunk.isdisjoint(child.modules())]
        first_time = [k for k in around if names[children[k][1]] == clean_fqn(children[k][0])] or around
        for k, (name, child) in enumerate(children):
            unit = names[child]
            if k in around:
                if k in first_time and child not in trunk:
                    walk(f"{name}.", child)
            elif _has_state(child) and (unit in places or not is_inside(unit, {*layers, *places})):
                before, after = k < first_time[0], k > first_time[-1]
                places.setdefault(unit, set()).add("first" if before else "last" if after else None)

    walk("", root)
    unused = [name for name in requested if name not in places]
    if unused:
        raise TopologyError(
            f"Pipeline(modules=…): {unused[0]} cannot be placed: it is a layer, a part of one, a part of another "
            f"module, or has no parameters. Modules that can be: {sorted(places)}"
        )
    return {name: requested.get(name) or _default_place(name, sides) for name, sides in places.items()}


def _default_place(name: str, sides: set[Where | None]) -> Where:
    if None not in sides:
        return "every" if len(sides) > 1 else cast("Where", next(iter(sides)))
    raise TopologyError(
        f"{name} is registered between layers of the pipeline: set its place by "
        f"Pipeline(modules={{{name!r}: 'first' | 'last' | 'every'}}), or add it to Pipeline(layers=…)"
    )


def _has_state(module: nn.Module) -> bool:
    """Return True for a module with parameters, or with statistics that training changes."""
    statistics = any(isinstance(m, NormWithStatistics) and m.running_mean is not None for m in module.modules())
    return statistics or any(True for _ in module.parameters())


def _split_evenly(root: nn.Module, layers: Sequence[str], stages: int) -> list[tuple[int, int]]:
    modules = named_modules(root)
    weighed = [i for i, name in enumerate(layers) if any(True for _ in modules[name].parameters())]
    if len(weighed) < stages:
        raise TopologyError(
            f"{len(weighed)} layers with parameters ({layers[0]} … {layers[-1]}) cannot be split into {stages} "
            "pipeline stages: use fewer stages, or name more layers with Pipeline(layers=…)"
        )
    size, longer = divmod(len(weighed), stages)  # the first stages have one more
    starts = [weighed[stage * size + min(stage, longer)] for stage in range(1, stages)]
    # a layer without parameters, such as an activation function, goes with the layer before it
    return list(pairwise([0, *starts, len(layers)]))


def _split_at(layers: Sequence[str], names: Sequence[str], stages: int) -> list[tuple[int, int]]:
    if len(names) != stages - 1 or not set(names) <= set(layers):
        raise TopologyError(
            f'Pipeline(split=…) must be "even", or name the first layer of all {stages} stages but the first: expected '
            f"{stages - 1} of {list(layers)}, found {names!r}"
        )
    starts = [0, *(list(layers).index(name) for name in names), len(layers)]
    if any(a >= b for a, b in pairwise(starts)):
        raise TopologyError(f"Pipeline(split=…): {list(names)} are not in the order of the layers {list(layers)}")
    return list(pairwise(starts))
