"""Make one chosen call of a save fail, without a compiler and without knowing who makes the call.

While an ``Interposer`` is installed, every call of this process that changes something below its root, and every sync,
passes through it: those of the os module, renameat2, and the writes of Python's own file objects.
They are counted from 1; one of them, or all from one on, can be cut short, fail with an errno or kill the process. What
succeeded can be recorded. Reads and locks pass; an opening for reading counts where the process survives the fault.
Several threads may make calls, one after the other.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import io
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

FaultKind = Literal["none", "kill", "half", "errno", "sticky", "short", "short from on", "full"]

# Calls of descriptors, and where the path is among the arguments of others; for a link, the second one is what changes.
_OF_DESCRIPTORS = ("write", "pwrite", "posix_fallocate", "truncate", "ftruncate", "fsync", "fdatasync")
_OF_PATHS = {"unlink": 0, "remove": 0, "rmdir": 0, "mkdir": 0, "rename": 0, "replace": 0, "symlink": 1}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
READING = "open-to-read"  # counts where the fault is survivable
_EXCHANGE = 2  # flag of renameat2
_FROM_ON = ("sticky", "short from on", "full")
WRITES = ("write", "pwrite")
_TAKING_SPACE = (*WRITES, "posix_fallocate", "open", "mkdir", "symlink")


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at call ``number``.

    Nothing, SIGKILL before it or after half a write, an error, a shorter write; or the disk is full in the middle of
    it, so that nothing more takes space from there on.
    """

    kind: FaultKind = "none"
    number: int = 0
    errno: int = 0

    def hits(self, number: int) -> bool:
        """Whether call ``number`` is concerned."""
        return number == self.number or (self.kind in _FROM_ON and number > self.number > 0)

    @property
    def survivable(self) -> bool:
        """Whether the process lives on."""
        return self.kind in ("errno", "short", *_FROM_ON)


NO_FAULT = Fault()


@dataclass(frozen=True, slots=True)
class Change:  # a call that succeeded; paths are relative to the root. Clocks of all processes of a host are one
    at_ns: int
    name: Literal["create", "write", "truncate", "sync", "move", "exchange", "symlink", "remove", "mkdir"]
    path: str
    other: str = ""
    offset: int = 0
    data: bytes = b""


