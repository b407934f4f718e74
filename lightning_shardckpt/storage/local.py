"""Checkpoints as directories of a file system that renames atomically.

A save fills a sibling directory ``.tmp-<save id>`` and exchanges it with the target in one system call, so that the
path always holds a whole checkpoint, old or new. Where the file system cannot exchange two names (some network file
systems), the old directory is first renamed to ``.old-<hash of its name>``; a reader that finds nothing at the path
looks there. Names of temporaries contain neither "ckpt_" nor end in ".ckpt": Lightning scans for both.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterable
from contextlib import suppress

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.header import checksum
from lightning_shardckpt.index import ROOT_NAME
from lightning_shardckpt.storage.protocol import Bytes

_BATCH_PARTS, _BATCH_BYTES = 512, 32 << 20  # of one writev call; Linux takes at most 1,024 parts and 2 GiB
_OPEN_FILES = 64  # of one reader; a process may often have 1,024
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


class LocalStorage:
    """Directories on a local or shared POSIX file system."""

    def open(self, path: str) -> LocalReader:
        """The checkpoint at ``path``, or the one that an interrupted save moved aside from there.

        Raises:
            CheckpointNotFoundError: if there is none, if it is incomplete, or if the path is something else.
        """
        path = _or_aside(_checked(path))
        if os.path.islink(path) and not os.path.exists(path):
            raise CheckpointNotFoundError(
                f"no checkpoint at {path!r}: it is a link to {os.readlink(path)!r}, which is gone"
            )
        if not os.path.exists(path):
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: there is nothing at this path")
        if not os.path.isdir(path):
            raise CheckpointNotFoundError(f"{path!r} is a file, not a checkpoint directory of lightning-shardckpt")
        if not os.path.exists(os.path.join(path, ROOT_NAME)):
            raise CheckpointNotFoundError(_why_incomplete(path))
        return LocalReader(path)

    def draft(self, path: str, save_id: str) -> LocalDraft:
        """A new checkpoint that will appear at ``path``."""
        return LocalDraft(_checked(path), save_id)

    def remove(self, path: str) -> None:
        """Delete the checkpoint (or the link to one) at ``path``; nothing else is ever deleted.

        The directory is renamed first, so that no half-deleted checkpoint is ever seen at the path.

        Raises:
            CheckpointNotFoundError: if what is there is no checkpoint.
        """
        path = _checked(path)
        if os.path.islink(path):
            os.unlink(path)
            return
        self.open(path).close()
        doomed = os.path.join(os.path.dirname(path), f".tmp-deleted-{checksum(os.fsencode(path))}-{os.getpid()}")
        if os.path.lexists(path):
            _remove(_aside(path))  # what a save left behind that ended too early; else it would be found next
        os.rename(_or_aside(path), doomed)
        _sync_directory(os.path.dirname(path))
        shutil.rmtree(doomed)


def _checked(path: str) -> str:
    path = os.fspath(path)
    if "://" in path and not path.startswith("file://"):
        raise ValueError(f"{path!r}: only paths of a file system are supported, not URLs")
    return os.path.abspath(path.removeprefix("file://"))


def _aside(path: str) -> str:
    """Where an old checkpoint waits while the new one takes its name."""
    return os.path.join(os.path.dirname(path), f".old-{checksum(os.fsencode(os.path.basename(path)))}")


def _or_aside(path: str) -> str:
    aside = _aside(path)
    return aside if not os.path.lexists(path) and os.path.exists(os.path.join(aside, ROOT_NAME)) else path


def _why_incomplete(path: str) -> str:
    if os.path.exists(os.path.join(path, ".metadata")):
        return f"{path!r} is a checkpoint of torch.distributed.checkpoint, not of lightning-shardckpt"
    inside = sorted(os.listdir(path))
    near = [n for n in inside if os.path.exists(os.path.join(path, n, ROOT_NAME))]
    hint = f"; did you mean {os.path.join(path, near[0])!r}?" if near else ""
    return f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}{hint}"


class LocalReader:
    """A checkpoint directory; files are opened relative to its descriptor, regular ones only, no links."""

    def __init__(self, path: str) -> None:
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._files: dict[str, int] = {}

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return os.fstat(self._file(name)).st_size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""
        file, done = self._file(name), 0
        while done < len(target):
            count = os.preadv(file, [target[done:]], offset + done)
            if count == 0:
                raise EOFError(f"{name} ends at byte {offset + done}, expected {offset + len(target)}")
            done += count

    def names(self) -> list[str]:
        """Every entry of the directory, sorted."""
        return sorted(os.listdir(self._directory))

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            os.close(file)
        self._files.clear()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _file(self, name: str) -> int:
        if name in self._files:
            self._files[name] = self._files.pop(name)  # the last one used is the last one closed
            return self._files[name]
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            file = os.open(name, flags, dir_fd=self._directory)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise FormatError(f"{name} is a link or a socket; a checkpoint holds regular files only") from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise FormatError(f"{name} is not a regular file")
        if len(self._files) >= _OPEN_FILES:
            os.close(self._files.pop(next(iter(self._files))))
        self._files[name] = file
        return file


class LocalDraft:
    """A ``.tmp-<save id>`` directory beside the target."""

    def __init__(self, target: str, save_id: str) -> None:
        self._target, self._parent = target, os.path.dirname(target)
        self._directory = os.path.join(self._parent, f".tmp-{save_id}")

    def begin(self) -> None:
        """Make the directory.

        Raises:
            FileExistsError: if the target exists and is neither a checkpoint of ours nor an empty directory.
        """
        self._check_target()
        _make_directories(self._parent)
        os.mkdir(self._directory)

    def _check_target(self) -> None:
        if not os.path.lexists(self._target):
            return
        if os.path.islink(self._target):  # such as ModelCheckpoint's "last": the link is replaced, not what it names
            return
        if not os.path.isdir(self._target):
            raise FileExistsError(
                f"a file is in the way at {self._target!r}: a sharded checkpoint is a directory; move it or use "
                "another path"
            )
        if os.listdir(self._target) and not os.path.exists(os.path.join(self._target, ROOT_NAME)):
            raise FileExistsError(
                f"the directory {self._target!r} is not empty and holds no checkpoint of ours, so it is not replaced; "
                "move it or use another path"
            )

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new file and sync it, and its entry in the directory."""
        path = os.path.join(self._directory, name)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            batch: list[Bytes] = []
            size = 0
            for part in parts:
                batch.append(part)
                size += len(part)
                if len(batch) >= _BATCH_PARTS or size >= _BATCH_BYTES:
                    _write_all(file, batch)
                    batch, size = [], 0
            _write_all(file, batch)
            os.fsync(file)
        except OSError as error:
            error.filename = error.filename or path
            raise
        finally:
            os.close(file)
        _sync_directory(self._directory)

    def publish(self) -> None:
        """Exchange the directory with the target (or rename it there), sync the parent, remove the old one."""
        self._check_target()
        if not os.path.lexists(self._target):
            os.rename(self._directory, self._target)
            _sync_directory(self._parent)
            _remove(_aside(self._target))
            return
        if _exchange(self._directory, self._target):
            _sync_directory(self._parent)
            _remove(self._directory)
            return
        aside = _aside(self._target)
        _remove(aside)
        os.rename(self._target, aside)
        os.rename(self._directory, self._target)
        _sync_directory(self._parent)
        _remove(aside)

    def discard(self) -> None:
        """Remove the directory, as far as that is possible: what failed before is worth more than what fails here."""
        shutil.rmtree(self._directory, ignore_errors=True)


def _remove(directory: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(directory) if os.path.islink(directory) else shutil.rmtree(directory)


def _write_all(file: int, parts: list[Bytes]) -> None:
    views = [memoryview(part) for part in parts if len(part)]
    while views:
        count = os.writev(file, views[:_BATCH_PARTS])
        while views and count >= len(views[0]):
            count -= len(views.pop(0))
        if count:
            views[0] = views[0][count:]


def _make_directories(path: str) -> None:
    """Like ``os.makedirs``, and durable."""
    missing = []
    while not os.path.lexists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for name in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(name)
        _sync_directory(os.path.dirname(name))


def _sync_directory(path: str) -> None:
    directory = os.open(path or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _exchange(a: str, b: str) -> bool:
    """Swap two names atomically; False where the system or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, f"exchanging {a!r} and {b!r}: {os.strerror(code)}")
