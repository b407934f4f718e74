"""A rank's state for a save: live tensors by key, and JSON documents; nothing is copied yet."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat.dtensor import local_tensor, shape_of, spec_of
from lightning_shardckpt.format.box import Shape
from lightning_shardckpt.format.index import TensorSpec
from lightning_shardckpt.format.layout import Holders, Layout
from lightning_shardckpt.state.dtensor_layout import layout_of
from lightning_shardckpt.state.tensor_bytes import dtype_name


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors of one component: live, sharded or replicated, by the key under which they are stored.

    ``pinned`` keys are written by the lowest rank that holds them, since their replicas may differ (buffers).
    ``records`` say how compound tensors are put together.
    ``frozen`` keys are of parameters for which no gradient is computed, as far as that is known.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()
    records: dict[str, Any] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that one rank contributes.

    ``leaves`` by component; ``own`` holds plain trainer tensors, of which rank 0's are stored. ``documents`` by role:
    "trainer", "peft" and "huggingface" (rank 0's is stored), "rank" (every rank's), "model", "optimizer", "frozen"
    and "versions" (stored once per group of ranks that hold the same tensors). Of the trainer's state, other groups add
    what rank 0 does not have. ``given`` are those of its plain tensors that a user put there, and all ranks must have
    alike. ``notes`` is what a person should know. Values must not change until the save returned.
    """

    leaves: dict[str, Leaves]
    own: dict[str, torch.Tensor]
    documents: dict[str, Any]
    notes: tuple[str, ...] = ()
    given: dict[str, torch.Tensor] = field(default_factory=dict)


def specs_of(component: str, leaves: Leaves, holders: Holders) -> dict[str, TensorSpec]:
    """The specs of a component's tensors, all held by ``holders``; one object for all tensors that are alike."""
    found = {}
    layouts: dict[int, Layout] = {}  # by id of a DTensorSpec, which many tensors may share, and keep
    for key, tensor in leaves.tensors.items():
        dtype = dtype_name(local_tensor(tensor), f"{component}/{key}")
        of = id(spec_of(tensor)) if isinstance(tensor, DTensor) else 0
        if of not in layouts:
            layouts[of] = layout_of(tensor)
        found[key] = _spec(dtype, tuple(shape_of(tensor)), layouts[of], holders, key in leaves.pinned)
    return found


@lru_cache(maxsize=65536)
def _spec(dtype: str, shape: Shape, layout: Layout, holders: Holders, pinned: bool) -> TensorSpec:
    return TensorSpec(dtype, shape, layout, holders, pinned)
