"""Where state comes from, and what of it goes where: the steps of ``checkpoint.load``.

A source is a sharded checkpoint or a plain file of torch, such as one that was consolidated. Both describe their
tensors by the same specs, so comparing and planning do not know which one it is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.header import parse_json
from lightning_shardckpt.index import Component
from lightning_shardckpt.plan import plan_load
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.read import Checkpoint, Request, fill, verify_requests
from lightning_shardckpt.staging import TORCH_DTYPES, bytes_of, is_host_memory
from lightning_shardckpt.state.geometry import local_tensor, local_views, parts_of
from lightning_shardckpt.state.model import Differences, WholeNames, match_model, model_leaves
from lightning_shardckpt.state.optimizer import OptimizerLoad, StoredOptimizer, merge_optimizers, optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from lightning_shardckpt.state.trainer import drop_elsewhere, entry_of, sharded_like
from lightning_shardckpt.state.tree import decode, decode_small
from lightning_shardckpt.storage.protocol import Storage

_LISTED = 20


@dataclass(frozen=True, slots=True)
class Target:
    """Live memory to fill: the local part of ``tensor`` takes its region of the stored tensor ``key``."""

    component: str
    key: str
    tensor: torch.Tensor


class Source(Protocol):
    """Stored state, on one rank."""

    path: str

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""

    def document(self, role: str, rank: int = 0) -> Any:
        """What was stored under a role of ``Snapshot.documents``, as JSON; None if nothing was."""

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state; ``stored`` gives the tensor of a key of the component trainer."""

    def verify(self, targets: list[Target]) -> None:
        """Make sure that what the targets need is intact. Raises CorruptionError."""

    def fill(self, targets: list[Target]) -> None:
        """Read what the targets need into their memory."""


class ShardedSource:
    """A checkpoint directory of this package."""

    def __init__(self, storage: Storage, path: str, verify: bool = True) -> None:
        self.path, self.checkpoint, self._verify = path, Checkpoint(storage, path), verify

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, from the root index."""
        return self.checkpoint.root.components

    def document(self, role: str, rank: int = 0) -> Any:
        """The JSON of a role; of "model" and "optimizer" the union of what groups of ranks stored."""
        known = self.checkpoint.root.documents
        if role in ("trainer", "rank"):
            name = "trainer-state.json" if role == "trainer" else f"trainer-state-dist-{rank:05d}.json"
            names = [name] if name in known else []
        else:
            names = sorted(n for n in known if n.startswith(f"{role}-state-dist-"))
        found = [parse_json(self.checkpoint.document(name), f"{self.path!r}, {name}") for name in names]
        if role == "optimizer" and len(found) > 1:
            return merge_optimizers(found)
        return {name: value for one in reversed(found) for name, value in one.items()} if found else None

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The decoded trainer state."""
        found: dict[str, Any] = decode(self.document("trainer") or {}, stored)
        return found

    def verify(self, targets: list[Target]) -> None:
        """Read and check every block that the targets touch; sizes, headers and save ids only if told not to."""
        for target in targets:
            requests = self._requests(target)
            if self._verify:
                verify_requests(self.checkpoint, target.component, requests)
            for request in requests:
                self.checkpoint.check_file(target.component, request.overlap.writer, request.entry.file)

    def fill(self, targets: list[Target]) -> None:
        """Straight into the tensors' memory; through a host copy of the local part where that is not host memory."""
        for target in targets:
            local = local_tensor(target.tensor)
            host = local if is_host_memory(local) else torch.empty(local.shape, dtype=local.dtype)
            memory = bytes_of(host)
            for request in self._requests(target):
                fill(self.checkpoint, request, memory)
            if host is not local:
                local.copy_(host)

    def _requests(self, target: Target) -> list[Request]:
        """The byte ranges that this rank needs for one tensor."""
        spec = self.checkpoint.root.components[target.component].tensors[target.key]
        replica = self.checkpoint.replicas(target.component)[target.key]
        shape = tuple(local_tensor(target.tensor).shape)
        return [
            Request(target.key, overlap, self.checkpoint.entry(target.component, target.key, overlap), shape)
            for overlap in plan_load(spec, replica, parts_of(target.tensor))
        ]


