"""One save on one rank: the work and the state of each step of ``checkpoint.save``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial, reduce
from importlib.metadata import PackageNotFoundError, version
from math import prod
from typing import Any, Literal, TypedDict, get_args

import torch

from lightning_shardckpt.checkpoint.background import SaveGroup
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
from lightning_shardckpt.format.layout import REPLICATED, Holders, Layout, Shape, as_holders, join_holders
from lightning_shardckpt.format.plan import Piece, check_cover, plan_save, table_digest
from lightning_shardckpt.format.value_checks import check_json_size, checksum
from lightning_shardckpt.state.documents import HUGGING_FACE, PEFT, stored_keys, values_of
from lightning_shardckpt.state.json_tree import check_readable, merge_encoded
from lightning_shardckpt.state.local_tensors import (
    HostMemory,
    HostWindows,
    dtype_name,
    layout_of,
    local_tensor,
    this_rank,
    view_at,
)
from lightning_shardckpt.state.model import Leaves
from lightning_shardckpt.state.trainer import Snapshot
from lightning_shardckpt.storage.protocol import Draft, Storage
from lightning_shardckpt.system.tensor_digest import bit_digest, digest_values
from lightning_shardckpt.system.text import count_text, list_some
from lightning_shardckpt.transfer.writer import FilePlan, plan_files, write_component

Tables = dict[str, Component]
"""The tensors and aliases of every component, without files."""
Digests = dict[str, dict[str, str]]
"""A rank's digests by label and name. Ranks have a label in common if they hold replicas of the same parts."""
Replicas = Literal["same", "first"]
"""How replicas of a tensor are stored: they must be equal, or the lowest rank's is stored."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """Options of writing a checkpoint; raises a ValueError for an invalid one, naming it."""

    size_per_shard: float = 1024  # limit of a shard file in MB (2^20 bytes); a larger tensor gets a file of its own
    replicas: Replicas = "same"  # requires equal replicas of each tensor; "first" stores the first rank's

    def __post_init__(self) -> None:
        if not isinstance(self.size_per_shard, int | float) or not self.size_per_shard > 0:
            raise ValueError(f"size_per_shard is a positive number of MB (1024 for 1 GB), got {self.size_per_shard!r}")
        if self.replicas not in get_args(Replicas):
            raise ValueError(f'replicas is "same" or "first", got {self.replicas!r}')


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The step, epoch and topology of the run, for the root index."""

    step: int | None = None
    epoch: int | None = None
    topology: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any], topology: Mapping[str, int]) -> RunInfo:
        """Return the step and epoch of a state, where they are valid numbers, with the topology."""
        numbers = [state.get(key) for key in ("global_step", "step", "epoch")]
        global_step, step, epoch = (n if type(n) is int and 0 <= n < 1 << 63 else None for n in numbers)
        return cls(step if global_step is None else global_step, epoch, topology)


# ── tables and plans ──────────────────────────────────────────────────────────────────────────────────────────────────


def _plan_files(tables: Tables, rank: int, size_per_shard: float) -> dict[str, list[FilePlan]]:
    """Return the files that ``rank`` writes, by component, for tables that all ranks have agreed on."""
    if rank == 0:
        for component, table in tables.items():
            check_cover(component, table.tensors)
    planned = {name: plan_save(tables[name].tensors, rank) for name in COMPONENTS if name in tables}
    return {name: plan_files(name, rank, pieces, size_per_shard) for name, pieces in planned.items() if pieces}


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


# ── the job ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class WriteReport(TypedDict):
    """The files that one rank wrote, as JSON."""

    indexes: dict[str, FileInfo]  # by component
    documents: list[FileInfo]
    elements: int  # in all of them
    shared: Digests  # of tensors that other groups of ranks hold, too
    notes: list[str]


