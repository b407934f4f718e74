"""Tensors of another format, as boxes of bytes in files, as a source for a load: each rank reads its slices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_shardckpt.fetch import Request, single_run
from lightning_shardckpt.foreign import ForeignTensors
from lightning_shardckpt.header import DTYPE_BYTES
from lightning_shardckpt.index import Component
from lightning_shardckpt.sources import Target, fetch_into
from lightning_shardckpt.staging import bytes_of, is_host_memory
from lightning_shardckpt.state.geometry import this_rank


class ForeignSource:
    """A checkpoint of another format.

    Args:
        tensors: by component and key, as in a checkpoint of this package; optimizer state as ``<n>/<FQN>/<state>``.
        documents: by role "model" and "optimizer", as ``model_leaves`` and ``optimizer_leaves`` give them.
        rest: Lightning's checkpoint dict without ``state_dict`` and ``optimizer_states``.
        digests: of tensors of the model, equal where the tensors are.
    """

    def __init__(
        self,
        tensors: ForeignTensors,
        documents: Mapping[str, Any] | None = None,
        rest: dict[str, Any] | None = None,
        digests: Mapping[str, Any] | None = None,
    ) -> None:
        self.path, self.tensors = tensors.path, tensors
        self._documents, self._rest, self._digests = documents or {}, rest or {}, digests or {}

    def close(self) -> None:
        """Release the files."""
        self.tensors.reader.close()

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, each whole."""
        return self.tensors.components

    def document(self, role: str, rank: int = 0) -> Any:
        """The JSON of "model" or "optimizer"; nothing is known of single ranks."""
        return self._documents.get(role)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Everything but model and optimizers."""
        return dict(self._rest)

    def alike(self, names: Sequence[str]) -> bool:
        """Whether tensors of the model are known to be equal."""
        first = self._digests.get(names[0])
        return first is not None and all(self._digests.get(name) == first for name in names)

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """Its shape: that files of its size are there was checked when this was made."""
        return self.tensors.spec(component, key).shape

    def verify(self, targets: list[Target]) -> int:
        """Nothing to compare with: such files have no checksums."""
        return 0

    def fill(self, targets: list[Target]) -> None:
        """Straight into the tensors' memory."""
        fetch_into(self.tensors, [(target.local, self._plan(target)) for target in targets], verify=False)

    def _plan(self, target: Target) -> list[Request]:
        local = target.local
        memory = bytes_of(local) if is_host_memory(local) else memoryview(b"")
        shape, requests = tuple(local.shape), []
        for overlap, entry in self.tensors.meeting(target.component, target.key, target.parts(this_rank())):
            run = single_run(overlap, shape, DTYPE_BYTES[entry.dtype])
            requests.append(Request(target.key, overlap, entry, shape, run, memory))
        return requests