class PlainSource:
    """A file of ``torch.save`` with Lightning's keys, memory-mapped: each rank copies its slices out of it."""

    def __init__(self, path: str, weights_only: bool = True) -> None:
        self.path = path
        self._checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=weights_only)
        self._leaves: dict[str, Leaves] = {}
        self._documents: dict[str, Any] = {}
        if not isinstance(self._checkpoint, dict) or "state_dict" not in self._checkpoint:
            raise CheckpointNotFoundError(f"{path!r} is a file, but no Lightning checkpoint: it has no state_dict")
        self._leaves["model"], self._documents["model"] = model_leaves(self._checkpoint["state_dict"])
        if "optimizer_states" in self._checkpoint:
            states = self._checkpoint["optimizer_states"]
            self._leaves["optimizer"], self._documents["optimizer"] = optimizer_leaves(states)

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, each whole."""
        return {n: Component(specs_of(n, leaves, ((0, 1),)), leaves.aliases) for n, leaves in self._leaves.items()}

    def document(self, role: str, rank: int = 0) -> Any:
        """The JSON of "model" or "optimizer"."""
        return self._documents.get(role)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Everything but model and optimizers, as it was pickled."""
        return {k: v for k, v in self._checkpoint.items() if k not in ("state_dict", "optimizer_states")}

    def verify(self, targets: list[Target]) -> None:
        """Nothing to compare with: such a file has no checksums that torch would verify."""

    def fill(self, targets: list[Target]) -> None:
        """Copy the slices."""
        for target in targets:
            full = self._leaves[target.component].tensors[target.key]
            for box, view in local_views(target.tensor):
                view.copy_(full[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))])


@contextmanager
def opened(
    path: str, *, ranks: Ranks, storage: Storage, verify: bool = True, weights_only: bool = True
) -> Iterator[Source]:
    """What is at ``path``, the same on all ranks.

    Collective: every rank of ``ranks`` must enter it.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: if the ranks see different checkpoints at the path.
    """
    found: list[Source] = []

    def look() -> str:
        if os.path.isfile(path):
            found.append(PlainSource(path, weights_only))
            return "plain file"
        source = ShardedSource(storage, path, verify)
        found.append(source)
        return source.checkpoint.root.save_id

    def same(save_ids: list[str]) -> None:
        if len(set(save_ids)) > 1:
            raise MismatchError(f"the ranks see different checkpoints at {path!r}: {save_ids}; is the path shared?")

    try:
        ranks.step(f"opening checkpoint {path!r}", look, same)
        yield found[0]
    finally:
        for source in found:
            if isinstance(source, ShardedSource):
                source.checkpoint.close()


@dataclass(frozen=True, slots=True)
class Live:
    """The objects to load into.

    ``optimizers`` None: weights only. ``names``: FQN by ``id`` of the parameter. ``whole``: of all pipeline stages.
    """

    model: Leaves
    extra_state: frozenset[str]
    optimizers: Sequence[Optimizer] | None
    names: Mapping[int, str]
    whole: WholeNames


