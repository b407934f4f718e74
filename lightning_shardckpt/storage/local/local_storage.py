"""Checkpoints as directories of a file system with atomic renames.

A save fills a temporary sibling directory and exchanges it with the target in one system call, so that the path always
holds a whole checkpoint, old or new. If the file system cannot exchange two names (some network file systems), the old
directory is first renamed to ``.old-<hash of its name>``; a reader that finds nothing at the path looks there.
Names of temporaries neither contain "ckpt_" nor end in ".ckpt", since Lightning scans for both. A reader locks the
directory that it reads; if a save replaces it meanwhile, a later save deletes it.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local import leftovers
from lightning_shardckpt.storage.local.leftovers import check_replaceable
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.local.posix import (
    EXCHANGE,
    POSIX,
    FileSystem,
    errors_with_path,
    make_and_open,
    make_directories,
    sync_directory,
    write_durably,
    write_parts,
)
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.tuning import TUNING, Tuning

_ATTEMPTS = 20  # for operations that fail if another process replaces the path meanwhile
_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class LocalStorage:
    """Directories on a local or shared POSIX file system.

    Args:
        visible_within_s: the time within which a network file system shows a machine the changes of another.
        sync_files: make files durable before a call returns. Without syncs, a process may still die at any moment, but
            after a crash of the machine neither the old nor the new checkpoint may be left.
        file_system: the file system's calls.
        tuning: buffer sizes, and timeouts for other processes.
    """

    def __init__(
        self,
        visible_within_s: float = 60.0,
        *,
        sync_files: bool = True,
        file_system: FileSystem = POSIX,
        tuning: Tuning = TUNING,
    ) -> None:
        self.visible_within_s, self.sync_files = visible_within_s, sync_files
        self._file_system, self._tuning = file_system, tuning

    def open(self, path: str) -> LocalReader:
        """Open the checkpoint at ``path``, or the one that an interrupted save moved aside.

        Raises:
            CheckpointNotFoundError: if there is none, or it is incomplete or not a checkpoint.
        """
        path = _absolute_path(path)
        for attempt in range(_ATTEMPTS):
            current = _path_or_aside(path)
            try:
                self._check(current)
                reader = LocalReader(current)
            except FileNotFoundError as error:
                if os.path.exists(os.path.join(_path_or_aside(path), ROOT_NAME)):
                    continue  # replaced between two of these lines
                if isinstance(error, CheckpointNotFoundError):
                    raise
                raise CheckpointNotFoundError(f"no checkpoint at {path!r}: it was removed just now") from None
            if reader.lock_against_deletion(current) or (attempt == _ATTEMPTS - 1 and reader.is_at(current)):
                return reader
            reader.close()
            time.sleep(_PAUSE_S)
        raise CheckpointNotFoundError(f"the checkpoint at {path!r} is replaced faster than it can be opened")

    def _check(self, path: str) -> None:
        if os.path.exists(os.path.join(path, ROOT_NAME)):
            return
        if os.path.islink(path) and not os.path.exists(path):
            raise CheckpointNotFoundError(
                f"no checkpoint at {path!r}: it is a link to {os.readlink(path)!r}, which is gone"
            )
        if not os.path.exists(path):
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: there is nothing at this path")
        raise CheckpointNotFoundError(f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}")

    def draft(self, path: str, save_id: str) -> LocalDraft:
        """Return a draft of a checkpoint that will appear at ``path``."""
        path = _absolute_path(path)
        return LocalDraft(path, save_id, self, file_system=self._file_system, tuning=self._tuning)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint, or the link to one, at ``path``; nothing else is ever deleted.

        The directory is renamed first, so that the path never holds a half-deleted checkpoint. If it cannot be deleted
        after that, or a process is still reading it, the next save in the same folder deletes it.

        Returns:
            Notes about failures after the rename.

        Raises:
            CheckpointNotFoundError: if no checkpoint is at the path.
        """
        path = _absolute_path(path)
        if os.path.islink(path):
            os.unlink(path)
            return []
        self.open(path).close()
        notes = list[str]()
        if os.path.lexists(path) and os.path.lexists(leftovers.aside_name(path)):
            # left by an interrupted save; readers would find it as soon as the path is empty
            notes += leftovers.trash_replaced(leftovers.aside_name(path)).delete()
        try:
            trash = leftovers.move_to_trash(_path_or_aside(path))
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: another process removed it just now") from None
        try:
            if self.sync_files:
                sync_directory(os.path.dirname(path))
        except BaseException:
            trash.keep()
            raise
        return notes + trash.delete()


def _absolute_path(path: str) -> str:
    path = os.fspath(path)
    if "://" in path and not path.startswith(("file://", "local://")):
        raise ValueError(f"{path!r}: only paths of a file system are supported, not URLs")
    return os.path.abspath(path.removeprefix("file://").removeprefix("local://"))  # abspath drops a trailing slash


