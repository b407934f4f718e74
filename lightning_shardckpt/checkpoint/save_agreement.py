"""The agreement of ranks on a save: exchanged values, groups of ranks with the same tensors, equality of replicas."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache, reduce
from typing import Any, TypedDict

import torch
from torch.distributed.tensor import DTensor

from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.index import Component, FileInfo, RootIndex, TensorSpec, root_from_json, root_to_json
from lightning_shardckpt.format.layout import REPLICATED, Holders, Layout, Shape, join_holders
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.state.documents import stored_keys
from lightning_shardckpt.state.dtensor_layout import layout_of, local_tensor
from lightning_shardckpt.state.json_tree import merge_encoded
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.tensor_bytes import dtype_name
from lightning_shardckpt.system.tensor_digest import bit_digest, digest_values
from lightning_shardckpt.system.text import count_text, list_some

Tables = dict[str, Component]
"""The tensors and aliases of every component, without files."""
Digests = dict[str, dict[str, str]]
"""A rank's digests by label and name. Ranks have a label in common if they hold replicas of the same parts."""


# ── values that ranks exchange, as JSON ───────────────────────────────────────────────────────────────────────────────


class SaveRequest(TypedDict):
    """The save that one rank requests.

    ``digest`` is equal on ranks that hold the same tensors; ``replicas`` has a combined digest for each label.
    """

    path: str
    step: int | None
    digest: str
    replicas: Digests


class Agreement(TypedDict):
    """The agreement of all ranks, made by rank 0.

    ``groups`` has the ranks that hold the same tensors, as ranges: one group, or one for each pipeline stage. With
    several, ``tables`` has the tables of all of them as a root index without files.
    """

    save_id: str
    groups: list[list[list[int]]]
    tables: str


class GroupTable(TypedDict):
    """A group's tables, as a root index without files, and its trainer state, encoded; sent by its first rank."""

    tables: str
    trainer: Any


class WriteReport(TypedDict):
    """The files that one rank wrote: its indexes by component, its documents, and the elements of all.

    ``shared`` has the digests of tensors that other groups of ranks hold, too. ``notes`` are sentences for the user;
    empty on rank 0, which keeps its own.
    """

    indexes: dict[str, FileInfo]
    documents: list[FileInfo]
    shared: Digests
    elements: int
    notes: list[str]


# ── tables ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def specs_of(component: str, leaves: Leaves, holders: Holders) -> dict[str, TensorSpec]:
    """Return the specs of a component's tensors, all held by ``holders``; equal tensors share one object."""
    specs = {}
    layouts: dict[int, Layout] = {}  # by id of a DTensorSpec, which tensors may share and keep alive
    for key, tensor in leaves.tensors.items():
        dtype = dtype_name(dtensor.local_tensor(tensor), f"{component}/{key}")
        shared = id(dtensor.spec_of(tensor)) if isinstance(tensor, DTensor) else 0
        if shared not in layouts:
            layouts[shared] = layout_of(tensor)
        specs[key] = _spec(dtype, tuple(dtensor.shape_of(tensor)), layouts[shared], holders, key in leaves.pinned)
    return specs


@lru_cache(maxsize=65536)
def _spec(dtype: str, shape: Shape, layout: Layout, holders: Holders, pinned: bool) -> TensorSpec:
    return TensorSpec(dtype, shape, layout, holders, pinned)


def group_ranks(requests: list[SaveRequest]) -> list[list[int]]:
    """Return groups of ranks that hold the same tensors, from the requests in rank order."""
    for field in ("path", "step"):
        values = {json.dumps(request[field]): rank for rank, request in reversed(list(enumerate(requests)))}
        if len(values) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for value, rank in sorted(values.items(), key=lambda x: x[1]))
            hint = "; if the name holds a metric, log it with sync_dist=True" if field == "path" else ""
            raise MismatchError(f"the ranks disagree about the {field} of this save: {listed}{hint}")
    groups: dict[str, list[int]] = {}
    for rank, request in enumerate(requests):
        groups.setdefault(request["digest"], []).append(rank)
    return list(groups.values())


def tables_as_root(tables: Tables, save_id: str, world: int) -> str:
    """Return tables as the text of a root index without files."""
    return root_to_json(RootIndex(save_id, world, tables, {})).decode()


def join_groups(groups: list[GroupTable], world: int) -> tuple[str, Any]:
    """Join the tables and trainer states of all groups.

    Returns:
        The tables of all groups, as a root index without files, and the union of the groups' trainer states.

    Raises:
        MismatchError: if two groups have different tensors under one name.
        StateError: for sharded tensors of the trainer's state that are not kept by parameter name.
    """
    roots = [root_from_json(group["tables"].encode(), "table of a rank") for group in groups]
    trainer = reduce(merge_encoded, [group["trainer"] for group in groups])
    referred, joined = set(stored_keys(trainer)), _join_tables([root.components for root in roots])
    tensors = joined.get("trainer", Component({})).tensors
    lost = [key for key, spec in tensors.items() if not spec.pinned and key not in referred]
    if lost:
        raise StateError(
            f"the trainer's state has sharded tensors under {lost}, and pipeline stages have different ones; "
            "a callback must keep them in dicts by parameter name, in the same place on every rank"
        )
    joined["trainer"] = Component({key: spec for key, spec in tensors.items() if key in referred})
    return tables_as_root(joined, roots[0].save_id, world), trainer


