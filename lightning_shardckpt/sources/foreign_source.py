"""Load tensors of another format, which are boxes of bytes in files: each rank reads its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.value_checks import DTYPE_BYTES
from lightning_shardckpt.sources.foreign_tensors import ForeignTensors
from lightning_shardckpt.sources.source import ReadTarget, fetch_into
from lightning_shardckpt.state.dtensor_layout import this_rank
from lightning_shardckpt.state.tensor_bytes import bytes_of, is_host_memory
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.transfer.read_plan import Request, single_run

_WINDOW_BYTES = 1 << 20  # of each of two tensors that are compared


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
        """Return whether tensors of the model are equal: by what is known of them, else by their bytes."""
        first = self._digests.get(names[0])
        if first is not None:
            return all(self._digests.get(name) == first for name in names)
        return all(self._same_bytes(names[0], other) for other in names[1:])

    def _same_bytes(self, a: str, b: str) -> bool:
        if self.tensors.spec("model", a) != self.tensors.spec("model", b):
            return False
        pairs = list(zip(self.tensors.boxes("model", a), self.tensors.boxes("model", b), strict=False))
        if any(one.box != other.box for one, other in pairs):
            return False  # split otherwise: not looked at
        windows = [memoryview(bytearray(_WINDOW_BYTES)) for _ in range(2)]
        for pair in pairs:
            for at in range(0, pair[0].place.nbytes, _WINDOW_BYTES):
                count = min(_WINDOW_BYTES, pair[0].place.nbytes - at)
                for one, window in zip(pair, windows, strict=True):
                    self.tensors.reader.read_into(one.entry.file, one.entry.begin + at, window[:count])
                if windows[0][:count] != windows[1][:count]:
                    return False
        return True

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape: that files of its size are there was checked when this was made."""
        return self.tensors.spec(component, key).shape

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
