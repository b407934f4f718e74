"""Topologies and tensor-parallel plans as the command line writes them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod

from lightning_shardckpt.errors import TopologyError
from lightning_shardckpt.format.layout import MAX_RANKS

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
ShardedDims = tuple[int | None, int | None]
"""The dim of a weight and the dim of a bias that tensor parallelism shards; None: it stays whole."""

WHOLE: ShardedDims = (None, None)
_ROWS: ShardedDims = (0, 0)
_COLUMNS: ShardedDims = (1, None)
STYLES: dict[str, ShardedDims] = {
    "colwise": _ROWS,
    "colwise_rep": _ROWS,
    "colwise_gather_output": _ROWS,
    "rowwise": _COLUMNS,
    "rowwise_rep": _COLUMNS,
    "rowwise_split_input": _COLUMNS,
    "embedding_rowwise": _ROWS,
    "embedding_colwise": _COLUMNS,
    "replicate": WHOLE,
    "replicated_with_grad_allreduce": WHOLE,
}
"""What each style of a tensor-parallel plan shards."""


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


def parse_plan(rules: Sequence[str]) -> dict[str, str]:
    """Return styles by module pattern, from rules such as ``layers.*.up=colwise``.

    Raises:
        TopologyError: for a rule without a known style.
    """
    plan = {}
    for rule in (part.strip() for text in rules for part in text.split(",")):
        pattern, _, style = rule.rpartition("=")
        if not pattern or style not in STYLES:
            raise TopologyError(f"{rule!r} is no rule: give pattern=style, where style is one of {', '.join(STYLES)}")
        plan[pattern] = style
    return plan


def topology_text(sizes: Mapping[str, int]) -> str:
    """Return the axes that have more than one rank as text.

    >>> topology_text({"pipeline": 1, "shard": 2, "tensor": 4}), topology_text({})
    ('shard 2 × tensor 4', 'one rank')
    """
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "one rank"
