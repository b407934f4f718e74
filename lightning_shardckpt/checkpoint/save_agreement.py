"""The agreement of a save: what ranks tell each other, which save the same tensors, and whether replicas are equal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import reduce
from typing import Any, TypedDict

from lightning_shardckpt.checkpoint.plan_cache import Tables
from lightning_shardckpt.errors import MismatchError, StateError
from lightning_shardckpt.format.index import Component, RootIndex, TensorSpec
from lightning_shardckpt.format.layout import Holders, join_holders, unheld
from lightning_shardckpt.format.root_index_json import root_from_json, root_to_json
from lightning_shardckpt.state.json_values import references, union
from lightning_shardckpt.state.replica_digests import Digests, differing
from lightning_shardckpt.state.trainer import entry_of
from lightning_shardckpt.system.text import count_text

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


def joined_groups(groups: list[GroupTable], world: int) -> tuple[str, Any]:
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
    joined = _joined_tables(tables)
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


def _joined_tables(tables: list[Tables]) -> Tables:
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
            if unheld(spec.layout, spec.holders):
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
