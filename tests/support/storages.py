"""Storages in memory and behind a gate."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_storage import LocalDraft, LocalReader, LocalStorage
from lightning_shardckpt.storage.protocol import Bytes


class MemoryReader:  # a checkpoint in a dict
    high_latency = False

    def __init__(self, files: dict[str, bytes]) -> None:
        self._files = files

    def size(self, name: str) -> int:
        return len(self._file(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        found = self._file(name)[offset : offset + len(target)]
        if len(found) != len(target):
            raise EOFError(f"{name} ends at byte {offset + len(found)}")
        target[:] = found

    def names(self) -> list[str]:
        return sorted(self._files)

    def close(self) -> None:
        pass

    def _file(self, name: str) -> bytes:
        if name not in self._files:
            raise FileNotFoundError(f"no file {name}")
        return self._files[name]


class MemoryDraft:  # a dict that becomes visible under its path when published
    prefix = ""

    def __init__(self, storage: MemoryStorage, path: str) -> None:
        self._storage, self._path, self._files = storage, path, dict[str, bytes]()
        self.notes: list[str] = []

    def begin(self) -> None:
        pass

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        if name in self._files:
            raise FileExistsError(name)
        self._files[name] = b"".join(map(bytes, parts))

    def publish(self) -> None:
        self._storage.checkpoints[self._path], self._files = self._files, {}

    def discard(self) -> None:
        self._files = {}


class MemoryStorage:  # checkpoints by path; ranks are threads or follow one another
    visible_within_s = 0.0

    def __init__(self) -> None:
        self.checkpoints: dict[str, dict[str, bytes]] = {}
        self._drafts: dict[tuple[str, str], MemoryDraft] = {}

    def open(self, path: str) -> MemoryReader:
        if ROOT_NAME not in self.checkpoints.get(path, ()):
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: it has no {ROOT_NAME}")
        return MemoryReader(self.checkpoints[path])

    def draft(self, path: str, save_id: str) -> MemoryDraft:
        return self._drafts.setdefault((path, save_id), MemoryDraft(self, path))

    def remove(self, path: str) -> list[str]:
        self.open(path)
        del self.checkpoints[path]
        return []

# ── a gate, which holds the writing thread until a test lets it through, or at which it fails ───────────────────────

TIMEOUT_S = 20.0


def complete(directory: str) -> set[str]:
    found = os.listdir(directory) if os.path.isdir(directory) else []
    return {name for name in found if name.endswith(".ckpt") and os.path.exists(f"{directory}/{name}/{ROOT_NAME}")}



class Gated(LocalStorage):
    """The file system, behind a gate that can be shut; and an action at one point of a save or a load, once."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()
        self.faults: dict[tuple[str, str], Callable[[], None]] = {}  # by point and name of the checkpoint
        self.looks: list[set[str]] = []
        """The complete checkpoints beside the one that is written, each time that something is done there."""

    def draft(self, path: str, save_id: str) -> Any:
        return GatedDraft(super().draft(path, save_id), self, path)

    def reach(self, point: str, path: str) -> None:
        self.looks.append(complete(os.path.dirname(path)))
        self.reached.set()
        assert self.gate.wait(TIMEOUT_S), "nobody opened the gate"
        self.act(point, path)

    def act(self, point: str, path: str) -> None:
        self.faults.pop((point, os.path.basename(path)), lambda: None)()

    def open(self, path: str) -> Any:
        self.act("open", path)
        return ActingReader(super().open(path), self, path)

    @contextmanager
    def shut(self) -> Iterator[None]:
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def opened_by(self, *functions: str) -> AbstractContextManager[None]:
        """Shut until the calling thread is seen to be in one of the functions, which it is to wait in."""
        main = threading.get_ident()

        def waits() -> bool:
            frame = sys._current_frames().get(main)
            if frame is None or frame.f_code.co_name != "wait":  # it only passes through, or has not come yet
                return False
            while frame is not None and frame.f_code.co_name not in functions:
                frame = frame.f_back
            return frame is not None

        return self.opened_when(waits)

    @contextmanager
    def opened_when(self, waits: Callable[[], bool]) -> Iterator[None]:
        over = threading.Event()

        def watch() -> None:
            while not over.wait(0.001):
                if waits():
                    self.gate.set()
                    return

        watcher = threading.Thread(target=watch)
        with self.shut():
            watcher.start()
            try:
                yield
                assert self.gate.is_set(), "nothing waited"
            finally:
                over.set()
                watcher.join()


class GatedDraft:  # holds what the writing thread does; ``begin`` is of the thread that calls
    def __init__(self, draft: LocalDraft, storage: Gated, path: str) -> None:
        self._draft, self._storage, self._path = draft, storage, path

    def begin(self) -> Any:
        self._storage.act("begin", self._path)
        return self._draft.begin()

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        self._storage.reach("write", self._path)
        self._draft.write(name, parts, nbytes=nbytes)

    def publish(self) -> Any:
        self._storage.reach("publish", self._path)
        return self._draft.publish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


class ActingReader:
    def __init__(self, reader: LocalReader, storage: Gated, path: str) -> None:
        self._reader, self._storage, self._path = reader, storage, path

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        if name.endswith(".safetensors") and offset > 8:  # headers are read before, while ranks compare
            self._storage.act("read", self._path)
        self._reader.read_into(name, offset, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def disk_error() -> None:
    raise OSError(errno.EIO, "Input/output error", "/the/disk")


def gated_io(**options: Any) -> ShardCkptIO:
    io = ShardCkptIO(use_async=True, **options)
    io.storage.local = Gated()
    return io