class SaveJob:
    """One save on one rank: describe, agree, plan, write, commit. The arguments are those of ``checkpoint.save``.

    Attributes:
        replicas: digests of state that several ranks hold, after ``prepare``.
        joined: the tables of all groups of ranks, as the text of a root index without files; empty if one group has
            all ranks.
    """

    def __init__(self, path: str, group: SaveGroup, run: RunInfo, options: SaveOptions, storage: Storage) -> None:
        self.path, self._run, self._storage, self._options, self._planned = path, run, storage, options, group.planned
        self._rank, self._world_size = group.ranks.rank, group.ranks.world
        self._note, self.replicas, self.joined = group.background.note, Digests(), ""
        self._save_id, self._group = "", as_holders([])  # agreed by all ranks, and those with the same tensors
        self._snapshot: Snapshot
        self._tables: Tables  # of its tensors, as if every rank had the same; when planned, of all ranks
        self._draft: Draft | None = None  # on rank 0
        # to write
        self._files: dict[str, list[FilePlan]] | None = None  # by component, when planned
        self._tensors = dict[int, torch.Tensor]()  # values of pieces, live or copied, by the piece's id
        self._documents = dict[str, tuple[str, bytes]]()  # roles and contents, by file name
        self._shared = Digests()

    def prepare(self, describe: Callable[[], Snapshot]) -> dict[str, Any]:
        """Return this rank's request. Runs on every rank.

        Its ``digest`` is equal on ranks that hold the same tensors; ``replicas`` has a digest for each label.
        """
        snapshot = describe()
        if self._options.replicas == "first":  # the lowest rank that holds a tensor writes it
            leaves = {name: replace(one, pinned=frozenset(one.tensors)) for name, one in snapshot.leaves.items()}
            snapshot = replace(snapshot, leaves=leaves | {"trainer": snapshot.leaves["trainer"]})
        self._snapshot = snapshot
        self._note(snapshot.notes)
        tables = self._tables = self._describe_tensors(((0, self._world_size),))
        documents = [sorted(snapshot.documents.get(role) or ()) for role in ("model", "frozen", "versions")]
        digest = checksum((self._planned(table_digest, tables) + json.dumps(documents)).encode())
        if self._world_size > 1 and self._options.replicas == "same":
            self.replicas = digest_replicas(find_replicas(snapshot, tables, this_rank(), digest))
        request = {"path": str(self.path), "step": self._run.step, "digest": digest}
        return {**request, "replicas": combine_digests(self.replicas)}

    def agree(self, requests: list[dict[str, Any]]) -> tuple[str, list[Holders]] | None:
        """Check that paths and steps are equal, group ranks by their tensors, and begin the draft. Runs on rank 0.

        Returns:
            The id of the save, and the groups of ranks that hold the same tensors: one, or one for each pipeline stage.
            None if replicas differ.

        Raises:
            MismatchError: if the ranks disagree about the path or the step.
            FileExistsError: see ``checkpoint.save``.
        """
        for what in ("path", "step"):
            first = dict[str, int]()  # rank by value
            for rank, request in enumerate(requests):
                first.setdefault(json.dumps(request[what]), rank)
            if len(first) > 1:
                listed = ", ".join(f"rank {rank}: {value}" for value, rank in first.items())
                hint = "; if the name holds a metric, log it with sync_dist=True" if what == "path" else ""
                raise MismatchError(f"the ranks disagree about the {what} of this save: {listed}{hint}")
        if find_differences(request["replicas"] for request in requests):
            return None
        groups: dict[str, list[int]] = {}
        for rank, request in enumerate(requests):
            groups.setdefault(request["digest"], []).append(rank)
        save_id = uuid.uuid4().hex
        draft = self._storage.draft(self.path, save_id)
        draft.begin()
        self._draft = draft  # set only after begin: if that fails, there is nothing to discard
        return save_id, [as_holders(group) for group in groups.values()]

    def accept(self, save_id: str, groups: list[Holders]) -> None:
        """Take the result of ``agree``, through JSON. Runs on every rank."""
        holders = [tuple((start, stop) for start, stop in group) for group in groups]
        self._group = next(group for group in holders if any(start <= self._rank < stop for start, stop in group))
        self._save_id = save_id

    def _describe_tensors(self, holders: Holders) -> Tables:
        leaves = self._snapshot.leaves
        return {name: Component(_specs(name, one, holders), one.aliases) for name, one in leaves.items()}

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
        trainer = reduce(merge_encoded, [trainer for _, trainer in groups])
        self._snapshot = replace(self._snapshot, documents={**self._snapshot.documents, "trainer": trainer})
        tensors, referred = joined.get("trainer", Component({})).tensors, set(stored_keys(trainer))
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
        return root_to_json(RootIndex(self._save_id, self._world_size, tables, {})).decode()

    def _with_own(self, tables: Tables) -> Tables:
        """Return the tables with the plain tensors of the trainer's state, which this rank alone writes."""
        own = Leaves(self._snapshot.own, pinned=frozenset(self._snapshot.own))
        specs = _specs("trainer", own, ((self._rank, self._rank + 1),))
        return {**tables, "trainer": Component({**tables.get("trainer", Component({})).tensors, **specs})}

    def plan(self, memory: HostMemory | None = None) -> None:
        """Plan this rank's files; with ``memory``, copy their content, so that the live state may change.

        Runs on every rank.
        """
        snapshot, tables, tensors = self._snapshot, self._tables, dict[int, torch.Tensor]()
        if self.joined:
            tables = root_from_json(self.joined.encode(), "joined table").components
            self._shared = digest_replicas(find_replicas(snapshot, tables, this_rank(), self._group))
        elif self._rank == 0:
            tables = self._with_own(tables)
        self._files = self._planned(_plan_files, tables, self._rank, self._options.size_per_shard)
        for component, files in self._files.items():
            aliases, leaves = tables[component].aliases, snapshot.leaves.get(component, Leaves())
            live = {aliases.get(key, key): tensor for key, tensor in leaves.tensors.items()}
            if component == "trainer":
                live |= snapshot.own
            for piece in (piece for file in files for piece in file.pieces):
                tensors[id(piece)] = view_at(local_tensor(live[piece.key]), piece.part.local)
        if memory is not None:
            tensors = dict(zip(tensors, memory.copy([*tensors.values()]), strict=True))
        self._tables, self._tensors, self._documents = tables, tensors, dict(self._encode_documents())
        self._contents = snapshot.contents
        del self._snapshot

    def _encode_documents(self) -> Iterator[tuple[str, tuple[str, bytes]]]:
        rank, documents = self._rank, self._snapshot.documents
        names = {"rank": f"trainer-state-dist-{rank:05d}.json"}
        if rank == 0:
            names |= {"trainer": "trainer-state.json", "peft": PEFT, "huggingface": HUGGING_FACE}
        if rank == self._group[0][0]:
            roles = ("model", "optimizer", "frozen", "versions")
            names |= {role: f"{role}-state-dist-{rank:05d}.json" for role in roles}
        for role, name in names.items():
            if documents.get(role) or (role == "optimizer" and role in documents):  # an empty list of optimizers, too
                content = json.dumps(documents[role], separators=(",", ":"), allow_nan=False).encode()
                check_json_size(content, f"the {role} state of rank {rank}, which is not tensors")
                yield name, (role, content)

    def write(self) -> WriteReport:
        """Write this rank's files; return their sizes and checksums. Runs on every rank."""
        if self._files is None:
            self.plan()
        assert self._files is not None
        draft = self._draft or self._storage.draft(self.path, self._save_id)
        windows, documents = HostWindows(self._tensors), list[FileInfo]()

        def stage(component: str, piece: Piece) -> memoryview:
            made = self._contents.get(component)
            return windows.bytes_of(id(piece)) if made is None else made(piece.key)

        indexes = {
            name: write_component(draft, name, self._rank, self._save_id, files, partial(stage, name))
            for name, files in self._files.items()
        }
        pieces = (piece for files in self._files.values() for file in files for piece in file.pieces)
        for name, (role, text) in self._documents.items():
            check_readable(role, text, f"the {role} state of rank {self._rank}")
            draft.write(name, [text])
            documents.append(FileInfo(name, len(text), checksum(text)))
        return {
            "indexes": indexes,
            "documents": documents,
            "elements": sum(piece.part.box.numel for piece in pieces),
            "shared": self._shared,
            "notes": draft.notes,
        }

    def commit(self, reports: list[WriteReport]) -> None:
        """Check completeness, write the root index, and publish the draft. Runs on rank 0, when all ranks have written.

        Raises a MismatchError if groups of ranks hold different values of a tensor.
        """
        refuse_differences(self.path, [report["shared"] for report in reports])
        assert self._draft is not None
        components, tables = {}, self._tables
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
            save_id=self._save_id,
            world_size=self._world_size,
            components={n: c for n, c in components.items() if c.tensors},
            documents={info.name: info for info in documents},
            step=self._run.step,
            epoch=self._run.epoch,
            topology=dict(self._run.topology),
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