class Interposer:  # counts the calls below ``root``, injects ``fault`` and records what was done. Use it as a context
    def __init__(self, root: str, fault: Fault = NO_FAULT, *, record: bool = False, exchange: bool = True) -> None:
        self._root, self._fault, self._recording = os.path.abspath(root), fault, record
        self._exchange = exchange  # else renameat2 says what it says on file systems that cannot exchange names
        self.calls: list[str] = []
        """The name of every call, and its path."""
        self.changes: list[Change] = []
        self._originals: list[tuple[Any, str, Any]] = []
        self._counting = threading.Lock()

    def __enter__(self) -> Interposer:
        for name in (*_OF_DESCRIPTORS, *_OF_PATHS):
            self._replace(os, name, self._around(name, getattr(os, name)))
        self._replace(os, "open", self._opening(os.open))
        self._replace(ctypes, "CDLL", self._loading(ctypes.CDLL))
        opening = self._opening_file(io.open)
        self._replace(io, "open", opening)
        self._replace(builtins, "open", opening)
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, original in reversed(self._originals):
            setattr(module, name, original)
        self._originals.clear()

    def _replace(self, module: Any, name: str, new: Any) -> None:
        self._originals.append((module, name, getattr(module, name)))
        setattr(module, name, new)

    # ── which calls ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _inside(self, path: Any, dir_fd: int | None = None) -> str | None:
        """A path or the file of a descriptor, relative to the root; None if it is elsewhere."""
        if isinstance(path, int):
            found = os.readlink(f"/proc/self/fd/{path}")
        else:
            base = os.getcwd() if dir_fd is None else os.readlink(f"/proc/self/fd/{dir_fd}")
            found = os.path.normpath(os.path.join(base, os.fsdecode(path)))
        if found == self._root:
            return "."
        return found[len(self._root) + 1 :] if found.startswith(self._root + "/") else None

    def _around(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        place = _OF_PATHS.get(name, 0)

        def call(*args: Any, **kwargs: Any) -> Any:
            path = self._inside(args[place], _directory(kwargs))
            if path is None:
                return original(*args, **kwargs)
            if name in _OF_DESCRIPTORS:
                return self.of_descriptor(name, args[place], path, original, args, kwargs)
            names = [os.fsdecode(p) for p in args[:2] if isinstance(p, str | bytes | os.PathLike)]
            self._count(name, path, names)
            result = original(*args, **kwargs)
            self._record_path(name, path, args, kwargs)
            return result

        return call

    def _opening(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
            inside = self._inside(path, kwargs.get("dir_fd"))
            writing = bool(flags & _WRITING)
            if inside is None or not (writing or self._fault.survivable):
                return original(path, flags, *args, **kwargs)
            self._count("open" if writing else READING, inside, [os.fsdecode(path)])
            file = original(path, flags, *args, **kwargs)
            if writing:
                self._record("create", inside, data=b"empty" if flags & os.O_TRUNC else b"")
            return file

        return call

    def _loading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: _Library(self, original(*args, **kwargs))

    def renameat2(self, original: Callable[..., int], args: tuple[int, bytes, int, bytes, int]) -> int:
        """The system call, as ctypes makes it: -1 and an errno where it fails."""
        _, a, _, b, flags = args
        path, other = self._inside(a), self._inside(b)
        if path is None or other is None:
            return original(*args)
        try:
            self._count("renameat2", path, [])
            if not self._exchange and flags == _EXCHANGE:
                raise OSError(errno.EINVAL, "")
        except OSError as error:
            ctypes.set_errno(error.errno or 0)
            return -1
        result = original(*args)
        if result == 0:
            self._record("exchange" if flags == _EXCHANGE else "move", path, other)
        return result

    def _opening_file(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", buffering: int = -1, *args: Any, **kwargs: Any) -> Any:
            if not set(mode) & set("wax+") or self._inside(file) is None:
                return original(file, mode, buffering, *args, **kwargs)
            raw = _CountedFile(self, file, mode.replace("b", "").replace("t", ""), kwargs.pop("closefd", True))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **kwargs)

        return call

    # ── what happens ────────────────────────────────────────────────────────────────────────────────────────────────

    def _count(self, name: str, path: str, names: list[str]) -> bool:
        """Count a call that is about to be made, and let the fault act; True if a write is to be cut short."""
        fault = self._fault
        with self._counting:  # threads share a call's work
            self.calls.append(f"{name} {path}")
            hit = fault.hits(len(self.calls))
            first = len(self.calls) == fault.number
        if not hit or (fault.kind == "full" and name not in _TAKING_SPACE):
            return False
        if fault.kind == "kill" or (fault.kind == "half" and name not in WRITES):
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind in ("errno", "sticky") or (fault.kind == "full" and not (first and name in WRITES)):
            filenames = [names[0], None, names[1]] if len(names) > 1 else names
            raise OSError(fault.errno, os.strerror(fault.errno), *filenames)
        return name in WRITES

    def of_descriptor(
        self, name: str, file: Any, path: str, original: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Make a call on an open file, as a whole, in part, or not at all."""
        if self._count(name, path, []):
            data = memoryview(args[1])  # as aligned as it was
            half = max(len(data) // 2, min(0 if self._fault.kind == "half" else 1, len(data)))
            args = args[0], data[:half], *args[2:]
        begin = 0
        if self._recording and name in WRITES:
            begin = args[-1] if name.startswith("p") else os.lseek(file, 0, os.SEEK_CUR)
        try:
            result = original(*args, **kwargs)
        finally:  # half of a direct write may be refused
            if name in WRITES and self._fault.kind == "half" and self._fault.hits(len(self.calls)):
                os.kill(os.getpid(), signal.SIGKILL)
        if name in WRITES and self._recording:
            self._record("write", path, offset=begin, data=_content(file, begin, result))
        elif name in ("fsync", "fdatasync"):
            self._record("sync", path)
        elif name in ("truncate", "ftruncate", "posix_fallocate"):
            self._record("truncate", path, offset=os.stat(file).st_size)
        return result

    def _record_path(self, name: str, path: str, args: Any, kwargs: Any) -> None:
        if name in ("rename", "replace"):
            self._record("move", path, self._inside(args[1], kwargs.get("dst_dir_fd")) or "")
        elif name == "symlink":
            self._record("symlink", path, os.fsdecode(args[0]))
        else:
            self._record("mkdir" if name == "mkdir" else "remove", path)

    def _record(self, name: Any, path: str, other: str = "", *, offset: int = 0, data: bytes = b"") -> None:
        if self._recording:
            self.changes.append(Change(time.monotonic_ns(), name, path, other, offset, data))


class _Library:  # the C library with a renameat2 that an interposer counts
    def __init__(self, interposer: Interposer, original: Any) -> None:
        self._interposer, self._original = interposer, original

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._original, name)
        if name != "renameat2":
            return function
        return lambda *args: self._interposer.renameat2(function, args)


class _CountedFile(io.FileIO):  # a file of Python's own whose calls an interposer counts
    def __init__(self, interposer: Interposer, path: Any, mode: str, closefd: bool) -> None:
        self._interposer = interposer
        if not isinstance(path, int):  # opened here, so that it is counted, and once
            how = {"x": os.O_CREAT | os.O_EXCL, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "r": 0}
            flags = how[mode[0]] | (os.O_RDWR if "+" in mode else os.O_WRONLY)
            path = os.open(path, flags | os.O_CLOEXEC, 0o666)
        super().__init__(path, mode, closefd)

    def write(self, data: Any) -> int:
        file = self.fileno()
        path = self._interposer._inside(file)

        def write(_: int, part: Any) -> int:
            return io.FileIO.write(self, part)

        if path is None:
            return write(file, data)
        count: int = self._interposer.of_descriptor("write", file, path, write, (file, data), {})
        return count


def _directory(kwargs: dict[str, Any]) -> int | None:
    return kwargs["dir_fd"] if kwargs.get("dir_fd") is not None else kwargs.get("src_dir_fd")


def _content(file: int, begin: int, count: int) -> bytes:
    reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    try:
        return os.pread(reading, count, begin)
    finally:
        os.close(reading)
