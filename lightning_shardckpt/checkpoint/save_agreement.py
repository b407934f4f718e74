"""The agreement of a save: what ranks tell each other, which save the same tensors, and whether replicas are equal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache, reduce
from typing import Any, TypedDict

import torch

from lightning_shardckpt.checkpoint.plan_cache import Tables
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.index_json import root_from_json, root_to_json
from lightning_shardckpt.format.layout import REPLICATED, Holders, Layout, find_unheld_shards, join_holders
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.json_values import references, union
from lightning_shardckpt.state.snapshot import Snapshot
from lightning_shardckpt.state.trainer import entry_of
from lightning_shardckpt.system.tensor_digest import bit_digest, digest_values
from lightning_shardckpt.system.text import count_text

# ── digests of replicas ───────────────────────────────────────────────────────────────────────────────────────────────
# Digests of what several ranks hold, so that replicas that differ are noticed before they are mixed.
#
# A save takes each part of the state from one of the ranks that hold it, and deals the work out: of replicas that are
# not equal it would make a state that no rank ever had.


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
        given = zip(found.given.items(), digest_values(map(bit_digest, found.given.values())), strict=True)
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
    for (label, name, _), digest in zip(some, digest_values(bit_digest(tensor) for *_, tensor in some), strict=True):
        found.setdefault(label, {})[name] = digest
    return found


def _label(of: str, names: Iterable[str]) -> str:
    """Return a label that ranks have in common which have the same names, whatever else they hold."""
    return f"{of} {checksum(repr(sorted(names)).encode())}"


def combine(digests: Digests) -> dict[str, str]:
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


# ── values that ranks exchange ────────────────────────────────────────────────────────────────────────────────────────
# Values that ranks tell each other at the steps of a save. All of it is JSON.


class SaveWish(TypedDict):
    """A rank's request of what to save."""

    path: str
    step: int | None
    digest: str
    """Of the tables and of the names in documents: equal on ranks that hold the same tensors."""
    replicas: dict[str, str]
    """Digests of values that several ranks hold, by who holds them."""


class Agreement(TypedDict):
    """The agreement of all ranks, made by rank 0; without a save id if replicas differ, which stops the save."""

    save_id: str
    groups: list[list[list[int]]]
    """Ranks that hold the same tensors, as ranges: one group, or one for each pipeline stage."""
    mirror: dict[str, Any]
    """What is recorded of the model that is written a second time."""
    tables: str
    """The tables of all groups as a root index without files; empty if there is one group, whose ranks all know it."""


class GroupTable(TypedDict):
    """A group's tables, as its first rank tells them."""

    tables: str
    """A root index without files."""
    trainer: Any
    """The trainer's state, encoded."""


class Written(TypedDict):
    """The files that one rank wrote: name, size and checksum."""

    indexes: dict[str, list[Any]]
    """By component."""
    documents: list[list[Any]]
    shared: dict[str, dict[str, Any]]
    """Digests of tensors that other groups of ranks hold, too, by which part and by name."""
    elements: int
    shard_bytes: int
    """Of all shard files; the sizes of the others are listed."""
    linked_bytes: int
    """Of those that were linked, and not written."""
    notes: list[str]
    """Sentences for the user; rank 0 has its own."""


# ── joining the groups of pipeline stages ─────────────────────────────────────────────────────────────────────────────
# Join the tables of groups of ranks, such as pipeline stages, into one. Knows no tensors.


_LISTED_KEYS = 5


def group_text(tables: Tables, holders: Holders, own: Mapping[str, TensorSpec], save_id: str, world: int) -> str:
    """Return a group's tables as a root index without files.

    Args:
        tables: as the group's first rank has them.
        holders: the group's ranks, as ranges.
        own: tensors of the trainer's state that the first rank alone writes.
        save_id: of the save.
        world: ranks of the save.
    """
    held = {
        name: Component({k: _held_by(s, holders) for k, s in c.tensors.items()}, c.aliases)
        for name, c in tables.items()
    }
    held["trainer"] = Component({**table_of(held, "trainer").tensors, **own})
    return root_to_json(RootIndex(save_id, world, held, {})).decode()


def join_groups(groups: list[GroupTable], world: int) -> tuple[str, Any]:
    """Join what groups tell.

    Args:
        groups: of each group, what its first rank tells, in rank order.
        world: ranks of the save.

    Returns:
        The tables of all groups, as a root index without files, and the trainer's state, to which all groups may add.

    Raises:
        MismatchError: if two groups have different tensors under one name, or ranks lack a tensor that they share.
        StateError: for sharded tensors of the trainer's state that are not kept by parameter name.
    """
    roots = [root_from_json(group["tables"].encode(), "table of a rank") for group in groups]
    tables = [root.components for root in roots]
    trainer = reduce(union, [group["trainer"] for group in groups])
    referred = set(references(trainer))
    _check_trainer(tables, referred)
    joined = _join_tables(tables)
    _check_held(joined, world)
    joined["trainer"] = Component({k: s for k, s in table_of(joined, "trainer").tensors.items() if k in referred})
    return root_to_json(RootIndex(roots[0].save_id, roots[0].world_size, joined, {})).decode(), trainer


