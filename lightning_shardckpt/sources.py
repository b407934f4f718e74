"""Where does stored state come from?

A source is a sharded checkpoint or a plain file of torch, such as one that was consolidated. Both describe their
tensors by the same specs, so comparing and planning do not know which one it is.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch

from lightning_shardckpt.box import Box
from lightning_shardckpt.errors import CheckpointNotFoundError, MismatchError
from lightning_shardckpt.index import Component
from lightning_shardckpt.layout import Part
from lightning_shardckpt.plan import plan_load
from lightning_shardckpt.ranks import Ranks
from lightning_shardckpt.read import Checkpoint, Request, fill, verify_requests
from lightning_shardckpt.staging import bytes_of, is_host_memory
from lightning_shardckpt.state.documents import checked
from lightning_shardckpt.state.geometry import local_tensor, local_views, parts_of
from lightning_shardckpt.state.model import model_leaves
from lightning_shardckpt.state.optimizer import StoredOptimizer, merge_optimizers, optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from lightning_shardckpt.state.tree import decode, decode_small
from lightning_shardckpt.storage.protocol import Storage

_LOOK_AGAIN_S = 0.1  # ranks that do not see the same checkpoint


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

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor, after making sure that its bytes can be there."""

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
        found = [checked(role, self.checkpoint.document(name), f"{self.path!r}, {name}") for name in names]
        if role == "optimizer" and len(found) > 1:
            return merge_optimizers(found)
        return {name: value for one in reversed(found) for name, value in one.items()} if found else None

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The decoded trainer state."""
        found: dict[str, Any] = decode(self.document("trainer") or {}, stored)
        return found

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor; memory for it may be allocated, since files of its size are there.

        Raises:
            ShardCkptError: if a box of it is not in an index, or a file is not the one that was saved.
        """
        spec = self.checkpoint.root.components[component].tensors[key]
        whole = Box.whole(spec.shape)
        for overlap in plan_load(spec, self.checkpoint.replicas(component)[key], (Part(whole, whole.start),)):
            file = self.checkpoint.entry(component, key, overlap).file
            self.checkpoint.check_file(component, overlap.writer, file)
        return spec.shape

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

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """Its shape: torch has mapped the tensor."""
        return tuple(self._leaves[component].tensors[key].shape)

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

    Until they see the same, the ranks look again for as long as the storage may take to show all of them one change.

    Raises:
        CheckpointNotFoundError: if there is no complete checkpoint.
        MismatchError: if the ranks see different checkpoints at the path.
    """
    source: Source | None = None
    deadline = time.monotonic() + storage.visible_within_s

    def look() -> dict[str, str]:
        nonlocal source
        if os.path.isfile(path):
            source = PlainSource(path, weights_only)
            return {"id": "plain file"}
        try:
            sharded = ShardedSource(storage, path, verify)
        except CheckpointNotFoundError as error:
            return {"missing": str(error)}
        source = sharded
        return {"id": sharded.checkpoint.root.save_id}

    def same(views: list[dict[str, str]]) -> bool:
        if all(view == views[0] for view in views) and "id" in views[0]:
            return True
        missing = [rank for rank, view in enumerate(views) if "missing" in view]
        if len(missing) < len(views) and time.monotonic() < deadline:
            return False
        if missing:
            others = f" (on ranks {missing} of {len(views)})" if len(views) > 1 else ""
            raise CheckpointNotFoundError(views[missing[0]]["missing"] + others)
        save_ids = [view["id"] for view in views]
        raise MismatchError(f"the ranks see different checkpoints at {path!r}: {save_ids}; is the path shared?")

    try:
        while not ranks.step(f"opening checkpoint {path!r}", look, same):
            _close(source)
            source = None
            time.sleep(_LOOK_AGAIN_S)
        assert source is not None
        yield source
    finally:
        _close(source)


def _close(source: Source | None) -> None:
    if isinstance(source, ShardedSource):
        source.checkpoint.close()


def assemble(source: Source, tensor: Callable[[str, str], torch.Tensor], *, optimizers: bool = True) -> dict[str, Any]:
    """Lightning's checkpoint dict with whole tensors; ``tensor`` gives the one of a component and key."""
    components = source.components()
    tensor = cache(tensor)  # a hostile document may refer to one tensor a million times
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
