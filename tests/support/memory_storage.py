"""Checkpoints in this process's memory: the reference for what a backend does, used by tests and for trying out."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.protocol import Bytes


class MemoryReader:
    """A checkpoint in a dict."""

    high_latency = False

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return len(self._file(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""
        found = self._file(name)[offset : offset + len(target)]
        if len(found) != len(target):
            raise EOFError(f"{name} ends at byte {offset + len(found)}")
        target[:] = found

    def names(self) -> list[str]:
        """Return every file, sorted."""
        return sorted(self._files)

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def _file(self, name: str) -> bytes:
        if name not in self._files:
            raise FileNotFoundError(f"no file {name}")
        return self._files[name]


class MemoryDraft:
    """A dict that becomes visible under its path when published."""

    prefix = ""

    def __init__(self, storage: MemoryStorage, path: str) -> None:
        self._storage, self._path, self._files = storage, path, dict[str, bytes]()
        self.notes: list[str] = []

    def begin(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        """Keep a copy of the parts."""
        if name in self._files:
            raise FileExistsError(name)
        self._files[name] = b"".join(map(bytes, parts))

    def publish(self) -> None:
        """Show the files at the path."""
        self._storage.checkpoints[self._path], self._files = self._files, {}

    def discard(self) -> None:
        """Forget the files."""
        self._files = {}


class MemoryStorage:
    """Checkpoints by path; ranks are threads or follow one another."""

    visible_within_s = 0.0

    def __init__(self) -> None:
        self.checkpoints: dict[str, dict[str, bytes]] = {}
        self._drafts: dict[tuple[str, str], MemoryDraft] = {}

    def open(self, path: str) -> MemoryReader:
        """The checkpoint at ``path``."""
        if ROOT_NAME not in self.checkpoints.get(path, ()):
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: it has no {ROOT_NAME}")
        return MemoryReader(self.checkpoints[path])

    def draft(self, path: str, save_id: str) -> MemoryDraft:
        """The draft that all ranks of this save share."""
        return self._drafts.setdefault((path, save_id), MemoryDraft(self, path))

    def remove(self, path: str) -> list[str]:
        """Forget the checkpoint at ``path``."""
        self.open(path)
        del self.checkpoints[path]
        return []
