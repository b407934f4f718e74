"""Storages in memory and behind a gate, and a file system that shows late what other processes make."""

from __future__ import annotations

import builtins
import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
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
    io.storage = Gated()
    return io

# ── caches of network file systems ──────────────────────────────────────────────────────────────────────────────────

_LOOKING = ("stat", "lstat", "unlink", "rmdir", "open")
_LISTING = ("listdir", "scandir")
_MOVING, _MAKING = ("rename", "replace"), ("mkdir",)


class Lag:  # below ``root``, names of others become visible ``late_s`` after their making. Use it as a context
    def __init__(self, root: str, late_s: float) -> None:
        self._root, self._late_s = os.path.abspath(root), late_s
        self._known: set[str] = set()
        self._originals: dict[str, Any] = {}
        self.missed: set[str] = set()
        """Base names that were asked for, or left out of a list, when they were there."""

    def __enter__(self) -> Lag:
        wrappers = {_LOOKING: self._looking, _LISTING: self._listing, _MOVING: self._moving, _MAKING: self._making}
        for names, wrap in wrappers.items():
            for name in names:
                self._originals[name] = getattr(os, name)
                setattr(os, name, wrap(self._originals[name]))
        self._originals["file"] = builtins.open
        builtins.open = self._looking(builtins.open)
        return self

    def __exit__(self, *_: object) -> None:
        builtins.open = self._originals.pop("file")
        for name, original in self._originals.items():
            setattr(os, name, original)

    def knows(self, *paths: str) -> None:
        self._known.update(paths)

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        if isinstance(path, int):
            return None
        base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
        found = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        return found if found.startswith(self._root + "/") else None

    def _is_visible(self, path: str) -> bool:
        if path != self._root and not self._is_visible(os.path.dirname(path)):
            return False
        if path == self._root or path in self._known:
            return True
        try:
            changed = self._originals["lstat"](path).st_ctime
        except OSError:
            return True  # the call itself says so
        if time.time() < changed + self._late_s:
            self.missed.add(os.path.basename(path))
            return False
        self._known.add(path)
        return True

    def _check(self, path: str | None) -> None:
        if path is not None and not self._is_visible(path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _looking(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> Any:
            below = self._below(path, kwargs.get("dir_fd"))
            making = bool(args) and isinstance(args[0], int) and bool(args[0] & os.O_CREAT)
            self._check(os.path.dirname(below) if below is not None and making else below)
            found = original(path, *args, **kwargs)
            if making and below is not None:
                self._known.add(below)
            return found

        return call

    def _listing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".") -> Any:
            base = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(path)
            below = self._below(base)
            self._check(below)
            found = original(path)
            if below is None and base != self._root:
                return found
            if original is self._originals["listdir"]:
                return [name for name in found if self._is_visible(os.path.join(base, name))]
            return _Entries([entry for entry in found if self._is_visible(os.path.join(base, entry.name))])

        return call

    def _moving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any) -> None:
            self._check(self._below(source))
            original(source, target)
            before, after = self._below(source), self._below(target)
            if before is not None and after is not None:
                moved = {path for path in self._known if path == before or path.startswith(before + "/")}
                self._known = (self._known - moved) | {after + path[len(before) :] for path in moved | {before}}

        return call

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **kwargs: Any) -> None:
            with suppress(FileExistsError):
                self._check(self._below(os.path.dirname(os.path.abspath(path))))
            original(path, *args, **kwargs)
            if (below := self._below(path)) is not None:
                self._known.add(below)

        return call


class _Entries(list[Any]):  # what scandir gives
    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None: ...
