"""One save on one rank: what it does and knows at each step of ``checkpoint.save`` and ``save_async``."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Self

import torch

from lightning_shardckpt.checkpoint.checkpoint_options import SaveOptions
from lightning_shardckpt.checkpoint.hf_mirror import HFMirror, only_model, plan_mirror
from lightning_shardckpt.checkpoint.incremental import RankWriter, SaveHistory
from lightning_shardckpt.checkpoint.plan_cache import PlanCache, SavePlan, Tables, check_new_parts, plan_rank
from lightning_shardckpt.checkpoint.save_agreement import (
    Agreement,
    Digests,
    GroupTable,
    SaveWish,
    Written,
    combine,
    differ,
    differing,
    digests_over_groups,
    group_text,
    groups_of,
    join_groups,
    refuse_differing,
    replica_digests,
    table_of,
)
from lightning_shardckpt.checkpoint.staging import HostMemory, HostWindows, copy_all
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.file_names import FileInfo
from lightning_shardckpt.format.index import ROOT_NAME, Component, RootIndex, TensorSpec
from lightning_shardckpt.format.index_json import root_from_json, root_to_json
from lightning_shardckpt.format.layout import REPLICATED, as_holders
from lightning_shardckpt.format.plan import table_digest
from lightning_shardckpt.format.strict_json import check_json_size
from lightning_shardckpt.state.documents import HUGGING_FACE, PEFT
from lightning_shardckpt.state.dtensor_layout import local_tensor, this_rank, view_at
from lightning_shardckpt.state.hf_directory import CONFIG_DTYPES, Model
from lightning_shardckpt.state.snapshot import Leaves, Snapshot, specs_of
from lightning_shardckpt.state.tensor_bytes import dtype_name
from lightning_shardckpt.storage.protocol import Draft, Storage
from lightning_shardckpt.transfer.writer import MB


@dataclass(frozen=True, slots=True)
class RunInfo:
    """The root index's words about the run that saved."""

    step: int | None = None
    epoch: int | None = None
    topology: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Described:
    """The state of a rank, and what it tells the others of it.

    Attributes:
        snapshot: of the live state.
        tables: of its tensors, as if every rank had the same.
        replicas: digests of what several ranks hold.
    """

    snapshot: Snapshot
    tables: Tables
    replicas: Digests


@dataclass(frozen=True, slots=True)
class Content:
    """The content that a rank writes.

    Attributes:
        save_id: of the save.
        plan: of this rank.
        tensors: values of pieces, live or copied, by the piece's id.
        documents: by file name.
        frozen: keys of parameters for which no gradient is computed, by component.
        mirror: the model a second time, if that is asked for.
        shared: digests of tensors that other groups of ranks hold, too.
    """

    save_id: str
    plan: SavePlan
    tensors: dict[int, torch.Tensor]
    documents: dict[str, bytes]
    frozen: dict[str, frozenset[str]]
    mirror: HFMirror | None
    shared: Digests


