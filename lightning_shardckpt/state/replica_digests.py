"""Digests of what several ranks hold, so that replicas that differ are noticed before they are mixed.

A save takes each part of the state from one of the ranks that hold it, and deals the work out: of replicas that are not
equal it would make a state that no rank ever had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
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
    replicas: list[tuple[str, str, torch.Tensor]] = []
    for component, leaves in found.leaves.items():
        specs = tables[component].tensors
        kinds = {id(spec): spec.layout for spec in specs.values()}  # tensors that are alike share their spec
        parts = {kind: _part(layout, rank) for kind, layout in kinds.items()}
        for key, tensor in leaves.tensors.items():
            part, is_shared = parts[id(specs[key])]
            if is_shared and key not in leaves.pinned:
                replicas.append((f"{group} {part}", f"{component}/{key}", local_tensor(tensor)))
    digests = _digests(replicas)
    if found.given:
        given = zip(found.given.items(), numbers(map(bit_digest, found.given.values())), strict=True)
        digests[_label("given", found.given)] = {
            name: f"{tuple(tensor.shape)} {digest}" for (name, tensor), digest in given
        }
    settings = dict(_settings(found.documents))
    digests[_label("settings", settings)] = {**settings}
    digests[f"{group} values"] = dict(_values(found.documents))
    return digests


def digests_over_groups(found: Snapshot, joined: Mapping[str, Component], rank: int, group_size: int) -> Digests:
    """Digests of tensors that other groups of ranks hold, too, such as pipeline stages.

    Args:
        found: what this rank saves.
        joined: the specs of the tensors of all groups, and the names under which those with several are stored.
        rank: this one, in the default process group.
        group_size: how many ranks have the tensors that this one has.
    """
    replicas = []
    for component, leaves in found.leaves.items():
        table = joined.get(component, Component({}))
        for key, tensor in leaves.tensors.items():
            name = table.aliases.get(key, key)
            spec = table.tensors.get(name)
            if spec is None or spec.pinned or sum(stop - start for start, stop in spec.holders) == group_size:
                continue
            replicas.append((f"{name} {_part(spec.layout, rank)}", f"{component}/{name}", local_tensor(tensor)))
    return _digests(replicas)


def _digests(replicas: list[tuple[str, str, torch.Tensor]]) -> Digests:
    """Return the digests of tensors with labels and names."""
    found: Digests = {}
    some = [replica for replica in replicas if replica[2].numel()]
    for (label, name, _), digest in zip(some, numbers(bit_digest(tensor) for *_, tensor in some), strict=True):
        found.setdefault(label, {})[name] = digest
    return found


def _label(of: str, names: Iterable[str]) -> str:
    """Return a label that ranks have in common which have the same names, whatever else they hold."""
    return f"{of} {checksum(repr(sorted(names)).encode())}"


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
    """Yield the digests of values in the documents of a group of ranks, of which one rank's are stored."""
    for name, value in (documents.get("model") or {}).items():
        yield f"model/{name}", _digest(value)
    for number, optimizer in (documents.get("optimizer") or {}).items():
        for name, entries in optimizer["values"].items():
            for entry in entries:
                digest = _digest(entry["value"])
                yield from ((f"optimizer/{number}/{param}/{name}", digest) for param in entry["params"])


def _settings(documents: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the digests of settings of optimizers, and of their state of no parameter: one rank's are stored for all
    groups."""
    for number, optimizer in (documents.get("optimizer") or {}).items():
        yield f"optimizer/{number}/own", _digest(optimizer.get("own"))
        for group, of_group in optimizer["groups"].items():
            for name, value in of_group["hyper"].items():
                yield f"optimizer/{number}/param_groups/{group}/{name}", _digest(value)


def _digest(value: Any) -> str:
    return checksum(json.dumps(value, sort_keys=True).encode())