def _join_tables(tables: list[Tables]) -> Tables:
    """Return the union of the groups' tables; a tensor of several groups is held by the ranks of all of them.

    If a group has only an alias of a tensor, the tensor is joined under the name that the others use. Plain tensors of
    the trainer's state may differ; the first group's is kept.
    """
    joined, components = Tables(), [item for table in tables for item in table.items()]
    for name, component in components:
        known = joined.setdefault(name, Component({}))
        known.aliases.update({a: key for a, key in component.aliases.items() if known.aliases.get(key) != a})
    for name, component in components:
        known = joined[name]
        for own_key, spec in component.tensors.items():
            key = known.aliases.get(own_key, own_key)
            other = known.tensors.get(key, spec)
            if name == "trainer" and other.pinned and spec.pinned:
                known.tensors[key] = other
                continue
            if (other.dtype, other.shape, other.layout) != (spec.dtype, spec.shape, spec.layout):
                raise MismatchError(
                    f"the ranks hold different tensors as {key!r}: {other.dtype} {other.shape} on ranks "
                    f"{other.holders}, {spec.dtype} {spec.shape} on ranks {spec.holders}"
                )
            known.tensors[key] = replace(spec, holders=join_holders([*other.holders, *spec.holders]))
    return joined


# ── replicas ──────────────────────────────────────────────────────────────────────────────────────────────────────────
# A save takes each part of the state from one of the ranks that hold it, and distributes the parts over the ranks. If
# replicas differed, the checkpoint would hold a state that no rank ever had. Digests reveal that before.


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
    snapshot: Snapshot, tables: Tables, rank: int, group: str, group_size: int | None = None
) -> Iterator[tuple[str, str, Any]]:
    """Yield label, name and value of the state that other ranks hold, too; see ``Digests``.

    Leaves out pinned tensors, which may differ.

    Args:
        snapshot: of this rank.
        tables: of its tensors.
        rank: in the default process group.
        group: a text common to the ranks with the same tensors, which are compared with each other.
        group_size: their number, if ``tables`` have the tensors of all groups, such as pipeline stages: then only
            tensors that several groups hold are compared, between all of them.
    """
    for component, leaves in snapshot.leaves.items():
        table = tables.get(component, Component({}))
        parts = {spec.layout: _part(spec.layout, rank) for spec in {id(s): s for s in table.tensors.values()}.values()}
        for key, tensor in leaves.tensors.items():
            name = table.aliases.get(key, key)
            spec = table.tensors.get(name)
            if spec is None or spec.pinned:
                continue
            part, is_shared = parts[spec.layout]
            if group_size is not None:
                is_shared = sum(stop - start for start, stop in spec.holders) != group_size
            if is_shared:
                yield f"{group if group_size is None else name} {part}", f"{component}/{name}", local_tensor(tensor)
    if group_size is not None:
        return
    of_group, of_all = _values(snapshot.documents)
    for kind, named in (("replicated", snapshot.replicated), ("settings", of_all)):
        label = f"{kind} {checksum(repr(sorted(named)).encode())}"  # common to ranks with the same names
        yield from ((label, name, value) for name, value in named.items())
    # the label also for a rank without values
    yield from ((f"{group} values", name, value) for name, value in {"": None, **of_group}.items())


@lru_cache(maxsize=4096)
def _part(layout: Layout, rank: int) -> tuple[str, bool]:
    """Return a text for the part of a tensor that a rank holds, and True if other ranks of its group hold that part."""
    if layout == REPLICATED:
        return "", True
    cut = {c.axis for c in layout.cuts}
    is_shared = any(axis.size > 1 for number, axis in enumerate(layout.axes) if number not in cut)
    return f"{checksum(repr((layout.axes, layout.cuts, layout.order)).encode())} {layout.shard(rank)}", is_shared


def _values(documents: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values in documents that one rank of each group stores, and those that one rank of all stores.

    The latter are optimizers' settings, and their state without parameters.
    """
    of_group = {f"model/{name}": value for name, value in (documents.get("model") or {}).items()}
    of_all = dict[str, Any]()
    for number, optimizer in (documents.get("optimizer") or {}).items():
        start = f"optimizer/{number}"
        for name, entries in optimizer["values"].items():
            of_group |= {f"{start}/{param}/{name}": entry["value"] for entry in entries for param in entry["params"]}
        of_all[f"{start}/own"] = optimizer.get("own")
        for group, entries in optimizer["groups"].items():
            of_all |= {f"{start}/param_groups/{group}/{name}": value for name, value in entries["hyper"].items()}
    return of_group, of_all


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