class SaveJob:
    """One save on one rank: described, agreed, staged or live, written, committed.

    Attributes:
        path: of the checkpoint.
        notes: sentences for the user.
    """

    def __init__(
        self,
        path: str,
        ranks: Ranks,
        about: RunInfo,
        options: SaveOptions,
        storage: Storage,
        plans: PlanCache,
        history: SaveHistory,
    ) -> None:
        self.path, self._ranks, self._about, self._storage = path, ranks, about, storage
        self._options, self._plans = options, plans
        self._writer = RankWriter(path, ranks.rank, options, storage, history)
        self._described: Described
        self._content: Content | None = None
        self._trainer: Any = None  # of all groups, on rank 0
        self._draft: Draft | None = None  # on rank 0
        self.notes: list[str] = []

    def prepare(self, describe: Callable[[], Snapshot]) -> SaveWish:
        """Return what this rank wants to save, as a digest. Runs on every rank."""
        snapshot = _pin(describe()) if self._options.replicas == "first" else describe()
        everyone, replicas = ((0, self._ranks.world),), Digests()
        tables: Tables = {
            name: Component(specs_of(name, leaves, everyone), leaves.aliases)
            for name, leaves in snapshot.leaves.items()
        }
        text = self._plans.digest.of(tables, lambda: table_digest(tables))
        documents = [snapshot.documents.get(role) for role in ("model", "frozen", "versions")]
        digest = checksum((text + "".join(json.dumps(sorted(document or ())) for document in documents)).encode())
        if self._ranks.world > 1 and self._options.replicas == "same":
            replicas = replica_digests(snapshot, tables, this_rank(), digest)
        self._described = Described(snapshot, tables, replicas)
        return {
            "path": str(self.path),
            "step": self._about.step,
            "digest": digest,
            "replicas": combine(replicas),
        }

    def agree(self, wishes: list[SaveWish]) -> Agreement | None:
        """Agree on one path and step, groups of ranks that hold the same tensors, and the draft. Runs on rank 0.

        None if replicas differ.
        """
        groups, documents = groups_of(wishes), self._described.snapshot.documents
        if differ([wish["replicas"] for wish in wishes]):
            return None
        mirror = {}
        if self._options.also is not None:
            if "peft" in documents:
                raise StateError(
                    f"also={self._options.also!r} cannot write a model with adapters of PEFT: transformers would not "
                    "find its weights under their names. Leave it out, and make a folder for PEFT of the checkpoint "
                    "with `python -m lightning_shardckpt.consolidate DIR --format peft`."
                )
            recorded = only_model(documents.get("huggingface")).recorded
            mirror = {k: v for k, v in recorded.items() if k != "files"}
        ranges = [[list(held) for held in as_holders(group)] for group in groups]  # short: each rank gets it
        save_id = uuid.uuid4().hex
        self._begin(save_id)
        return {"save_id": save_id, "groups": ranges, "mirror": mirror, "tables": ""}

    def digests(self) -> Digests:
        """Return what this rank has, as digests. Runs on every rank, if replicas differ."""
        return self._described.replicas

    def blame(self, reports: list[Digests]) -> None:
        """Say what differs. Runs on rank 0.

        Raises:
            MismatchError: naming tensors and ranks.
        """
        refuse_differing(self.path, reports)

    def table(self, agreed: Agreement) -> GroupTable | None:
        """Return a group's tables, as a root index without files, and its trainer's state.

        Runs on each group's first rank.
        """
        group = next((group for group in agreed["groups"] if self._ranks.rank == group[0][0]), None)
        if group is None:
            return None
        holders = tuple((start, stop) for start, stop in group)
        text = group_text(self._described.tables, holders, self._own_specs(), agreed["save_id"], self._ranks.world)
        return {"tables": text, "trainer": self._described.snapshot.documents.get("trainer")}

    def join(self, reports: list[GroupTable | None]) -> str:
        """Join the tables of all groups, and the trainer's state, to which other groups may add. Runs on rank 0.

        Raises:
            MismatchError: if two groups have different tensors under one name, or ranks lack a tensor that they share.
            StateError: for sharded tensors of the trainer's state that are not kept by parameter name.
        """
        text, self._trainer = join_groups([report for report in reports if report is not None], self._ranks.world)
        return text

    def _mirror(self, table: Component, model: dict[str, Any]) -> HFMirror:
        wanted = list(Model(model).tensors(table)), int(self._options.size_per_shard * MB)
        files = self._plans.mirror.of(wanted, lambda: plan_mirror(*wanted))
        texts: dict[str, bytes] = {}
        if self._ranks.rank == 0:
            floating = (tensor.dtype for tensor in wanted[0] if tensor.dtype in CONFIG_DTYPES)
            texts = only_model(self._described.snapshot.documents.get("huggingface")).files(next(floating, None), False)
        return HFMirror(files, texts)

    def _own_specs(self) -> dict[str, TensorSpec]:
        holders = ((self._ranks.rank, self._ranks.rank + 1),)
        return {
            key: TensorSpec(dtype_name(tensor, f"trainer/{key}"), tuple(tensor.shape), REPLICATED, holders, True)
            for key, tensor in self._described.snapshot.own.items()
        }

    def stage(self, agreed: Agreement, memory: HostMemory) -> None:
        """Copy what this rank writes into ``memory``; then what was described may change. Runs on every rank."""
        live = self._live(agreed)
        tensors = list(live.tensors.values())
        copies = memory.room(tensors)
        copy_all(tensors, copies)
        self._content = replace(live, tensors=dict(zip(live.tensors, copies, strict=True)))
        del self._described

    def _live(self, agreed: Agreement) -> Content:
        """Return the content that this rank writes, with views of the live tensors."""
        rank, snapshot = self._ranks.rank, self._described.snapshot
        tables, shared = self._described.tables, Digests()
        if agreed["tables"]:
            tables = root_from_json(agreed["tables"].encode(), "joined table").components
            if self._options.replicas == "same":
                group = next(of for of in agreed["groups"] if any(start <= rank < stop for start, stop in of))
                size = sum(stop - start for start, stop in group)
                shared = digests_over_groups(snapshot, tables, this_rank(), size)
        elif rank == 0 and snapshot.own:
            trainer = Component({**table_of(tables, "trainer").tensors, **self._own_specs()})
            tables = {**tables, "trainer": trainer}
        about = tables, rank, self._ranks.world, self._options.size_per_shard
        plan, mirror = self._plans.plan.of(about, lambda: plan_rank(*about)), None
        if self._options.also is not None:
            mirror = self._mirror(table_of(tables, "model"), agreed["mirror"])
        tensors: dict[int, torch.Tensor] = {}
        for component, files in plan.files.items():
            stored_as = tables[component].aliases
            leaves = snapshot.leaves.get(component, Leaves())
            live = {stored_as.get(key, key): tensor for key, tensor in leaves.tensors.items()}
            if component == "trainer":
                live |= snapshot.own
            for piece in (piece for file in files for piece in file.pieces):
                tensors[id(piece)] = view_at(local_tensor(live[piece.key]), piece.part.local)
        frozen = {name: leaves.frozen for name, leaves in snapshot.leaves.items()}
        documents = dict(self._documents(agreed))
        return Content(agreed["save_id"], plan, tensors, documents, frozen, mirror, shared)

    def write(self, agreed: Agreement) -> Written:
        """Write this rank's shard files, indexes and documents; return their sizes and checksums.

        Runs on every rank.
        """
        content = self._content = self._content or self._live(agreed)
        plan, save_id = content.plan, content.save_id
        draft = self._draft or self._storage.draft(self.path, save_id)
        windows = HostWindows(content.tensors)
        written = self._writer.write(draft, plan, content.frozen, lambda p: windows.bytes_of(id(p)), save_id)
        documents = []
        for name, text in content.documents.items():
            draft.write(name, [text])
            documents.append(_info_to_json(FileInfo(name, len(text), checksum(text))))
        if content.mirror is not None:
            pieces = [piece for file in plan.files.get("model", ()) for piece in file.pieces]
            content.mirror.write(draft, pieces, lambda p: windows.bytes_of(id(p)))
        return {
            "indexes": {name: _info_to_json(info) for name, info in written.indexes.items()},
            "documents": documents,
            "shared": content.shared,
            "elements": plan.elements,
            "shard_bytes": written.nbytes,
            "linked_bytes": written.linked_nbytes,
            "notes": [] if draft is self._draft else draft.notes,
        }

    def completed(self) -> None:
        """Let later saves link the files of this one: it is complete on all ranks. Runs on every rank."""
        self._writer.completed()

    def _documents(self, agreed: Agreement) -> Iterator[tuple[str, bytes]]:
        rank, found = self._ranks.rank, dict(self._described.snapshot.documents)
        names = {"rank": f"trainer-state-dist-{rank:05d}.json"}
        if rank == 0:
            names |= {"trainer": "trainer-state.json", "peft": PEFT, "huggingface": HUGGING_FACE}
            found["trainer"] = found.get("trainer") if self._trainer is None else self._trainer
        if any(rank == group[0][0] for group in agreed["groups"]):
            roles = ("model", "optimizer", "frozen", "versions")
            names |= {role: f"{role}-state-dist-{rank:05d}.json" for role in roles}
        for role, name in names.items():
            if found.get(role) or (role == "optimizer" and role in found):  # that there are none is told, too
                content = json.dumps(found[role], separators=(",", ":"), allow_nan=False).encode()
                check_json_size(content, f"the {role} state of rank {rank}, which is not tensors")
                yield name, content

    def commit(self, reports: list[Written]) -> tuple[int, int]:
        """Check that nothing is missing, write the root index, and publish.

        Returns the bytes of all files, and of those that were linked.

        Runs on rank 0, when all ranks have written.

        Raises:
            MismatchError: if groups of ranks hold different values of a tensor.
        """
        shared = [report["shared"] for report in reports]
        if differing(dict(enumerate(shared))):
            refuse_differing(self.path, shared)
        assert self._draft is not None and self._content is not None
        plan, mirror, components = self._content.plan, self._content.mirror, {}
        for name, table in plan.tables.items():
            wrote = {rank: report["indexes"] for rank, report in enumerate(reports) if name in report["indexes"]}
            indexes = {rank: FileInfo(*infos[name]) for rank, infos in wrote.items()}
            components[name] = Component(table.tensors, table.aliases, indexes)
        written, expected = sum(report["elements"] for report in reports), plan.all_elements
        if written != expected:
            raise FormatError(f"the ranks wrote {written} elements, expected {expected}: a bug of lightning-shardckpt")
        documents = [FileInfo(*info) for report in reports for info in report["documents"]]
        root = RootIndex(
            save_id=self._content.save_id,
            world_size=self._ranks.world,
            components={n: c for n, c in components.items() if c.tensors},
            documents={info.name: info for info in documents},
            step=self._about.step,
            epoch=self._about.epoch,
            topology=self._about.topology,
            software=_software(),
            mirror={} if mirror is None else mirror.finish(self._draft),
            prefix=self._draft.prefix,
        )
        content = root_to_json(root, plan.text)
        check_new_parts(root)
        self._draft.write(ROOT_NAME, [content])
        self._draft.publish()
        self.notes += self._draft.notes
        self.notes += dict.fromkeys(note for report in reports for note in report["notes"])
        self._draft = None
        listed = [*root.documents.values(), *root.mirror.values()]
        listed += [info for component in components.values() for info in component.indexes.values()]
        shard_bytes, linked_bytes = (sum(r[what] for r in reports) for what in ("shard_bytes", "linked_bytes"))
        return shard_bytes + sum(info.nbytes for info in listed) + len(content), linked_bytes

    def _begin(self, save_id: str) -> None:
        draft = self._storage.draft(self.path, save_id)
        draft.begin()  # if it fails, there is nothing of ours to discard
        self._draft = draft

    def __enter__(self) -> Self:
        """Begin a block after which rank 0 has no draft left if the save failed in it, whoever failed."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Discard the draft if the block failed."""
        if kind is not None and self._draft is not None:
            self._draft.discard()


def _pin(found: Snapshot) -> Snapshot:
    """Return a snapshot whose tensors are all written by the lowest rank that holds them."""
    pinned = {name: replace(of, pinned=frozenset(of.tensors)) for name, of in found.leaves.items() if name != "trainer"}
    return replace(found, leaves={**found.leaves, **pinned})


@cache
def _software() -> dict[str, str]:
    found = {}
    for name in ("lightning-shardckpt", "lightning", "torch"):
        with suppress(PackageNotFoundError):  # run from a source tree
            found[name] = version(name)
    return found


def _info_to_json(info: FileInfo) -> list[Any]:
    return [info.name, info.nbytes, info.checksum]