@cache
def _software() -> dict[str, str]:
    versions = {}
    for name in ("lightning-shardckpt", "lightning", "torch"):
        with suppress(PackageNotFoundError):  # run from a source tree
            versions[name] = version(name)
    return versions


# ── replicas of state on several ranks ────────────────────────────────────────────────────────────────────────────────
# A save takes each part of the state from one of the ranks that hold it, and distributes the parts over the ranks. If
# replicas differed, the checkpoint would hold a state that no rank ever had.


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

    Leaves out pinned tensors, which may differ. ``group`` is a text common to the ranks with the same tensors, which
    are compared with each other; or these ranks, if ``tables`` have the tensors of all groups, such as pipeline stages.
    Then only tensors that several groups hold are compared, between all of them.
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
    """Yield label, name and value of values in documents and of the trainer's plain tensors.

    One rank of each group stores extra state of modules and optimizer state that is no tensor; one rank of all stores
    optimizers' settings and their state without parameters.
    """
    documents, settings = snapshot.documents, dict[str, Any]()
    of_group = {"": None, **{f"model/{name}": value for name, value in (documents.get("model") or {}).items()}}
    for number, optimizer in (documents.get("optimizer") or {}).items():
        start = f"optimizer/{number}"
        of_group |= {f"{start}/{param}/{name}": value for param, name, value in values_of(optimizer)}
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
