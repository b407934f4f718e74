"""Digests of what several ranks hold, so that replicas that differ are noticed before they are mixed.

A save takes each part of the state from one of the ranks that hold it, and deals the work out: of replicas that are not
equal it would make a state that no rank ever had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import REPLICATED, Layout
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.system.tensor_digest import bit_digest, numbers

Digests = dict[str, dict[str, int | str]]
"""By what the replicas are of (which ranks hold which part under which layout) and by name: this rank's digests."""


def replica_digests(found: Snapshot, tables: Mapping[str, Component], rank: int, group: str) -> Digests:
    """Digests of what other ranks hold, too: tensors, and values of the model and of optimizers.

    Pinned tensors may differ, and are left out. As quick as memory is read.

    Args:
        found: what this rank saves.
        tables: the specs of its tensors.
        rank: this one, in the default process group.
        group: of ranks that hold the same tensors, any text that they have in common.
    """
    digests: Digests = {}
    places: list[tuple[str, str]] = []
    tensors: list[torch.Tensor] = []
    for component, leaves in found.leaves.items():
        specs = tables[component].tensors
        kinds = {id(spec): spec.layout for spec in specs.values()}  # tensors that are alike share their spec
        parts = {kind: _part(layout, rank) for kind, layout in kinds.items()}
        for key, tensor in leaves.tensors.items():
            part, is_shared = parts[id(specs[key])]
            if key in leaves.tied:  # pipeline stages hold it, too
                label = f"{key} {part}"
            elif is_shared:
                label = f"{group} {part}"
            else:
                continue
            if key not in leaves.pinned and local_tensor(tensor).numel():
                places.append((label, f"{component}/{key}"))
                tensors.append(local_tensor(tensor))
    for (label, name), digest in zip(places, numbers(map(bit_digest, tensors)), strict=True):
        digests.setdefault(label, {})[name] = digest
    if found.given:
        given = zip(found.given.items(), numbers(map(bit_digest, found.given.values())), strict=True)
        names = checksum(repr(sorted(found.given)).encode())
        digests[f"given {names}"] = {name: f"{tuple(tensor.shape)} {digest}" for (name, tensor), digest in given}
    digests[f"{group} values"] = dict(_values(found.documents))
    return digests


def combined(digests: Digests) -> dict[str, str]:
    """One digest of everything for each label."""
    return {
        label: checksum("\n".join(f"{name}={digest}" for name, digest in sorted(of.items())).encode())
        for label, of in digests.items()
    }


def differing(reports: Mapping[int, Digests]) -> dict[str, list[list[int]]]:
    """Return by name the ranks that hold equal values, where there are several such sets.

    >>> differing({0: {"": {"model/w": 1}}, 1: {"": {"model/w": 2}}, 2: {"": {"model/w": 1}}})
    {'model/w': [[0, 2], [1]]}
    """
    places = dict.fromkeys((label, name) for found in reports.values() for label, of in found.items() for name in of)
    wrong: dict[str, list[list[int]]] = {}
    for label, name in places:
        equal: dict[int | str | None, list[int]] = {}
        for rank, found in reports.items():
            if label in found:
                equal.setdefault(found[label].get(name), []).append(rank)
        if len(equal) > 1:
            wrong.setdefault(name, []).extend(equal.values())
    return wrong


@lru_cache(maxsize=4096)
def _part(layout: Layout, rank: int) -> tuple[str, bool]:
    """Return which part of a tensor a rank has, and whether others of its group have that part."""
    if layout == REPLICATED:
        return "", True
    cut = {c.axis for c in layout.cuts}
    is_shared = any(axis.size > 1 for number, axis in enumerate(layout.axes) if number not in cut)
    return f"{checksum(repr((layout.axes, layout.cuts, layout.order)).encode())} {layout.shard(rank)}", is_shared


def _values(documents: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the digests of the values in a model's and its optimizers' documents, of which one rank's are stored."""
    for name, value in (documents.get("model") or {}).items():
        yield f"model/{name}", _digest(value)
    for number, optimizer in (documents.get("optimizer") or {}).items():
        for group, of_group in optimizer["groups"].items():
            for name, value in of_group["hyper"].items():
                yield f"optimizer/{number}/param_groups/{group}/{name}", _digest(value)
        for name, entries in optimizer["values"].items():
            for entry in entries:
                digest = _digest(entry["value"])
                yield from ((f"optimizer/{number}/{param}/{name}", digest) for param in entry["params"])


def _digest(value: Any) -> str:
    return checksum(json.dumps(value, sort_keys=True).encode())
