"""One save on one rank: the work and the state of each step of ``checkpoint.save`` and ``save_async``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any, Generic, Literal, Self, TypeVar, get_args

import torch

from lightning_shardckpt.checkpoint.save_agreement import (
    Agreement,
    Digests,
    GroupTable,
    SaveRequest,
    Tables,
    WriteReport,
    combine_digests,
    digest_replicas,
    find_differences,
    find_replicas,
    group_ranks,
    join_groups,
    refuse_differences,
    specs_of,
    tables_as_root,
)
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import (
    COMPONENTS,
    ROOT_NAME,
    Component,
    FileInfo,
    RootIndex,
    root_from_json,
    root_to_json,
)
from lightning_shardckpt.format.layout import as_holders
from lightning_shardckpt.format.plan import Piece, check_cover, plan_save, table_digest
from lightning_shardckpt.format.value_checks import check_json_size, checksum
from lightning_shardckpt.state.documents import HUGGING_FACE, PEFT
from lightning_shardckpt.state.dtensor_layout import local_tensor, this_rank, view_at
from lightning_shardckpt.state.json_tree import check_readable
from lightning_shardckpt.state.snapshot import Leaves, Snapshot
from lightning_shardckpt.state.tensor_bytes import HostMemory, HostWindows
from lightning_shardckpt.storage.protocol import Draft, Storage
from lightning_shardckpt.storage.router import check_writable
from lightning_shardckpt.transfer.writer import FilePlan, plan_files, write_component

K = TypeVar("K")
V = TypeVar("V")
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


# ── plans ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


class LastResult(Generic[K, V]):
    """A cache of one result, for the last key."""

    def __init__(self) -> None:
        self._last: tuple[K, V] | None = None

    def get(self, key: K, make: Callable[[], V]) -> V:
        """Return the last result if its key is equal, otherwise the result of ``make``.

        Neither result nor key may change afterwards.
        """
        if self._last is None or self._last[0] != key:
            self._last = key, make()
        return self._last[1]


@dataclass(frozen=True, slots=True)
class SavePlan:
    """The files that a rank writes, by component, with the tables of all ranks.

    ``elements`` counts those that this rank writes, ``all_elements``, on rank 0, those of all tensors.
    """

    tables: Tables
    files: dict[str, list[FilePlan]]
    elements: int
    all_elements: int


@dataclass(slots=True)
class PlanCache:
    """Cached results of the last save of one caller. Holds no tensors; not for concurrent use."""

    digest: LastResult[Tables, str] = field(default_factory=LastResult)
    plan: LastResult[tuple[Tables, int, float], SavePlan] = field(default_factory=LastResult)


def _plan_rank(tables: Tables, rank: int, size_per_shard: float) -> SavePlan:
    """Return the plan of ``rank`` for tables that all ranks have agreed on."""
    files: dict[str, list[FilePlan]] = {}
    for component in filter(tables.__contains__, COMPONENTS):
        pieces = plan_save(tables[component].tensors, rank)
        files[component] = plan_files(component, rank, pieces, size_per_shard)
        if rank == 0:
            check_cover(component, tables[component].tensors)
    elements = sum(p.part.box.numel for planned in files.values() for file in planned for p in file.pieces)
    all_elements = sum(prod(spec.shape) for table in tables.values() for spec in table.tensors.values())
    return SavePlan(tables, files, elements, all_elements)


# ── the job ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Content:
    """The content that a rank writes.

    Attributes:
        plan: of this rank.
        tensors: values of pieces, live or copied, by the piece's id.
        documents: roles and contents, by file name.
        shared: digests of tensors that other groups of ranks hold, too.
        contents: see ``Snapshot``; of components whose tensors have no values.
    """

    plan: SavePlan
    tensors: dict[int, torch.Tensor]
    documents: dict[str, tuple[str, bytes]]
    shared: Digests
    contents: dict[str, Callable[[str], memoryview]]


class SaveJob:
    """One save on one rank: describe, agree, copy if asynchronous, write, commit.

    As a context manager, discards the draft if the save fails in the block, on this or another rank. The arguments are
    those of ``checkpoint.save``.

    Attributes:
        replicas: digests of state that several ranks hold, after ``prepare``.
        notes: sentences for the user.
    """

    def __init__(
        self,
        path: str,
        ranks: Ranks,
        run: RunInfo,
        options: SaveOptions,
        storage: Storage,
        plans: PlanCache,
    ) -> None:
        self.path, self._run, self._storage, self._options, self._plans = path, run, storage, options, plans
        self._rank, self._world_size = ranks.rank, ranks.world
        self.replicas, self.notes = Digests(), list[str]()
        self._snapshot: Snapshot
        self._tables: Tables  # of its tensors, as if every rank had the same
        self._content: Content | None = None
        self._trainer: Any = None  # of all groups, on rank 0
        self._draft: Draft | None = None  # on rank 0

    def prepare(self, describe: Callable[[], Snapshot]) -> SaveRequest:
        """Return this rank's request, which describes its state by digests. Runs on every rank."""
        check_writable(self.path)
        snapshot = self._snapshot = _pin(describe()) if self._options.replicas == "first" else describe()
        self.notes += snapshot.notes
        tables = self._tables = {
            name: Component(specs_of(name, leaves, ((0, self._world_size),)), leaves.aliases)
            for name, leaves in snapshot.leaves.items()
        }
        text = self._plans.digest.get(tables, lambda: table_digest(tables))
        documents = [sorted(snapshot.documents.get(role) or ()) for role in ("model", "frozen", "versions")]
        digest = checksum((text + json.dumps(documents)).encode())
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
        groups = group_ranks(requests)
        if find_differences(request["replicas"] for request in requests):
            return None
        ranges = [[list(held) for held in as_holders(group)] for group in groups]  # short, since every rank gets it
        save_id = uuid.uuid4().hex
        draft = self._storage.draft(self.path, save_id)
        draft.begin()
        self._draft = draft  # set only after begin: if that fails, there is nothing to discard
        return {"save_id": save_id, "groups": ranges, "tables": ""}

    def group_table(self, agreed: Agreement) -> GroupTable | None:
        """Return a group's tables and trainer state on its first rank, None on others. Runs on every rank."""
        group = next((group for group in agreed["groups"] if self._rank == group[0][0]), None)
        if group is None:
            return None
        holders = tuple((start, stop) for start, stop in group)
        held = {
            name: Component({key: replace(spec, holders=holders) for key, spec in table.tensors.items()}, table.aliases)
            for name, table in self._tables.items()
        }
        text = tables_as_root(self._with_own(held), agreed["save_id"], self._world_size)
        return {"tables": text, "trainer": self._snapshot.documents.get("trainer")}

    def join_tables(self, reports: list[GroupTable | None]) -> str:
        """Return the joined tables of all groups, and keep the union of their trainer states. Runs on rank 0."""
        text, self._trainer = join_groups([report for report in reports if report is not None], self._world_size)
        return text

    def _with_own(self, tables: Tables) -> Tables:
        """Return the tables with the plain tensors of the trainer's state, which this rank alone writes."""
        if not self._snapshot.own:
            return tables
        own = Leaves(self._snapshot.own, pinned=frozenset(self._snapshot.own))
        specs = specs_of("trainer", own, ((self._rank, self._rank + 1),))
        return {**tables, "trainer": Component({**tables.get("trainer", Component({})).tensors, **specs})}

    def stage(self, agreed: Agreement, memory: HostMemory) -> None:
        """Copy this rank's content into ``memory``; from then on the live state may change. Runs on every rank."""
        live = self._live_content(agreed)
        copies = memory.copy(list(live.tensors.values()))
        self._content = replace(live, tensors=dict(zip(live.tensors, copies, strict=True)))
        del self._snapshot, self._tables

    def _live_content(self, agreed: Agreement) -> Content:
        """Return the content that this rank writes, with views of the live tensors."""
        rank, snapshot, tables, shared = self._rank, self._snapshot, self._tables, Digests()
        if agreed["tables"]:
            tables = root_from_json(agreed["tables"].encode(), "joined table").components
            own_group = next(group for group in agreed["groups"] if any(start <= rank < stop for start, stop in group))
            size = sum(stop - start for start, stop in own_group)
            shared = digest_replicas(find_replicas(snapshot, tables, this_rank(), "", size))
        elif rank == 0:
            tables = self._with_own(tables)
        key = tables, rank, self._options.size_per_shard
        plan = self._plans.plan.get(key, lambda: _plan_rank(*key))
        tensors: dict[int, torch.Tensor] = {}
        for component, files in plan.files.items():
            aliases = tables[component].aliases
            leaves = snapshot.leaves.get(component, Leaves())
            live = {aliases.get(key, key): tensor for key, tensor in leaves.tensors.items()}
            if component == "trainer":
                live |= snapshot.own
            for piece in (piece for file in files for piece in file.pieces):
                tensors[id(piece)] = view_at(local_tensor(live[piece.key]), piece.part.local)
        return Content(plan, tensors, dict(self._documents(agreed)), shared, snapshot.contents)

    def _documents(self, agreed: Agreement) -> Iterator[tuple[str, tuple[str, bytes]]]:
        rank, documents = self._rank, dict(self._snapshot.documents)
        names = {"rank": f"trainer-state-dist-{rank:05d}.json"}
        if rank == 0:
            names |= {"trainer": "trainer-state.json", "peft": PEFT, "huggingface": HUGGING_FACE}
            documents["trainer"] = documents.get("trainer") if self._trainer is None else self._trainer
        if any(rank == group[0][0] for group in agreed["groups"]):
            roles = ("model", "optimizer", "frozen", "versions")
            names |= {role: f"{role}-state-dist-{rank:05d}.json" for role in roles}
        for role, name in names.items():
            if documents.get(role) or (role == "optimizer" and role in documents):  # an empty list of optimizers, too
                content = json.dumps(documents[role], separators=(",", ":"), allow_nan=False).encode()
                check_json_size(content, f"the {role} state of rank {rank}, which is not tensors")
                yield name, (role, content)

    def write(self, agreed: Agreement) -> WriteReport:
        """Write this rank's shard files, indexes and documents; return their sizes and checksums.

        Runs on every rank.
        """
        content = self._content = self._content or self._live_content(agreed)
        plan, save_id = content.plan, agreed["save_id"]
        draft = self._draft or self._storage.draft(self.path, save_id)
        windows = HostWindows(content.tensors)

        def stage(component: str, piece: Piece) -> memoryview:
            made = content.contents.get(component)
            return windows.bytes_of(id(piece)) if made is None else made(piece.key)

        indexes = {
            name: write_component(draft, name, self._rank, save_id, files, partial(stage, name))
            for name, files in plan.files.items()
            if files
        }
        documents = []
        for name, (role, text) in content.documents.items():
            check_readable(role, text, f"the {role} state of rank {self._rank}")
            draft.write(name, [text])
            documents.append(FileInfo(name, len(text), checksum(text)))
        return {
            "indexes": indexes,
            "documents": documents,
            "shared": content.shared,
            "elements": plan.elements,
            "notes": [] if draft is self._draft else draft.notes,
        }

    def commit(self, agreed: Agreement, reports: list[WriteReport]) -> None:
        """Check completeness, write the root index, and publish the draft.

        Runs on rank 0, when all ranks have written.

        Raises:
            MismatchError: if groups of ranks hold different values of a tensor.
        """
        refuse_differences(self.path, [report["shared"] for report in reports])
        assert self._draft is not None and self._content is not None
        plan, components = self._content.plan, {}
        for name, table in plan.tables.items():
            infos = {rank: report["indexes"].get(name) for rank, report in enumerate(reports)}
            indexes = {rank: FileInfo(*info) for rank, info in infos.items() if info is not None}
            components[name] = Component(table.tensors, table.aliases, indexes)
        written, expected = sum(report["elements"] for report in reports), plan.all_elements
        if written != expected:
            raise FormatError(f"the ranks wrote {written} elements, expected {expected}: a bug of lightning-shardckpt")
        documents = [FileInfo(*info) for report in reports for info in report["documents"]]
        root = RootIndex(
            save_id=agreed["save_id"],
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
        self.notes += self._draft.notes
        self.notes += dict.fromkeys(note for report in reports for note in report["notes"])
        self._draft = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None and self._draft is not None:
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
