"""Digests of what several ranks hold, so that replicas that differ are noticed before they are mixed.

A save takes each part of the state from one of the ranks that hold it, and deals the work out: of replicas that are not
equal it would make a state that no rank ever had.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch

from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import REPLICATED, Layout
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.snapshot import Leaves

Digests = dict[str, dict[str, int]]
"""By what the replicas are of (which part under which layout) and by ``component/key``: this rank's digests."""


@torch.no_grad()
def replica_digests(components: Mapping[str, Leaves], tables: Mapping[str, Component], rank: int) -> Digests:
    """Digests of the tensors that other ranks hold, too; pinned ones may differ, and are left out.

    As quick as memory is read; a sum of 64-bit words, so that it finds what is not equal, but not what was exchanged.

    Args:
        components: the leaves of each component.
        tables: their specs.
        rank: this one, in the default process group.
    """
    found: list[tuple[str, str]] = []
    sums: list[torch.Tensor] = []
    for component, leaves in components.items():
        specs = tables[component].tensors
        kinds = {id(spec): spec.layout for spec in specs.values()}  # tensors that are alike share their spec
        labels = {kind: _label(layout, rank) for kind, layout in kinds.items()}
        for key, tensor in leaves.tensors.items():
            label = labels[id(specs[key])]
            if label is not None and key not in leaves.pinned and local_tensor(tensor).numel():
                found.append((label, f"{component}/{key}"))
                sums.append(_sum(local_tensor(tensor)))
    digests: Digests = {}
    for (label, name), total in zip(found, _numbers(sums), strict=True):
        digests.setdefault(label, {})[name] = total
    return digests


def combined(digests: Digests) -> dict[str, str]:
    """One digest of all tensors for each label."""
    return {
        label: checksum("\n".join(f"{name}={total}" for name, total in sorted(of.items())).encode())
        for label, of in digests.items()
    }


def differing(reports: Mapping[int, Digests]) -> dict[str, list[list[int]]]:
    """Return by ``component/key`` the ranks that hold equal values, where there are several such sets.

    >>> differing({0: {"": {"model/w": 1}}, 1: {"": {"model/w": 2}}, 2: {"": {"model/w": 1}}})
    {'model/w': [[0, 2], [1]]}
    """
    places = dict.fromkeys((label, name) for found in reports.values() for label, of in found.items() for name in of)
    wrong: dict[str, list[list[int]]] = {}
    for label, name in places:
        equal: dict[int, list[int]] = {}
        for rank, found in reports.items():
            if name in found.get(label, {}):
                equal.setdefault(found[label][name], []).append(rank)
        if len(equal) > 1:
            wrong[name] = list(equal.values())
    return wrong


@lru_cache(maxsize=4096)
def _label(layout: Layout, rank: int) -> str | None:
    """Return which part the rank has a replica of; None if nobody else has that part."""
    if layout == REPLICATED:
        return ""
    cut = {c.axis for c in layout.cuts}
    if all(axis.size == 1 for number, axis in enumerate(layout.axes) if number not in cut):
        return None
    return f"{checksum(repr((layout.axes, layout.cuts, layout.order)).encode())} {layout.shard(rank)}"


def _sum(local: torch.Tensor) -> torch.Tensor:
    """Return the sum of the tensor's memory as 64-bit words, and of the bytes that are left."""
    flat = local.contiguous().reshape(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    words = flat[:whole]
    if words.data_ptr() % 8 or words.storage_offset() % 8:
        words = words.clone()
    return words.view(torch.int64).sum() + flat[whole:].sum(dtype=torch.int64)


def _numbers(sums: list[torch.Tensor]) -> list[int]:
    """Return tensors' values; one wait for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, total in enumerate(sums):
        by_device.setdefault(total.device, []).append(place)
    found = [0] * len(sums)
    for places in by_device.values():
        for place, number in zip(places, torch.stack([sums[place] for place in places]).tolist(), strict=True):
            found[place] = number
    return found
