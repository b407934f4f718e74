"""Replicas of state on several ranks: digests that tell whether they are equal, and the names of those that are not.

A save takes each part of the state from one of the ranks that hold it, and distributes the parts over the ranks. If
replicas differed, the checkpoint would hold a state that no rank ever had.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.layout import REPLICATED, Holders, Layout
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.state.documents import values_of
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.system.tensor_digest import bit_digest, digest_values
from lightning_shardckpt.system.text import count_text, list_some

Tables = dict[str, Component]
"""The tensors and aliases of every component, without files."""
Digests = dict[str, dict[str, str]]
"""A rank's digests by label and name. Ranks have a label in common if they hold replicas of the same parts."""


def digest_replicas(replicas: Iterable[tuple[str, str, Any]]) -> Digests:
    """Return the digests of labelled, named tensors and JSON values. Runs at the speed of memory."""
    digests, of_tensors = Digests(), list[tuple[dict[str, str], str, torch.Tensor]]()
    for label, name, value in replicas:
        named = digests.setdefault(label, {})
        if not isinstance(value, torch.Tensor):
            named[name] = checksum(json.dumps(value, sort_keys=True).encode())
            continue
        named[name] = str(tuple(value.shape))
        if value.numel():
            of_tensors.append((named, name, bit_digest(value)))
    values = digest_values(digest for *_, digest in of_tensors)  # waits for the device once
    for (named, name, _), digest in zip(of_tensors, values, strict=True):
        named[name] += f" {digest}"
    return digests


def combine_digests(digests: Digests) -> Digests:
    """Return one digest for each label, to learn by ``find_differences`` whether there are any."""
    return {label: {"": checksum(json.dumps(named, sort_keys=True).encode())} for label, named in digests.items()}


def find_replicas(
    snapshot: Snapshot, tables: Tables, rank: int, group: str | Holders
) -> Iterator[tuple[str, str, Any]]:
    """Yield label, name and value of the state that other ranks hold, too; see ``Digests``.

    Leaves out pinned tensors, which may differ.

    Args:
        snapshot: of this rank.
        tables: of its tensors.
        rank: in the default process group.
        group: a text common to the ranks with the same tensors, which are compared with each other; or these ranks, if
            ``tables`` have the tensors of all groups, such as pipeline stages. Then only tensors that several groups
            hold are compared, between all of them.
    """
    for component, leaves in snapshot.leaves.items():
        table = tables.get(component, Component({}))
        for key, tensor in leaves.tensors.items():
            name = table.aliases.get(key, key)
            spec = table.tensors.get(name)
            if spec is None or spec.pinned:
                continue
            part, is_shared = _part(spec.layout, rank)
            if is_shared if isinstance(group, str) else spec.holders != group:
                yield f"{group if isinstance(group, str) else name} {part}", f"{component}/{name}", local_tensor(tensor)
    if isinstance(group, str):
        yield from _find_values(snapshot, group)


@lru_cache(maxsize=4096)
def _part(layout: Layout, rank: int) -> tuple[str, bool]:
    """Return a text for the part of a tensor that a rank holds, and True if other ranks of its group hold that part."""
    if layout == REPLICATED:
        return "", True
    cut = {c.axis for c in layout.cuts}
    is_shared = any(axis.size > 1 for number, axis in enumerate(layout.axes) if number not in cut)
    return f"{checksum(repr((layout.axes, layout.cuts, layout.order)).encode())} {layout.shard(rank)}", is_shared


def _find_values(snapshot: Snapshot, group: str) -> Iterator[tuple[str, str, Any]]:
    """Yield what ``find_replicas`` does of values in documents and of the trainer's plain tensors.

    One rank of each group stores extra state of modules and optimizer state that is no tensor; one rank of all stores
    optimizers' settings and their state without parameters.
    """
    documents, settings = snapshot.documents, dict[str, Any]()
    of_group = {"": None, **{f"model/{name}": value for name, value in (documents.get("model") or {}).items()}}
    for number, optimizer in (documents.get("optimizer") or {}).items():
        start = f"optimizer/{number}"
        of_group |= {f"{start}/{param}/{name}": value for param, name, value in values_of(optimizer)}
        settings[f"{start}/own"] = optimizer.get("own")
        for params, entries in optimizer["groups"].items():
            settings |= {f"{start}/param_groups/{params}/{name}": v for name, v in entries["hyper"].items()}
    yield from ((f"{group} values", name, value) for name, value in of_group.items())
    for kind, named in (("replicated", snapshot.replicated), ("settings", settings)):
        label = f"{kind} {checksum(repr(sorted(named)).encode())}"  # common to ranks with the same names
        yield from ((label, name, value) for name, value in named.items())


def find_differences(reports: Iterable[Digests]) -> dict[str, list[list[int]]]:
    """Return the names whose replicas differ, each with the sets of ranks that hold equal values.

    >>> find_differences([{"": {"model/w": "1"}}, {"": {"model/w": "2"}}, {"": {"model/w": "1"}}])
    {'model/w': [[0, 2], [1]]}
    """
    ranks_by_label: dict[str, list[tuple[int, dict[str, str]]]] = {}
    for rank, digests in enumerate(reports):
        for label, named in digests.items():
            ranks_by_label.setdefault(label, []).append((rank, named))
    differences: dict[str, list[list[int]]] = {}
    for ranks in ranks_by_label.values():
        for name in dict.fromkeys(name for _, named in ranks for name in named):
            equal: dict[str | None, list[int]] = {}
            for rank, named in ranks:
                equal.setdefault(named.get(name), []).append(rank)
            if len(equal) > 1:
                differences.setdefault(name, []).extend(equal.values())
    return differences


def refuse_differences(path: str, reports: list[Digests]) -> None:
    """Raise a MismatchError that names the tensors whose replicas differ, and the ranks; one report for each rank."""
    differences = find_differences(reports)
    if not differences:
        return
    lines = [f"{key}  ranks {' | '.join(map(str, sets))}" for key, sets in differences.items()]
    listed = list_some(lines, between="\n  ")
    raise MismatchError(
        f"cannot save {path!r}: replicas differ, and a checkpoint of all ranks would mix them. "
        f"{count_text(len(lines), 'entry', 'entries')}, by the ranks that hold the same:\n  {listed}\n"
        "Make them equal (average them, let hooks replace a tied weight under all its names, …), "
        'or save the values of the lowest rank with replicas="first".'
    )
