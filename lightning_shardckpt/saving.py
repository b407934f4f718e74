"""One save on one rank: what it does and knows at each step of ``checkpoint.save`` and ``save_async``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from lightning_shardckpt.errors import FormatError, MismatchError, StateError
from lightning_shardckpt.header import check_json_size, checksum
from lightning_shardckpt.index import (
    COMPONENTS,
    ROOT_NAME,
    Component,
    FileInfo,
    RootIndex,
    TensorSpec,
    root_from_json,
    root_to_json,
)
from lightning_shardckpt.layout import REPLICATED, as_holders, unheld
from lightning_shardckpt.plan import Piece, check_cover, plan_save, table_digest
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.staging import HostMemory, dtype_name, host_bytes
from lightning_shardckpt.state.geometry import local_tensor, view_at
from lightning_shardckpt.state.snapshot import Leaves, Snapshot, specs_of
from lightning_shardckpt.state.trainer import entry_of
from lightning_shardckpt.state.tree import references, union
from lightning_shardckpt.storage.protocol import Draft, Storage
from lightning_shardckpt.write import Stage, write_component

_LISTED = 5
Tables = dict[str, Component]
"""The tensors of every component, and the names that share one; without files."""


@dataclass(frozen=True, slots=True)
class About:
    """What the root index says of the run that saved."""

    step: int | None = None
    epoch: int | None = None
    topology: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Staged:
    """What this rank writes: for each component pieces with their values, live or copied; documents by file name."""

    parts: dict[str, list[tuple[Piece, torch.Tensor]]]
    documents: dict[str, bytes]


class Save:
    """One save on one rank: what it knows at each step."""

    def __init__(self, path: str, ranks: Ranks, about: About, size_per_shard: float, storage: Storage) -> None:
        self.path, self._ranks, self._about, self._storage = path, ranks, about, storage
        self._size_per_shard = size_per_shard
        self._draft: Draft | None = None
        self.notes: list[str] = []
        self._agreed: dict[str, Any] = {}
        self._tables: Tables = {}
        self._trainer: Any = None
        self._staged: Staged | None = None

    def prepare(self, describe: Callable[[], Snapshot]) -> dict[str, Any]:
        """On every rank: what it wants to save, as a digest."""
        self._snapshot = describe()
        everyone = ((0, self._ranks.world),)
        self._own_tables: Tables = {
            name: Component(specs_of(name, leaves, everyone), leaves.aliases)
            for name, leaves in self._snapshot.leaves.items()
        }
        names = {name: sorted(c.aliases.items()) for name, c in self._own_tables.items()}
        other = sorted(self._snapshot.documents.get("model") or ())
        digest = table_digest({name: c.tensors for name, c in self._own_tables.items()}) + json.dumps([names, other])
        return {"path": str(self.path), "step": self._about.step, "digest": checksum(digest.encode())}

    def agree(self, wishes: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: one path and step, a save id, groups of ranks that hold the same tensors, and the draft."""
        for what in ("path", "step"):
            found = {json.dumps(wish[what]): rank for rank, wish in reversed(list(enumerate(wishes)))}
            if len(found) > 1:
                listed = ", ".join(f"rank {rank}: {value}" for value, rank in sorted(found.items(), key=lambda x: x[1]))
                hint = "; if the name holds a metric, log it with sync_dist=True" if what == "path" else ""
                raise MismatchError(f"the ranks disagree about the {what} of this save: {listed}{hint}")
        groups: dict[str, list[int]] = {}
        for rank, wish in enumerate(wishes):
            groups.setdefault(wish["digest"], []).append(rank)
        save_id = uuid.uuid4().hex
        self._begin(save_id)
        return {"save_id": save_id, "groups": list(groups.values())}

    def table(self, agreed: dict[str, Any]) -> dict[str, Any] | None:
        """On the first rank of every group: its tables, as a root index without files, and its trainer's state."""
        group = next((group for group in agreed["groups"] if self._ranks.rank == group[0]), None)
        if group is None:
            return None
        tables = {
            name: Component({k: _held_by(s, group) for k, s in c.tensors.items()}, c.aliases)
            for name, c in self._own_tables.items()
        }
        tables["trainer"] = Component({**_table(tables, "trainer").tensors, **self._own_specs()})
        text = root_to_json(RootIndex(agreed["save_id"], self._ranks.world, tables, {})).decode()
        model = self._snapshot.leaves.get("model", Leaves())
        tied = {
            key: "the model's" if own else checksum(host_bytes(local_tensor(model.tensors[key])))
            for key, own in model.tied.items()
        }
        return {"tables": text, "tied": tied, "trainer": self._snapshot.documents.get("trainer")}

    def join(self, reports: list[dict[str, Any] | None]) -> str:
        """On rank 0: the tables of all groups as one; and the trainer's state, to which other groups may add.

        Raises:
            MismatchError: if two groups have different tensors under one name, or ranks lack a tensor that they share.
            StateError: for sharded tensors of the trainer's state that are not kept by parameter name.
        """
        groups = [report for report in reports if report is not None]
        roots = [root_from_json(group["tables"].encode(), "table of a rank") for group in groups]
        tables = [root.components for root in roots]
        _check_ties(tables, [group["tied"] for group in groups])
        self._trainer = reduce(union, [group["trainer"] for group in groups])
        referred = set(references(self._trainer))
        _check_trainer(tables, referred)
        joined = _joined_tables(tables)
        _check_held(joined, self._ranks.world)
        joined["trainer"] = Component({k: s for k, s in _table(joined, "trainer").tensors.items() if k in referred})
        return root_to_json(RootIndex(roots[0].save_id, roots[0].world_size, joined, {})).decode()

    def _own_specs(self) -> dict[str, TensorSpec]:
        holders = ((self._ranks.rank, self._ranks.rank + 1),)
        return {
            key: TensorSpec(dtype_name(tensor, f"trainer/{key}"), tuple(tensor.shape), REPLICATED, holders, True)
            for key, tensor in self._snapshot.own.items()
        }

    def stage(self, agreed: dict[str, Any], memory: HostMemory) -> None:
        """On every rank: copy what it writes into ``memory``; from then on, what was described may change."""
        live = self._plan(agreed)
        copies = iter(memory.copy([value for parts in live.parts.values() for _, value in parts]))
        copied = {name: [(piece, next(copies)) for piece, _ in parts] for name, parts in live.parts.items()}
        self._staged = Staged(copied, live.documents)
        del self._snapshot

    def _plan(self, agreed: dict[str, Any]) -> Staged:
        """What this rank writes, with views of the live tensors."""
        rank, self._agreed = self._ranks.rank, agreed
        self._tables = self._own_tables
        if "tables" in agreed:
            self._tables = root_from_json(agreed["tables"].encode(), "joined table").components
        elif rank == 0 and self._snapshot.own:
            self._tables["trainer"] = Component({**_table(self._tables, "trainer").tensors, **self._own_specs()})
        parts = {}
        for component in filter(self._tables.__contains__, COMPONENTS):
            tensors, stored_as = self._tables[component].tensors, self._tables[component].aliases
            leaves = self._snapshot.leaves.get(component, Leaves())
            live = {stored_as.get(key, key): tensor for key, tensor in leaves.tensors.items()}
            if component == "trainer":
                live |= self._snapshot.own
            pieces = plan_save(tensors, rank)
            parts[component] = [(p, view_at(local_tensor(live[p.key]), p.part.local)) for p in pieces]
        return Staged(parts, dict(self._documents(agreed)))

    def write(self, agreed: dict[str, Any]) -> dict[str, Any]:
        """On every rank: its shard files, indexes and documents; returns their sizes and checksums."""
        staged = self._staged or self._plan(agreed)
        rank, save_id = self._ranks.rank, agreed["save_id"]
        draft = self._draft or self._storage.draft(self.path, save_id)
        indexes, documents, elements = {}, [], 0
        for component, parts in staged.parts.items():
            pieces = [piece for piece, _ in parts]
            elements += sum(piece.part.box.numel for piece in pieces)
            info = write_component(draft, component, rank, save_id, pieces, _stager(parts), self._size_per_shard)
            if info is not None:
                indexes[component] = _info_to_json(info)
        for name, content in staged.documents.items():
            draft.write(name, [content])
            documents.append(_info_to_json(FileInfo(name, len(content), checksum(content))))
        return {"indexes": indexes, "documents": documents, "elements": elements}

    def _documents(self, agreed: dict[str, Any]) -> Iterator[tuple[str, bytes]]:
        rank, found = self._ranks.rank, dict(self._snapshot.documents)
        names = {"rank": f"trainer-state-dist-{rank:05d}.json"}
        if rank == 0:
            names["trainer"] = "trainer-state.json"
            found["trainer"] = found.get("trainer") if self._trainer is None else self._trainer
        if any(rank == group[0] for group in agreed["groups"]):
            names |= {role: f"{role}-state-dist-{rank:05d}.json" for role in ("model", "optimizer")}
        for role, name in names.items():
            if found.get(role):
                content = json.dumps(found[role], separators=(",", ":"), allow_nan=False).encode()
                check_json_size(content, f"the {role} state of rank {rank}, which is not tensors")
                yield name, content

    def commit(self, reports: list[dict[str, Any]]) -> None:
        """On rank 0, when all ranks have written: check that nothing is missing, write the root index, publish."""
        components, expected = {}, 0
        for name, table in self._tables.items():
            check_cover(name, table.tensors)
            expected += sum(torch.Size(spec.shape).numel() for spec in table.tensors.values())
            wrote = {rank: report["indexes"] for rank, report in enumerate(reports) if name in report["indexes"]}
            indexes = {rank: FileInfo(*infos[name]) for rank, infos in wrote.items()}
            components[name] = Component(table.tensors, table.aliases, indexes)
        written = sum(report["elements"] for report in reports)
        if written != expected:
            raise FormatError(f"the ranks wrote {written} elements, expected {expected}: a bug of lightning-shardckpt")
        documents = [FileInfo(*info) for report in reports for info in report["documents"]]
        root = RootIndex(
            save_id=self._agreed["save_id"],
            world_size=self._ranks.world,
            components={n: c for n, c in components.items() if c.tensors},
            documents={info.name: info for info in documents},
            step=self._about.step,
            epoch=self._about.epoch,
            topology=self._about.topology,
            software=_software(),
        )
        assert self._draft is not None
        content = root_to_json(root)
        root_from_json(content, ROOT_NAME)  # what a loader would refuse must not replace a good checkpoint
        self._draft.write(ROOT_NAME, [content])
        self._draft.publish()
        self.notes += self._draft.notes
        self._draft = None

    def _begin(self, save_id: str) -> None:
        draft = self._storage.draft(self.path, save_id)
        draft.begin()  # if it fails, there is nothing of ours to discard
        self._draft = draft

    @contextmanager
    def discarded_on_error(self) -> Iterator[None]:
        """Rank 0 removes the draft if the save fails, whoever failed."""
        try:
            yield
        except BaseException:
            if self._draft is not None:
                self._draft.discard()
            raise


