"""Estimate from the names of tensors which pipeline stage holds which, as the strategy divides layers by default. Pure.

The layers are the largest numbered list in the names, divided evenly. Other modules go to the first or the last stage,
by whether they come before or after the layers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.clean_fqn import matching_fqns
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.system.text import count_text


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


def estimate_stages(
    model: Component, stages: int, layers: Sequence[str], known: Mapping[str, frozenset[int]]
) -> EstimatedStages:
    """Return which stages hold which tensor, as the strategy decides by default.

    Args:
        model: the tensors.
        stages: number of stages.
        layers: patterns that name the layers; if there are none, the largest numbered list in the names is taken.
        known: the stages of tensors outside of the layers, where they are known.

    Raises:
        TopologyError: if there are too few layers.
    """
    modules = modules_of([*model.tensors, *model.aliases])
    trunk = _named(modules, layers) if layers else _largest_list(model, modules, stages)
    if len(trunk) < stages:
        raise TopologyError(
            f"{count_text(len(trunk), 'layer')}{f' ({trunk[0]} …)' if trunk else ''} cannot be split into {stages} "
            "pipeline stages: use fewer stages, or name the layers with --layers"
        )
    each, more = divmod(len(trunk), stages)
    starts = [stage * each + min(stage, more) for stage in range(stages + 1)]
    stage_of = {trunk[i]: s for s in range(stages) for i in range(starts[s], starts[s + 1])}
    return EstimatedStages(stages, stage_of, {name: i for i, name in enumerate(modules)}, known)


@dataclass(frozen=True, slots=True)
class EstimatedStages:
    """The stage of each layer, and what else decides the stages of a tensor."""

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


def _named(modules: Sequence[str], patterns: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for pattern in patterns:
        found = [name for name in matching_fqns(modules, pattern) if name not in chosen]
        if len(found) == 1 and (children := _numbered(modules, found[0])):
            found = children
        if not found:
            raise TopologyError(f"--layers: {pattern!r} names no module of the checkpoint")
        chosen += found
    return chosen


def _numbered(modules: Iterable[str], parent: str) -> list[str]:
    """Return the children of a module that have numbers for names, in order."""
    prefix = f"{parent}." if parent else ""
    found = [m for m in modules if re.fullmatch(rf"{re.escape(prefix)}\d{{1,9}}", m)]
    return sorted(found, key=lambda name: int(name.rpartition(".")[2]))


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
