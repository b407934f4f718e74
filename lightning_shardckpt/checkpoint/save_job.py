"""One save on one rank: the work and the state of each step of ``checkpoint.save``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial, reduce
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any, Literal, TypedDict, get_args

import torch

from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.replicas import (
    Digests,
    Tables,
    combine_digests,
    digest_replicas,
    find_differences,
    find_replicas,
    refuse_differences,
)
from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.errors import FormatError, MismatchError, StateError
from lightning_shardckpt.format.index import (
    COMPONENTS,
    ROOT_NAME,
    Component,
    FileInfo,
    RootIndex,
    TensorSpec,
    root_from_json,
    root_to_json,
)
from lightning_shardckpt.format.layout import Holders, Layout, Shape, as_holders, join_holders
from lightning_shardckpt.format.plan import Piece, check_cover, plan_save, table_digest
from lightning_shardckpt.format.value_checks import check_json_size, checksum
from lightning_shardckpt.state.documents import HUGGING_FACE, PEFT, stored_keys
from lightning_shardckpt.state.dtensor_layout import layout_of, local_tensor, this_rank, view_at
from lightning_shardckpt.state.json_tree import check_readable, merge_encoded
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.tensor_bytes import HostMemory, HostWindows, dtype_name
from lightning_shardckpt.storage.protocol import Draft, Storage
from lightning_shardckpt.storage.router import check_writable
from lightning_shardckpt.transfer.writer import FilePlan, plan_files, write_component

Replicas = Literal["same", "first"]
"""How replicas of a tensor are stored: they must be equal, or the lowest rank's is stored."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of writing a checkpoint.

    Attributes:
        size_per_shard: limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own.
        replicas: "same" requires equal replicas of each tensor; "first" stores the first rank's.

    Raises:
        ValueError: for an invalid value, naming the option.
    """

    size_per_shard: float = 1024
    replicas: Replicas = "same"

    def __post_init__(self) -> None:
        if not isinstance(self.size_per_shard, int | float) or not self.size_per_shard > 0:
            raise ValueError(
                f"size_per_shard is a size in MB (2^20 bytes) and must be a positive number, got "
                f"{self.size_per_shard!r}: write size_per_shard=1024 for 1 GB"
            )
        if self.replicas not in get_args(Replicas):
            raise ValueError(f'replicas is "same" or "first", got {self.replicas!r}')


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The step, epoch and topology of the run, for the root index."""

    step: int | None = None
    epoch: int | None = None
    topology: dict[str, int] = field(default_factory=dict)


# ── groups, tables and plans ──────────────────────────────────────────────────────────────────────────────────────────


def _plan_files(tables: Tables, rank: int, size_per_shard: float) -> dict[str, list[FilePlan]]:
    """Return the files that ``rank`` writes, by component, for tables that all ranks have agreed on."""
    if rank == 0:
        for component, table in tables.items():
            check_cover(component, table.tensors)
    planned = {name: plan_save(tables[name].tensors, rank) for name in COMPONENTS if name in tables}
    return {name: plan_files(name, rank, pieces, size_per_shard) for name, pieces in planned.items()}


def _specs(component: str, leaves: Leaves, holders: Holders) -> dict[str, TensorSpec]:
    """Return the specs of a component's tensors, all held by ``holders``; equal tensors share one object."""
    specs = {}
    for key, tensor in leaves.tensors.items():
        dtype, shape = dtype_name(dtensor.local_tensor(tensor), f"{component}/{key}"), tuple(dtensor.shape_of(tensor))
        specs[key] = _spec(dtype, shape, layout_of(tensor), holders, key in leaves.pinned)
    return specs


@lru_cache(maxsize=65536)
def _spec(dtype: str, shape: Shape, layout: Layout, holders: Holders, pinned: bool) -> TensorSpec:
    return TensorSpec(dtype, shape, layout, holders, pinned)