class Load:
    """One load on one rank: compared first, then judged for all ranks, planned, filled and applied."""

    def __init__(self, source: Source, live: Live, strict: bool, pick_rank: Callable[[Any], int]) -> None:
        self._source, self._live, self._strict, self._pick_rank = source, live, strict, pick_rank
        self._components = source.components()
        here = {*live.model.tensors, *live.model.aliases, *live.extra_state}
        self._elsewhere = live.whole.elsewhere(here)
        self._sources: dict[str, list[int] | None] = {}
        self._optimizers: list[OptimizerLoad] = []
        self.trainer: dict[str, Any] = {}
        self.extra_state: dict[str, Any] = {}
        self.targets: list[Target] = []
        self.notes: list[str] = []

    def compare(self) -> dict[str, Any]:
        """On every rank: match the stored tensors with the live ones. Changes nothing.

        Returns every difference over model and optimizers, and which stored param groups each live one continues.
        """
        found = Differences()
        stored = self._components.get("model", Component({}))
        extra = (set(self._source.document("model") or {}), set(self._live.extra_state))
        ties, elsewhere = self._live.whole.ties, self._elsewhere
        matched = match_model(stored, self._live.model, extra, found, ties=ties, elsewhere=elsewhere)
        self.targets = [Target("model", key, self._live.model.tensors[name]) for name, key in matched.items()]
        if self._live.optimizers is not None:
            self._compare_optimizers(self._live.optimizers, matched, found)
        sources = {group: numbers for one in self._optimizers for group, numbers in one.sources().items()}
        return {"differences": found.problems, "sources": sources}

    def judge(self, reports: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: what all ranks found, each difference once.

        Raises:
            MismatchError: listing the differences, if ``strict``.
        """
        problems = list(dict.fromkeys(line for report in reports for line in report["differences"]))
        count = len(problems)
        lines = problems[:_LISTED] + ([f"… and {count - _LISTED} more"] if count > _LISTED else [])
        listed, path = "\n  ".join(lines), repr(self._source.path)
        if count and self._strict:
            raise MismatchError(
                f"cannot load {path} into this model: {count} differences\n  {listed}\n"
                "Set strict_loading=False on the LightningModule to load the rest, or look with "
                "`python -m lightning_shardckpt inspect PATH`."
            )
        note = f"{count} differences between {path} and this model were left as they are:\n  {listed}"
        sources: dict[str, list[int] | None] = {}
        for group, numbers in ((g, n) for report in reports for g, n in report["sources"].items()):
            known = sources.get(group)
            sources[group] = known if numbers is None else list(dict.fromkeys([*(known or ()), *numbers]))
        return {"notes": [note] if count else [], "sources": sources}

    def plan(self, judged: dict[str, Any]) -> None:
        """On every rank: allocate what is not there to be filled, read what is not tensors. Changes nothing."""
        self.notes, self._sources = judged["notes"], judged["sources"]
        for optimizer in self._optimizers:
            allocated = optimizer.allocate(self._components.get("optimizer"))
            self.targets += [Target("optimizer", key, tensor) for key, tensor in allocated.items()]
        extra = self._source.document("model") or {}
        self.extra_state = {n: decode_small(v) for n, v in extra.items() if n in self._live.extra_state}
        self._read_trainer()

    def _compare_optimizers(self, live: Sequence[Optimizer], matched: Mapping[str, str], found: Differences) -> None:
        document = self._source.document("optimizer")
        if document is None:
            raise MismatchError(
                f"cannot resume training from {self._source.path!r}: it holds weights only, no optimizer state. "
                "validate, test and predict can use it; to resume training, save with save_weights_only=False."
            )
        component = self._components.get("optimizer")
        if len(document) != len(live):
            found.add("optimizers", f"{len(document)} in checkpoint, {len(live)} in model")
        for number, optimizer in enumerate(live[: len(document)]):
            one = StoredOptimizer(number, document[str(number)], component)
            load = OptimizerLoad(number, optimizer, one, self._live.names, matched)
            load.compare(component, found, self._elsewhere)
            self._optimizers.append(load)

    def _read_trainer(self) -> None:
        """The trainer's state; its tensors are allocated now and filled with the others."""
        component = self._components.get("trainer", Component({}))
        tensors: dict[str, torch.Tensor] = {}
        model = self._live.model
        live = model.tensors | {alias: model.tensors[of] for alias, of in model.aliases.items()}
        for key, spec in component.tensors.items():
            # pinned: a plain tensor of one rank, which stays one
            like = None if spec.pinned else sharded_like(key, spec.shape, live)
            dtype, device = TORCH_DTYPES[spec.dtype], "meta" if self._is_elsewhere(key) else None
            blank = torch.empty(spec.shape, dtype=dtype, device=device)
            tensors[key] = blank if like is None else torch.empty_like(like, dtype=dtype)
        self.targets += [Target("trainer", key, tensor) for key, tensor in tensors.items() if not tensor.is_meta]
        self.trainer = self._source.trainer(tensors.__getitem__)
        if self._elsewhere:
            drop_elsewhere(self.trainer, self._is_elsewhere)
        first = decode_small(self._source.document("rank"))
        rank = 0 if first is None else self._pick_rank(first)
        self.trainer["rank_state"] = first if rank == 0 else decode_small(self._source.document("rank", rank))

    def _is_elsewhere(self, key: str) -> bool:
        """Whether a key of trainer state is about what only other pipeline stages have."""
        return bool(self._elsewhere) and entry_of(key, self._live.whole.state) in self._elsewhere

    def apply(self) -> None:
        """Put the filled optimizer state in place; the model's tensors were filled where they are."""
        filled = {t.key: t.tensor for t in self.targets if t.component == "optimizer"}
        for optimizer in self._optimizers:
            self.notes += optimizer.apply(filled, self._sources)


def assemble(source: Source, tensor: Callable[[str, str], torch.Tensor], *, optimizers: bool = True) -> dict[str, Any]:
    """Lightning's checkpoint dict with whole tensors; ``tensor`` gives the one of a component and key."""
    components = source.components()
    found = source.trainer(lambda key: tensor("trainer", key))
    if "model" in components:
        state: dict[str, Any] = {key: tensor("model", key) for key in components["model"].tensors}
        state |= {alias: state[of] for alias, of in components["model"].aliases.items()}
        state |= {name: decode_small(value) for name, value in (source.document("model") or {}).items()}
        found["state_dict"] = state
    document = source.document("optimizer") if optimizers else None
    if document is not None:
        component = components.get("optimizer")
        whole = {key: tensor("optimizer", key) for key in component.tensors} if component is not None else {}
        stored = [StoredOptimizer(i, document[str(i)], component) for i in range(len(document))]
        found["optimizer_states"] = [one.state_dict(whole) for one in stored]
    return found
