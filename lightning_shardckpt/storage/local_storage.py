"""Checkpoints as directories of a file system.

A save fills a temporary directory beside the target, with the mode, owner and group of the directory that is there, and
exchanges the two in one system call, so that the path always holds a whole checkpoint, old or new. Or it fills the
directory that is there: an empty or current one, a mount point, one whose parent cannot be written or whose owner
cannot be kept, an older checkpoint where the file system cannot exchange two names (some network file systems), and a
checkpoint that was filled in place. Then names begin with the save's id, as in an object store, and the root index
alone is in the temporary directory, which is in the target, and renamed last. Once that is durable, what was there is
deleted. Names of temporaries neither contain "ckpt_" nor end in ".ckpt", since Lightning scans for both.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import closing, suppress
from functools import lru_cache
from uuid import uuid4
from weakref import finalize

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.format.index import (
    EXPORT_FOLDER,
    HEAD_BYTES,
    PREFIXED_NAME,
    ROOT_NAME,
    is_ours,
    prefix_of,
    read_prefix,
)
from lightning_shardckpt.storage import local_files
from lightning_shardckpt.storage.local_files import Temporary
from lightning_shardckpt.storage.protocol import Bytes, names_of_save, names_to_remove

OPEN_FILES = 64  # per reader; the usual limit of a process is 1,024
_LOOK_AGAIN_S = 0.1
_UNFINISHED = (PREFIXED_NAME, local_files.TEMPORARY_NAME)  # of saves that fill a directory


class LocalStorage:
    """Directories on a local or shared POSIX file system.

    Without ``sync_files``, after a crash of the machine, not of a process, no whole checkpoint may be left.
    """

    visible_within_s = 60.0  # on a network file system

    def __init__(self, *, sync_files: bool = True) -> None:
        self.sync_files = sync_files

    def open(self, path: str) -> LocalReader:
        path = os.path.abspath(path)
        while True:
            with suppress(FileNotFoundError, NotADirectoryError):
                return LocalReader(path, is_checkpoint=True)
            if not os.path.exists(os.path.join(path, ROOT_NAME)):  # else a save has replaced the directory meanwhile
                if os.path.exists(path):
                    raise CheckpointNotFoundError(f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}")
                raise CheckpointNotFoundError(f"no checkpoint at {path!r}: there is nothing at this path")

    def draft(self, path: str, save_id: str) -> LocalDraft:
        return LocalDraft(self, os.path.abspath(path), save_id)

    def remove(self, path: str) -> list[str]:
        # renamed first, so that the path never holds a half-deleted one; the next save beside it deletes what stays
        path = os.path.abspath(path)
        if os.path.islink(path):
            os.unlink(path)
            return []
        with closing(self.open(path)) as reader:
            names, folder = os.listdir(path), os.path.dirname(path)
        if _is_filled_in_place(path, names):
            _delete_export(path)
            os.unlink(os.path.join(path, ROOT_NAME))
            folder, deleted = path, [os.path.join(path, name) for name in names_to_remove(names, reader.prefix)]
        else:
            deleted = [local_files.temporary_path(path, uuid4().hex, folder)]
            os.rename(path, deleted[0])
        if self.sync_files:
            local_files.sync_directory(folder)
        return local_files.delete_all(deleted, f"all files of the deleted checkpoint {path!r}")


class LocalDraft:
    """A draft beside the target or in it, as ``begin`` decides; other ranks find out when they write."""

    def __init__(self, storage: LocalStorage, target: str, save_id: str) -> None:
        self._target, self._save_id, self._storage = target, save_id, storage
        self._temporary: str | None = None  # its path, once this rank knows it
        self._new: Temporary | None = None  # on the rank that begins
        self._written, self.prefix, self.notes = set[str](), "", list[str]()

    def begin(self) -> None:
        target = self._target
        is_there, is_link = os.path.lexists(target), os.path.islink(target)  # a link is replaced, not filled
        names = os.listdir(target) if is_there and not is_link else []
        foreign = [name for name in names if not any(pattern.fullmatch(name) for pattern in _UNFINISHED)]
        if foreign and ROOT_NAME not in names:
            raise FileExistsError(
                f"the directory {target!r} is not empty and holds no checkpoint of this package, so it is not "
                "replaced; move it or use another path"
            )
        if not is_there or is_link or not _is_filled_in_place(target, names):
            local_files.make_directories(os.path.dirname(target), sync=self._storage.sync_files)
            new, can_replace = Temporary(target, self._save_id), False
            try:
                keeps_owner = local_files.keep_owner_and_mode(target, new.path, writable=True)
                can_replace = keeps_owner and (not is_there or is_link or _can_exchange(new.path))
            finally:
                error = None if can_replace else new.drop()
            if error is not None:  # no save that fills the target would delete it
                with local_files.errors_with_path(new.path):
                    raise error
            self._new = new if can_replace else None
        self._new = self._new or Temporary(target, self._save_id, target)
        self.notes = self._new.notes
        self._use(self._new.path)

    def _use(self, temporary: str) -> None:
        self._temporary = temporary
        if os.path.dirname(temporary) == self._target:
            self.prefix = prefix_of(self._save_id)

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        directory, stored = self._temporary or self._find(), name
        if self.prefix and name != ROOT_NAME:
            directory, stored = self._target, self.prefix + name
        local_files.write_file(os.path.join(directory, stored), parts, sync=self._storage.sync_files)
        if self._storage.sync_files:
            local_files.sync_directory(directory)
        if name != ROOT_NAME:
            self._written.add(stored)

    def _find(self) -> str:
        """Return the temporary directory that ``begin`` made; wait until this machine sees it."""
        deadline, parent = time.monotonic() + self._storage.visible_within_s, os.path.dirname(self._target)
        start = local_files.temporary_name(self._target, self._save_id)
        while True:
            for folder in (self._target, parent):
                with suppress(OSError):  # listing makes a network file system refresh its cache
                    for name in os.listdir(folder):
                        if name.startswith(start):
                            self._use(os.path.join(folder, name))
                            return os.path.join(folder, name)
            if time.monotonic() >= deadline:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"the machine {os.uname().nodename!r} does not see this directory, which rank 0 made at least "
                    f"{self._storage.visible_within_s:g} s ago; the path must be on a file system that all ranks share",
                    os.path.join(parent, start),
                )
            time.sleep(_LOOK_AGAIN_S)

    def publish(self) -> None:
        new, target, replaced = self._new, self._target, list[str]()
        assert new is not None
        root = os.path.join(target, ROOT_NAME)
        if not self.prefix:
            new.move(target, replaces=os.path.islink(target) or os.path.lexists(root))
        else:
            names = [name for name in os.listdir(target) if is_ours(name)]
            if missing := sorted(self._written - set(names)):
                raise FileExistsError(
                    f"another process saved to {target!r} since this save began, and deleted {missing[0]} of it; let "
                    "each job save to paths of its own"
                )
            if os.path.lexists(root):
                _delete_export(target)
            os.rename(os.path.join(new.path, ROOT_NAME), root)
            kept = (self.prefix, *map(prefix_of, new.living))
            replaced = [os.path.join(target, name) for name in names if not name.startswith(kept)]
        new.publish(replaced, sync=self._storage.sync_files)

    def discard(self) -> None:
        if self._new is not None and self._new.is_held:
            with suppress(OSError):
                for name in os.listdir(self._target) if self.prefix else ():
                    if name.startswith(self.prefix):
                        local_files.delete(os.path.join(self._target, name))
            self._new.drop()


def _can_exchange(folder: str) -> bool:
    """Return True if the file system of an empty directory exchanges two names."""
    names = os.path.join(folder, "1"), os.path.join(folder, "2")
    for name in names:
        os.mkdir(name)
    is_possible = local_files.exchange(*names)
    for name in names:
        os.rmdir(name)
    return is_possible


def _is_filled_in_place(target: str, names: list[str]) -> bool:
    """Return True if a directory with these names is filled in place on any file system."""
    return (
        ROOT_NAME not in names
        or any(map(PREFIXED_NAME.fullmatch, names))
        or os.path.ismount(target)
        or not os.access(os.path.dirname(target), os.W_OK | os.X_OK, effective_ids=True)
        or (os.path.exists(os.curdir) and os.path.samefile(target, os.curdir))
    )


def _delete_export(directory: str) -> None:
    """Delete an export, which must not outlive its root index. Raises OSError."""
    if (error := local_files.delete(os.path.join(directory, EXPORT_FOLDER))) is not None:
        raise error


class LocalReader:
    """Reader of a directory, which opens only regular files, relative to the directory's descriptor, not the path.

    Args:
        path: of the directory; a FileNotFoundError if it is missing, or with ``is_checkpoint`` the root index in it.
        follow_links: don't refuse symbolic links, for other programs' directories: Hugging Face's cache has links.
        is_checkpoint: it may have been filled in place, and another checkpoint may replace it.
        fetch: called with the name of a file before it is opened.
    """

    high_latency = False

    def __init__(
        self,
        path: str,
        *,
        follow_links: bool = False,
        is_checkpoint: bool = False,
        fetch: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._path, self._follow_links, self._fetch, self.prefix = path, follow_links, fetch, ""
        self._directory = _OpenFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._root = os.stat(ROOT_NAME, dir_fd=self._directory.descriptor) if is_checkpoint else None
        self._file = lru_cache(OPEN_FILES)(self._open)  # one that is dropped is closed when no thread reads it
        if is_checkpoint:
            with suppress(FormatError):  # a link is reported when the root index is read
                self.prefix = read_prefix(os.pread(self._file(ROOT_NAME).descriptor, HEAD_BYTES, 0))

    def size(self, name: str) -> int:
        return os.fstat(self._file(name).descriptor).st_size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        file, left, at = self._file(name), target, offset
        while left:
            with local_files.errors_with_path(os.path.join(self._path, name)):
                count = os.preadv(file.descriptor, (left,), at)
            if count == 0:
                raise EOFError(f"{name} ends at byte {at}, expected {offset + len(target)}")
            left, at = left[count:], at + count

    def names(self) -> list[str]:
        return names_of_save(os.listdir(self._directory.descriptor), self.prefix)

    def close(self) -> None:
        self._file.cache_clear()
        self._directory.close()

    def _open(self, name: str) -> _OpenFile:
        stored = name if name == ROOT_NAME else self.prefix + name
        self._fetch(name)
        try:
            with local_files.errors_with_path(os.path.join(self._path, name)):
                mode = os.stat(stored, dir_fd=self._directory.descriptor, follow_symlinks=self._follow_links).st_mode
                if not stat.S_ISREG(mode):  # not even opened, since opening a device can act on it
                    raise FormatError(f"{name} is not a regular file; a checkpoint holds regular files only")
                links = 0 if self._follow_links else os.O_NOFOLLOW
                flags = os.O_RDONLY | links | os.O_NONBLOCK | os.O_CLOEXEC
                return _OpenFile(os.open(stored, flags, dir_fd=self._directory.descriptor))
        except FileNotFoundError:
            root = os.path.join(self._path, ROOT_NAME)
            if self._root is None or (os.path.exists(root) and os.path.samestat(self._root, os.stat(root))):
                raise
            text = f"the checkpoint at {self._path!r} was replaced or deleted while it was read: load again"
            raise OSError(errno.ESTALE, text) from None


class _OpenFile:
    """An open file, which is closed at the latest when no thread uses it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.close = descriptor, finalize(self, os.close, descriptor)