def _group_ranks(requests: list[SaveRequest]) -> list[list[int]]:
    """Return groups of ranks that hold the same tensors, from the requests in rank order."""
    for what in ("path", "step"):
        values = {json.dumps(request[what]): rank for rank, request in reversed(list(enumerate(requests)))}
        if len(values) > 1:
            listed = ", ".join(f"rank {rank}: {value}" for value, rank in sorted(values.items(), key=lambda x: x[1]))
            hint = "; if the name holds a metric, log it with sync_dist=True" if what == "path" else ""
            raise MismatchError(f"the ranks disagree about the {what} of this save: {listed}{hint}")
    groups: dict[str, list[int]] = {}
    for rank, request in enumerate(requests):
        groups.setdefault(request["digest"], []).append(rank)
    return list(groups.values())


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
    groups: list[Holders]
    tables: str


class WriteReport(TypedDict):
    """The files that one rank wrote: its indexes by component, its documents, and the elements of all.

    ``shared`` has the digests of tensors that other groups of ranks hold, too; ``notes`` are sentences for the user.
    """

    indexes: dict[str, FileInfo]
    documents: list[FileInfo]
    shared: Digests
    elements: int
    notes: list[str]


# ── the job ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Content:
    """The content that a rank writes.

    Attributes:
        tables: of all ranks.
        files: that this rank writes, by component.
        tensors: values of pieces, live or copied, by the piece's id.
        documents: roles and contents, by file name.
        shared: digests of tensors that other groups of ranks hold, too.
        contents: see ``Snapshot``; of components whose tensors have no values.
    """

    tables: Tables
    files: dict[str, list[FilePlan]]
    tensors: dict[int, torch.Tensor]
    documents: dict[str, tuple[str, bytes]]
    shared: Digests
    contents: dict[str, Callable[[str], memoryview]]


