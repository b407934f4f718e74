"""A storage that holds the writing thread at a gate until a test lets it through, or fails there."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from lightning_shardckpt import ShardCkptIO
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local_storage import LocalDraft, LocalStorage
from lightning_shardckpt.storage.protocol import Bytes

TIMEOUT_S = 20.0


def complete(directory: str) -> set[str]:
    found = os.listdir(directory) if os.path.isdir(directory) else []
    return {name for name in found if name.endswith(".ckpt") and os.path.exists(f"{directory}/{name}/{ROOT_NAME}")}



class Gated(LocalStorage):
    """The file system, behind a gate that can be shut; and an action at one point of a save, once."""

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
        self.faults.pop((point, os.path.basename(path)), lambda: None)()

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
        """Shut until something is seen to be so."""
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


class GatedDraft:
    """Holds what the writing thread does; ``begin`` is of the thread that calls."""

    def __init__(self, draft: LocalDraft, storage: Gated, path: str) -> None:
        self._draft, self._storage, self._path = draft, storage, path

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        self._storage.reach("write", self._path)
        self._draft.write(name, parts, nbytes=nbytes)

    def publish(self) -> Any:
        self._storage.reach("publish", self._path)
        return self._draft.publish()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draft, name)


def disk_error() -> None:
    raise OSError(errno.EIO, "Input/output error", "/the/disk")


def gated_io(**options: Any) -> ShardCkptIO:
    io = ShardCkptIO(use_async=True, **options)
    io.storage = Gated()
    return io
