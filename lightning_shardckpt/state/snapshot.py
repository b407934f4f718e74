"""A rank's state for a save: live tensors by key, and JSON documents. Nothing is copied."""

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
    """The tensors of one component.

    Attributes:
        tensors: live, sharded or replicated, by stored key.
        aliases: stored key by further name.
        pinned: keys of buffers, whose replicas may differ, so that the lowest rank that holds one writes it.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One rank's part of a save. Its values must not change until the save has returned.

    Attributes:
        leaves: by component.
        own: plain tensors of the trainer's state; rank 0's are stored.
        documents: by role: "trainer", "peft" and "huggingface" (rank 0's is stored), "rank" (every rank's), "model",
            "optimizer", "frozen" and "versions" (stored once per group of ranks that hold the same tensors). Other
            groups add keys to the trainer's state that rank 0 does not have.
        notes: sentences for the user.
        replicated: plain tensors of the trainer's state that must be equal on all ranks.
    """

    leaves: dict[str, Leaves]
    own: dict[str, torch.Tensor]
    documents: dict[str, Any]
    notes: tuple[str, ...] = ()
    replicated: dict[str, torch.Tensor] = field(default_factory=dict)


def specs_of(component: str, leaves: Leaves, holders: Holders) -> dict[str, TensorSpec]:
    """Return the specs of a component's tensors, all held by ``holders``; equal tensors share one object."""
    specs = {}
    layouts: dict[int, Layout] = {}  # by id of a DTensorSpec, which tensors may share and keep alive
    for key, tensor in leaves.tensors.items():
        dtype = dtype_name(local_tensor(tensor), f"{component}/{key}")
        of = id(spec_of(tensor)) if isinstance(tensor, DTensor) else 0
        if of not in layouts:
            layouts[of] = layout_of(tensor)
        specs[key] = _spec(dtype, tuple(shape_of(tensor)), layouts[of], holders, key in leaves.pinned)
    return specs


@lru_cache(maxsize=65536)
def _spec(dtype: str, shape: Shape, layout: Layout, holders: Holders, pinned: bool) -> TensorSpec:
    return TensorSpec(dtype, shape, layout, holders, pinned)