class SaveJob:
    """One save on one rank: describe, agree, copy if asynchronous, write, commit.

    The arguments are those of ``checkpoint.save``.

    Attributes:
        replicas: digests of state that several ranks hold, after ``prepare``.
        agreed: the agreement of all ranks, when they have agreed.
    """

    def __init__(self, path: str, group: SaveGroup, run: RunInfo, options: SaveOptions, storage: Storage) -> None:
        self.path, self._run, self._storage, self._options, self._plans = path, run, storage, options, group.plans
        self._rank, self._world_size = group.ranks.rank, group.ranks.world
        self._note, self.replicas = group.background.note, Digests()
        self.agreed: Agreement
        self._snapshot: Snapshot
        self._tables: Tables  # of its tensors, as if every rank had the same
        self._content: Content | None = None
        self._trainer: Any = None  # of all groups, on rank 0
        self._draft: Draft | None = None  # on rank 0

    def prepare(self, describe: Callable[[], Snapshot]) -> SaveRequest:
        """Return this rank's request, which describes its state by digests. Runs on every rank."""
        check_writable(self.path)
        snapshot = self._snapshot = _pin(describe()) if self._options.replicas == "first" else describe()
        self._note(snapshot.notes)
        tables = self._tables = self._describe_tensors(((0, self._world_size),))
        documents = [sorted(snapshot.documents.get(role) or ()) for role in ("model", "frozen", "versions")]
        digest = checksum((self._plans.get(table_digest, tables) + json.dumps(documents)).encode())
        if self._world_size > 1 and self._options.replicas == "same":
            self.replicas = digest_replicas(find_replicas(snapshot, tables, this_rank(), digest))
        replicas = combine_digests(self.replicas)
        return {"path": str(self.path), "step": self._run.step, "digest": digest, "replicas": replicas}

    def agree(self, requests: list[SaveRequest]) -> Agreement | None:
        """Check that paths and steps are equal, group ranks by their tensors, and begin the draft. Runs on rank 0.

        Returns:
            The agreement, or None if replicas differ.

        Raises:
            MismatchError: if the ranks disagree about the path or the step.
            FileExistsError: if another process is saving to the path, or something other than a checkpoint is there.
        """
        groups = _group_ranks(requests)
        if find_differences(request["replicas"] for request in requests):
            return None
        save_id = uuid.uuid4().hex
        draft = self._storage.draft(self.path, save_id)
        draft.begin()
        self._draft = draft  # set only after begin: if that fails, there is nothing to discard
        return {"save_id": save_id, "groups": [as_holders(group) for group in groups], "tables": ""}

    def _describe_tensors(self, holders: Holders) -> Tables:
        leaves = self._snapshot.leaves
        return {name: Component(_specs(name, one, holders), one.aliases) for name, one in leaves.items()}

    @property
    def _group(self) -> Holders:
        """The ranks that hold the same tensors as this one."""
        groups = [tuple((start, stop) for start, stop in group) for group in self.agreed["groups"]]
        return next(group for group in groups if any(start <= self._rank < stop for start, stop in group))

    def group_table(self) -> tuple[str, Any] | None:
        """Return a group's tables and trainer state on its first rank, None on others. Runs on every rank."""
        if self._rank != self._group[0][0]:
            return None
        tables = self._with_own(self._describe_tensors(self._group))
        return self._as_root(tables), self._snapshot.documents.get("trainer")

    def join_tables(self, reports: list[tuple[str, Any] | None]) -> str:
        """Return the joined tables of all groups, and keep the union of their trainer states. Runs on rank 0.

        Raises:
            MismatchError: if two groups have different tensors under one name.
            StateError: for sharded tensors of the trainer's state that are not kept by parameter name.
        """
        groups = [report for report in reports if report is not None]
        joined = _join_tables([root_from_json(text.encode(), "table of a rank").components for text, _ in groups])
        self._trainer = reduce(merge_encoded, [trainer for _, trainer in groups])
        tensors, referred = joined.get("trainer", Component({})).tensors, set(stored_keys(self._trainer))
        lost = [key for key, spec in tensors.items() if not spec.pinned and key not in referred]
        if lost:
            raise StateError(
                f"the trainer's state has sharded tensors under {lost}, and pipeline stages have different ones; "
                "a callback must keep them in dicts by parameter name, in the same place on every rank"
            )
        joined["trainer"] = Component({key: spec for key, spec in tensors.items() if key in referred})
        return self._as_root(joined)

    def _as_root(self, tables: Tables) -> str:
        """Return tables as the text of a root index without files."""
        return root_to_json(RootIndex(self.agreed["save_id"], self._world_size, tables, {})).decode()

    def _with_own(self, tables: Tables) -> Tables:
        """Return the tables with the plain tensors of the trainer's state, which this rank alone writes."""
        if not self._snapshot.own:
            return tables
        own = Leaves(self._snapshot.own, pinned=frozenset(self._snapshot.own))
        specs = _specs("trainer", own, ((self._rank, self._rank + 1),))
        return {**tables, "trainer": Component({**tables.get("trainer", Component({})).tensors, **specs})}

    def stage(self, memory: HostMemory) -> None:
        """Copy this rank's content into ``memory``; from then on the live state may change. Runs on every rank."""
        live = self._live_content()
        copies = memory.copy(list(live.tensors.values()))
        self._content = replace(live, tensors=dict(zip(live.tensors, copies, strict=True)))
        del self._snapshot, self._tables

    def _live_content(self) -> Content:
        """Return the content that this rank writes, with views of the live tensors."""
        rank, snapshot, tables, shared = self._rank, self._snapshot, self._tables, Digests()
        if self.agreed["tables"]:
            tables = root_from_json(self.agreed["tables"].encode(), "joined table").components
            shared = digest_replicas(find_replicas(snapshot, tables, this_rank(), self._group))
        elif rank == 0:
            tables = self._with_own(tables)
        planned = self._plans.get(_plan_files, tables, rank, self._options.size_per_shard)
        tensors: dict[int, torch.Tensor] = {}
        for component, files in planned.items():
            aliases = tables[component].aliases
            leaves = snapshot.leaves.get(component, Leaves())
            live = {aliases.get(key, key): tensor for key, tensor in leaves.tensors.items()}
            if component == "trainer":
                live |= snapshot.own
            for piece in (piece for file in files for piece in file.pieces):
                tensors[id(piece)] = view_at(local_tensor(live[piece.key]), piece.part.local)
        return Content(tables, planned, tensors, dict(self._documents()), shared, snapshot.contents)

    def _documents(self) -> Iterator[tuple[str, tuple[str, bytes]]]:
        rank, documents = self._rank, dict(self._snapshot.documents)
        names = {"rank": f"trainer-state-dist-{rank:05d}.json"}
        if rank == 0:
            names |= {"trainer": "trainer-state.json", "peft": PEFT, "huggingface": HUGGING_FACE}
            documents["trainer"] = documents.get("trainer") if self._trainer is None else self._trainer
        if rank == self._group[0][0]:
            roles = ("model", "optimizer", "frozen", "versions")
            names |= {role: f"{role}-state-dist-{rank:05d}.json" for role in roles}
        for role, name in names.items():
            if documents.get(role) or (role == "optimizer" and role in documents):  # an empty list of optimizers, too
                content = json.dumps(documents[role], separators=(",", ":"), allow_nan=False).encode()
                check_json_size(content, f"the {role} state of rank {rank}, which is not tensors")
                yield name, (role, content)

    def write(self) -> WriteReport:
        """Write this rank's shard files, indexes and documents; return their sizes and checksums.

        Runs on every rank.
        """
        content = self._content = self._content or self._live_content()
        save_id = self.agreed["save_id"]
        draft = self._draft or self._storage.draft(self.path, save_id)
        windows = HostWindows(content.tensors)

        def stage(component: str, piece: Piece) -> memoryview:
            made = content.contents.get(component)
            return windows.bytes_of(id(piece)) if made is None else made(piece.key)

        indexes = {
            name: write_component(draft, name, self._rank, save_id, files, partial(stage, name))
            for name, files in content.files.items()
            if files
        }
        pieces, documents = (p for files in content.files.values() for file in files for p in file.pieces), []
        for name, (role, text) in content.documents.items():
            check_readable(role, text, f"the {role} state of rank {self._rank}")
            draft.write(name, [text])
            documents.append(FileInfo(name, len(text), checksum(text)))
        return {
            "indexes": indexes,
            "documents": documents,
            "shared": content.shared,
            "elements": sum(piece.part.box.numel for piece in pieces),
            "notes": draft.notes,
        }

    def commit(self, reports: list[WriteReport]) -> None:
        """Check completeness, write the root index, and publish the draft.

        Runs on rank 0, when all ranks have written.

        Raises:
            MismatchError: if groups of ranks hold different values of a tensor.
        """
        refuse_differences(self.path, [report["shared"] for report in reports])
        assert self._draft is not None and self._content is not None
        components, tables = {}, self._content.tables
        for name, table in tables.items():
            infos = {rank: report["indexes"].get(name) for rank, report in enumerate(reports)}
            indexes = {rank: FileInfo(*info) for rank, info in infos.items() if info is not None}
            components[name] = Component(table.tensors, table.aliases, indexes)
        written = sum(report["elements"] for report in reports)
        expected = sum(prod(spec.shape) for table in tables.values() for spec in table.tensors.values())
        if written != expected:
            raise FormatError(f"the ranks wrote {written} elements, expected {expected}: a bug of lightning-shardckpt")
        documents = [FileInfo(*info) for report in reports for info in report["documents"]]
        root = RootIndex(
            save_id=self.agreed["save_id"],
            world_size=self._world_size,
            components={n: c for n, c in components.items() if c.tensors},
            documents={info.name: info for info in documents},
            step=self._run.step,
            epoch=self._run.epoch,
            topology=self._run.topology,
            software=_software(),
            prefix=self._draft.prefix,
        )
        content = root_to_json(root)
        root_from_json(content, ROOT_NAME)  # one that a loader refuses must not replace a good checkpoint
        self._draft.write(ROOT_NAME, [content])
        self._draft.publish()
        self._note(dict.fromkeys([*self._draft.notes, *(note for report in reports for note in report["notes"])]))
        self._draft = None

    def discard(self) -> None:
        """Remove the draft, if it is not published; on rank 0."""
        if self._draft is not None:
            self._draft.discard()
            self._draft = None


def _pin(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose tensors are all written by the lowest rank that holds them."""
    pinned = {
        name: replace(leaves, pinned=frozenset(leaves.tensors))
        for name, leaves in snapshot.leaves.items()
        if name != "trainer"
    }
    return replace(snapshot, leaves={**snapshot.leaves, **pinned})


@cache
def _software() -> dict[str, str]:
    versions = {}
    for name in ("lightning-shardckpt", "lightning", "torch"):
        with suppress(PackageNotFoundError):  # run from a source tree
            versions[name] = version(name)
    return versions
