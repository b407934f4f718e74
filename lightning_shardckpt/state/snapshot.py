"""What does a rank bring to a save? Live tensors by key, and JSON documents; nothing is copied yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shardckpt.index import TensorSpec
from lightning_shardckpt.layout import Holders
from lightning_shardckpt.staging import dtype_name
from lightning_shardckpt.state.geometry import layout_of


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors of one component: live, sharded or replicated, by the key under which they are stored.

    ``pinned`` keys are written by the lowest rank that holds them, since their replicas may differ (buffers).
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    pinned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that one rank contributes.

    ``leaves`` by component; ``own`` holds plain trainer tensors, of which rank 0's are stored. ``documents`` by role:
    "trainer" (rank 0's is stored), "rank" (every rank's), "model" and "optimizer" (stored once per group of ranks
    that hold the same tensors). ``notes`` is what a person should know. Values must not change until the save returned.
    """

    leaves: dict[str, Leaves]
    own: dict[str, torch.Tensor]
    documents: dict[str, Any]
    notes: tuple[str, ...] = ()


def specs_of(component: str, leaves: Leaves, holders: Holders) -> dict[str, TensorSpec]:
    """The specs of a component's tensors, all held by ``holders``."""
    return {
        key: TensorSpec(
            dtype=dtype_name(tensor, f"{component}/{key}"),
            shape=tuple(tensor.shape),
            layout=layout_of(tensor),
            holders=holders,
            pinned=key in leaves.pinned,
        )
        for key, tensor in leaves.tensors.items()
    }


def merge_documents(documents: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The union of what groups of ranks stored of one role: mappings are merged, lists joined without repeats.

    Pipeline stages hold different parameters of the same param group; single values are taken from the first.
    """
    merged: dict[str, Any] = {}
    for document in documents:
        for key, value in document.items():
            merged[key] = _merged(merged[key], value) if key in merged else value
    return merged


def _merged(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return merge_documents([a, b])
    if isinstance(a, list) and isinstance(b, list):
        seen = {repr(item) for item in a}
        return a + [item for item in b if repr(item) not in seen]
    return a