def _path_or_aside(path: str) -> str:
    aside = leftovers.aside_name(path)
    return aside if not os.path.lexists(path) and os.path.exists(os.path.join(aside, ROOT_NAME)) else path


class LocalDraft:
    """A draft in a temporary directory next to the target."""

    prefix = ""

    def __init__(
        self, target: str, save_id: str, storage: LocalStorage, *, file_system: FileSystem, tuning: Tuning
    ) -> None:
        self._target, self._parent = target, os.path.dirname(target)
        self._directory = leftovers.temporary_name(target, save_id)
        self._visible_within_s, self._sync_files = storage.visible_within_s, storage.sync_files
        self._file_system, self._tuning = file_system, tuning
        self._seen = False
        self._claim: leftovers.Claim | None = None
        self.notes: list[str] = []

    def begin(self) -> None:
        """Create the directory, and delete leftovers of killed saves.

        Raises:
            FileExistsError: if the target exists and is neither a checkpoint of ours nor an empty directory, or if
                another process is saving to it.
        """
        check_replaceable(self._target)
        make_directories(self._parent, sync=self._sync_files)
        check_replaceable(self._target)  # again, since a name's length is only checked if its parent exists
        self._claim = leftovers.claim(self._target, self._directory, make_and_open, self._file_system, self._tuning)
        self._seen = True
        self.notes += self._claim.notes

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new file; sync it and its entry in the directory, unless syncs are disabled."""
        with self._create(name) as file:
            if self._sync_files:
                write_durably(file, parts, self._tuning.writeback_bytes)
            else:
                write_parts(file, parts)

    @contextmanager
    def _create(self, name: str) -> Iterator[int]:
        path = os.path.join(self._directory, name)
        file = _open_new(path, None if self._seen else self._visible_within_s)
        self._seen = True
        try:
            with errors_with_path(path):
                yield file
        finally:
            os.close(file)
        self._sync(self._directory)

    def publish(self) -> None:
        """Exchange the directory with the target (or rename it to the target), sync the parent, delete the old one."""
        for attempt in range(_ATTEMPTS):
            check_replaceable(self._target)
            try:
                old = self._swap()
                break
            except OSError as error:  # another process may have removed or created the target meanwhile
                is_conflict = error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
                if not is_conflict or attempt == _ATTEMPTS - 1 or not os.path.lexists(self._directory):
                    raise
        self._release()  # the old one may now have the draft's name: if the next line fails, nothing may be deleted
        replaced = [path for path in (old, leftovers.aside_name(self._target)) if path and os.path.lexists(path)]
        trash = [leftovers.trash_replaced(path) for path in replaced]
        try:
            self._sync(self._parent)
        except BaseException:
            for item in trash:
                item.keep()
            raise
        for item in trash:
            self.notes += item.delete()

    def _swap(self) -> str | None:
        """Move the directory to the target; return the new path of the old checkpoint, if there was one."""
        link = os.path.islink(self._target)
        if not link and not (os.path.isdir(self._target) and os.listdir(self._target)):
            os.rename(self._directory, self._target)  # the target is missing or an empty directory
            return None
        if self._file_system.rename_with_flag(self._directory, self._target, EXCHANGE):
            return self._directory
        if not os.path.exists(self._target):
            os.unlink(self._target)  # a dangling link; the old checkpoint, if there is one, is at the aside name
            os.rename(self._directory, self._target)
            return None
        aside = leftovers.aside_name(self._target)
        if os.path.lexists(aside):
            self.notes += leftovers.trash_replaced(aside).delete()
        os.rename(self._target, aside)
        try:
            os.rename(self._directory, self._target)
        except OSError:
            with suppress(OSError):  # readers also find it at the aside name
                os.rename(aside, self._target)
            raise
        return aside

    def discard(self) -> None:
        """Delete the directory as far as possible. Never raises, so that an earlier error is not hidden."""
        if self._claim is not None:
            leftovers.delete(self._directory)
            self._release()

    def _sync(self, directory: str) -> None:
        if self._sync_files:
            sync_directory(directory)

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()
            self._claim = None


def _open_new(path: str, visible_within_s: float | None) -> int:
    """Create and open a file; wait first until this machine sees its directory."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_EXCL
    directory, pause = os.path.dirname(path), _PAUSE_S
    deadline = time.monotonic() + (visible_within_s or 0.0)
    while True:
        try:
            return os.open(path, flags, 0o666)
        except OSError as error:
            if visible_within_s is None or error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            if time.monotonic() >= deadline:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"the machine {os.uname().nodename!r} does not see this directory, which rank 0 made at least "
                    f"{visible_within_s:g} s ago; the path must be on a file system that all ranks share",
                    directory,
                ) from None
        with suppress(OSError):
            os.listdir(os.path.dirname(directory))  # makes a network file system refresh its cache
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
