"""Load tensors of another format, which are boxes of bytes in files: each rank reads its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.value_checks import DTYPE_BYTES, check_unpacked
from lightning_shardckpt.sources.foreign_tensors import ForeignTensors
from lightning_shardckpt.sources.source import ReadTarget, fetch_into
from lightning_shardckpt.state.dtensor_layout import this_rank
from lightning_shardckpt.state.tensor_bytes import bytes_of, is_host_memory
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.read_plan import Request, single_run


@contextmanager
def closed_on_error(reader: Reader) -> Iterator[Reader]:
    """Keeps a reader open unless what is done with it fails."""
    try:
        yield reader
    except BaseException:
        reader.close()
        raise


class ForeignSource:
    """A checkpoint of another format.

    Args:
        tensors: by component and key, as in a checkpoint of this package; optimizer state as ``<n>/<FQN>/<state>``.
        documents: by role "model" and "optimizer", as ``model_leaves`` and ``optimizer_leaves`` give them.
        rest: Lightning's checkpoint dict without ``state_dict`` and ``optimizer_states``.
    """

    def __init__(
        self,
        tensors: ForeignTensors,
        documents: Mapping[str, Any] | None = None,
        rest: dict[str, Any] | None = None,
    ) -> None:
        self.path, self.tensors = tensors.path, tensors
        self._documents, self._rest = documents or {}, rest or {}

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

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape: that files of its size are there was checked when this was made."""
        spec = self.tensors.spec(component, key)
        check_unpacked(spec.dtype, f"{self.path!r}: {key!r}")
        return spec.shape

    def verify(self, targets: list[ReadTarget]) -> int:
        """Do nothing: such files have no checksums to compare with."""
        return 0

    def fill(self, targets: list[ReadTarget]) -> None:
        """Straight into the tensors' memory."""
        fetch_into(self.tensors, [(target.local, self._plan(target)) for target in targets], verify=False)

    def _plan(self, target: ReadTarget) -> list[Request]:
        local = target.local
        memory = bytes_of(local) if is_host_memory(local) else memoryview(b"")
        shape, requests = tuple(local.shape), []
        for overlap, entry in self.tensors.meeting(target.component, target.key, target.parts(this_rank())):
            run = single_run(overlap, shape, DTYPE_BYTES[entry.dtype])
            requests.append(Request(target.key, overlap, entry, shape, run, memory))
        return requests
