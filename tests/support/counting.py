"""A directory that notes what a load reads: the oracle of all that is said of reads."""

from __future__ import annotations

from collections.abc import Callable

from lightning_shardckpt.storage.local_storage import LocalStorage
from lightning_shardckpt.storage.protocol import Reader


class Counting(LocalStorage):
    """Notes every read of tensors' bytes: file, offset, length. While it is broken, they come with a flipped bit."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[tuple[str, int, int]] = []
        self.is_broken: Callable[[], bool] = lambda: False

    def open(self, path: str) -> Reader:
        return self._noting(super().open(path))

    def _noting(self, reader: Reader) -> Reader:
        read_into = reader.read_into

        def noted(name: str, offset: int, target: memoryview) -> None:
            read_into(name, offset, target)
            if name.endswith(".safetensors") and offset > 8:  # after the header
                self.reads.append((name, offset, len(target)))
                target[0] ^= self.is_broken()

        reader.read_into = noted  # type: ignore[method-assign]
        return reader

    @property
    def nbytes(self) -> int:
        return sum(length for _, _, length in self.reads)

    @property
    def files(self) -> set[str]:
        return {name for name, _, _ in self.reads}