def _software() -> dict[str, str]:
    found = {}
    for name in ("lightning-shardckpt", "lightning", "torch"):
        with suppress(PackageNotFoundError):  # run from a source tree
            found[name] = version(name)
    return found


def _held_by(spec: TensorSpec, ranks: list[int]) -> TensorSpec:
    return TensorSpec(spec.dtype, spec.shape, spec.layout, as_holders(ranks), spec.pinned)


def _table(tables: Mapping[str, Component], name: str) -> Component:
    return tables.get(name, Component({}))


def _check_ties(tables: list[Tables], tied: list[dict[str, str]]) -> None:
    """Raise if groups have different values of a tied weight, since a hook replaced it on some."""
    for key in sorted({key for keys in tied for key in keys}):
        pairs = zip(tables, tied, strict=True)
        values = {own.get(key, "replaced") for table, own in pairs if key in _table(table, "model").tensors}
        if len(values) > 1:
            raise MismatchError(
                f"on_save_checkpoint replaced {key!r} in the state dict of some ranks, but not in the same way the "
                "weight that is tied to it on others; replace all names of a tied weight, or none"
            )


def _check_trainer(tables: list[Tables], referred: set[str]) -> None:
    """Raise if sharded tensors of the trainer's state would be lost, or may be taken for one another."""
    about: dict[str, list[str | None]] = {}
    for table in tables:
        model = _table(table, "model")
        entries = model.tensors.keys() | model.aliases.keys()
        for key, spec in _table(table, "trainer").tensors.items():
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
                both = sorted({r for s in (other, spec) for a, b in s.holders for r in range(a, b)})
                known.tensors[key] = _held_by(spec, both)
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
        more = f" and {len(lost) - _LISTED} more" if len(lost) > _LISTED else ""
        raise MismatchError(
            f"the states of the ranks have different keys: {'; '.join(lost[:_LISTED])}{more}. State that all ranks "
            "hold shards of must be in the state of all of them"
        )


def _stager(parts: list[tuple[Piece, torch.Tensor]]) -> Stage:
    values = {(piece.key, piece.part.box): value for piece, value in parts}
    return lambda piece: host_bytes(values[piece.key, piece.part.box])


def _info_to_json(info: FileInfo) -> list[Any]:
    return [info.name, info.nbytes, info.checksum]