def _held_by(spec: TensorSpec, holders: Holders) -> TensorSpec:
    """Return a spec of the same tensor, as held by other ranks."""
    return TensorSpec(spec.dtype, spec.shape, spec.layout, holders, spec.pinned)


def table_of(tables: Mapping[str, Component], name: str) -> Component:
    """Return one of the tables, or an empty one."""
    return tables.get(name, Component({}))


def _check_trainer(tables: list[Tables], referred: set[str]) -> None:
    """Raise if sharded tensors of the trainer's state would be lost, or may be taken for one another."""
    about: dict[str, list[str | None]] = {}
    for table in tables:
        model = table_of(table, "model")
        entries = model.tensors.keys() | model.aliases.keys()
        for key, spec in table_of(table, "trainer").tensors.items():
            if not spec.pinned:
                about.setdefault(key, []).append(entry_of(key, entries))
    wrong = [k for k, e in about.items() if k not in referred or (len(e) > 1 and (None in e or len(set(e)) > 1))]
    if wrong:
        raise StateError(
            f"the trainer's state has sharded tensors under {wrong}, and pipeline stages have different ones; "
            "a callback must keep them in dicts by parameter name, in the same place on every rank"
        )


def _join_tables(tables: list[Tables]) -> Tables:
    """The union of the groups' tables; a tensor that several groups have is held by all of their ranks.

    A group that knows only an alias of a tensor stores it under the name that the others use. Of plain tensors of the
    trainer's state, which need not agree, the first group's counts.

    Raises:
        MismatchError: if two groups have different tensors under one name.
    """
    joined: Tables = {}
    for table in tables:
        for name, component in table.items():
            known = joined.setdefault(name, Component({}))
            known.aliases.update({a: of for a, of in component.aliases.items() if known.aliases.get(of) != a})
    for table in tables:
        for name, component in table.items():
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
                known.tensors[key] = _held_by(spec, join_holders([*other.holders, *spec.holders]))
    return joined


def _check_held(joined: Tables, world: int) -> None:
    """Raise if some rank's state lacks a tensor of which it should have a shard."""
    lost = []
    for name, table in joined.items():
        for key, spec in table.tensors.items():
            if find_unheld_shards(spec.layout, spec.holders):
                having = sorted(rank for a, b in spec.holders for rank in range(a, b))
                lacking = sorted(set(range(world)) - set(having))
                lost.append(f"{name} {key!r}: rank(s) {having} have shards of it, rank(s) {lacking} have no such key")
    if lost:
        more = f" and {len(lost) - _LISTED_KEYS} more" if len(lost) > _LISTED_KEYS else ""
        raise MismatchError(
            f"the states of the ranks have different keys: {'; '.join(lost[:_LISTED_KEYS])}{more}. State that all "
            "ranks hold shards of must be in the state of all of them"
        )


_LISTED = 10


def groups_of(wishes: list[SaveWish]) -> list[list[int]]:
    """Return the ranks that hold the same tensors, as lists in rank order.

    Args:
        wishes: of every rank, in rank order.

    Raises:
        MismatchError: if the ranks disagree about the path or the step.
    """
    for what in ("path", "step"):
        found = {json.dumps(wish[what]): rank for rank, wish in reversed(list(enumerate(wishes)))}
        if len(found) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for value, rank in sorted(found.items(), key=lambda x: x[1]))
            hint = "; if the name holds a metric, log it with sync_dist=True" if what == "path" else ""
            raise MismatchError(f"the ranks disagree about the {what} of this save: {listed}{hint}")
    groups: dict[str, list[int]] = {}
    for rank, wish in enumerate(wishes):
        groups.setdefault(wish["digest"], []).append(rank)
    return list(groups.values())


def differ(marks: list[dict[str, str]]) -> bool:
    """Return whether ranks have different digests of the same replicas.

    Args:
        marks: of each rank, digests by the label of who holds the same.
    """
    known: dict[str, str] = {}
    return any(known.setdefault(label, mark) != mark for of in marks for label, mark in of.items())


def refuse_differing(path: str, reports: list[Digests]) -> None:
    """Say what differs between replicas.

    Args:
        path: of the save, for the message.
        reports: digests of everything, of every rank in rank order.

    Raises:
        MismatchError: naming tensors and ranks.
    """
    wrong = differing(dict(enumerate(reports)))
    lines = [f"{key}  ranks {' | '.join(map(str, sets))}" for key, sets in wrong.items()]
    listed = "\n  ".join(lines[:_LISTED]) + f"\n  … and {len(lines) - _LISTED} more" * (len(lines) > _LISTED)
    raise MismatchError(
        f"cannot save {path!r}: replicas differ, and a checkpoint of all ranks would mix them. "
        f"{count_text(len(lines), 'entry', 'entries')}, by the ranks that hold the same:\n  {listed}\n"
        "Make them equal (average them, let hooks replace a tied weight under all its names, …), "
        'or take those of the lowest rank with replicas="first".'
    )
