"""Checkpoints as directories of a file system that renames atomically.

A save fills a temporary sibling directory and exchanges it with the target in one system call, so that the path always
holds a whole checkpoint, old or new. Where the file system cannot exchange two names (some network file systems), the
old directory is first renamed to ``.old-<hash of its name>``; a reader that finds nothing at the path looks there.
Names of temporaries contain neither "ckpt_" nor end in ".ckpt": Lightning scans for both. A reader locks the directory
that it reads, so what a save replaces meanwhile is deleted by a later one.
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
    make_and_open,
    make_directories,
    naming,
    sync_directory,
    write_at,
    write_durably,
    write_parts,
)
from lightning_shardckpt.storage.other_programs import other_program
from lightning_shardckpt.storage.protocol import Bytes, Reader
from lightning_shardckpt.system.tuning import TUNING, Tuning

_ATTEMPTS = 20  # of what another process can get in the way of, again and again
_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class LocalStorage:
    """Directories on a local or shared POSIX file system.

    Args:
        visible_within_s: how long a network file system may take to show one machine what another one made.
        sync_files: whether what returned is durable. Without syncs a process may still die at any moment, but after
            a crash of the machine neither the old nor the new checkpoint may be left.
        file_system: what it can do.
        tuning: sizes of buffers, and how long other processes are waited for.
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
        """The checkpoint at ``path``, or the one that an interrupted save moved aside from there.

        Raises:
            CheckpointNotFoundError: if there is none, if it is incomplete, or if the path is something else.
        """
        path = _absolute_path(path)
        for attempt in range(_ATTEMPTS):
            found = _or_aside(path)
            try:
                self._check(found)
                reader = LocalReader(found)
            except FileNotFoundError as error:
                if os.path.exists(os.path.join(_or_aside(path), ROOT_NAME)):
                    continue  # it was replaced between two of these lines
                if isinstance(error, CheckpointNotFoundError):
                    raise
                raise CheckpointNotFoundError(f"no checkpoint at {path!r}: it was removed just now") from None
            if reader.stays(found) or (attempt == _ATTEMPTS - 1 and reader.is_at(found)):
                return reader
            reader.close()
            time.sleep(_PAUSE_S)
        raise CheckpointNotFoundError(f"the checkpoint at {path!r} is replaced faster than it can be opened")

    def _check(self, path: str) -> None:
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

    def draft(self, path: str, save_id: str) -> LocalDraft:
        """A new checkpoint that will appear at ``path``."""
        path = _absolute_path(path)
        return LocalDraft(path, save_id, self, file_system=self._file_system, tuning=self._tuning)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint (or the link to one) at ``path``; nothing else is ever deleted.

        The directory is renamed first, so that no half-deleted checkpoint is ever seen at the path. What cannot be
        deleted then, or is still being read, is left to the next save beside it.

        Returns:
            What went wrong then, as sentences.

        Raises:
            CheckpointNotFoundError: if what is there is no checkpoint.
        """
        path = _absolute_path(path)
        if os.path.islink(path):
            os.unlink(path)
            return []
        self.open(path).close()
        notes = list[str]()
        if os.path.lexists(path) and os.path.lexists(leftovers.aside_name(path)):
            # of a save that ended too early; else it would be found next
            notes += leftovers.doom_replaced(leftovers.aside_name(path)).delete()
        try:
            doomed = leftovers.doom(_or_aside(path))
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: another process removed it just now") from None
        try:
            if self.sync_files:
                sync_directory(os.path.dirname(path))
        except BaseException:
            doomed.keep()
            raise
        return notes + doomed.delete()


def _absolute_path(path: str) -> str:
    path = os.fspath(path)
    if "://" in path and not path.startswith(("file://", "local://")):
        raise ValueError(f"{path!r}: only paths of a file system are supported, not URLs")
    return os.path.abspath(path.removeprefix("file://").removeprefix("local://"))  # without a slash at the end


def _or_aside(path: str) -> str:
    aside = leftovers.aside_name(path)
    return aside if not os.path.lexists(path) and os.path.exists(os.path.join(aside, ROOT_NAME)) else path


def _why_incomplete(path: str) -> str:
    inside = sorted(os.listdir(path))
    if (program := other_program(inside)) is not None:
        return f"{path!r} {program}"
    near = [n for n in inside if os.path.exists(os.path.join(path, n, ROOT_NAME))]
    hint = f"; did you mean {os.path.join(path, near[0])!r}?" if near else ""
    return f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}{hint}"


class LocalDraft:
    """A temporary directory beside the target."""

    prefix, can_link = "", True

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
        """Make the directory, and delete those of saves that were killed.

        Raises:
            FileExistsError: if the target exists and is neither a checkpoint of ours nor an empty directory, or if
                another process is saving to it.
        """
        check_replaceable(self._target)
        make_directories(self._parent, sync=self._sync_files)
        check_replaceable(self._target)  # a name that is too long is one only where its parent is there
        self._claim = leftovers.claim(self._target, self._directory, make_and_open, self._file_system, self._tuning)
        self._seen = True
        self.notes += self._claim.notes

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new file; sync it and its entry in the directory, unless syncs are left out."""
        with self._creating(name) as file:
            if self._sync_files:
                write_durably(file, parts, self._tuning.writeback_bytes)
            else:
                write_parts(file, parts)

    def write_pieces(self, name: str, pieces: Iterable[tuple[int, Bytes]]) -> None:
        """Write pieces of a file that ranks make together; sync it and its entry, unless syncs are left out."""
        with self._creating(name, shared=True) as file:
            for offset, data in pieces:
                write_at(file, memoryview(data), offset)
            if self._sync_files:
                os.fsync(file)

    def link(self, name: str, of: Reader, there: str) -> OSError | None:
        """Make a hard link; sync the file, since who wrote it may not have, and its entry, unless syncs are left out.

        Returns the error of a file system that doesn't link, or not this file; nothing is there then.
        """
        path = os.path.join(self._directory, name)
        if not isinstance(of, LocalReader):
            return OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
        try:
            file = of.link(there, path, self._file_system)
        except OSError as error:
            return error
        self._seen = True
        with naming(path):
            if self._sync_files:
                os.fsync(file)
        self._sync(self._directory)
        return None

    @contextmanager
    def _creating(self, name: str, *, shared: bool = False) -> Iterator[int]:
        path = os.path.join(self._directory, name)
        file = _create(path, None if self._seen else self._visible_within_s, shared=shared)
        self._seen = True
        try:
            with naming(path):
                yield file
        finally:
            os.close(file)
        self._sync(self._directory)

    def publish(self) -> None:
        """Exchange the directory with the target (or rename it there), sync the parent, remove the old one."""
        for attempt in range(_ATTEMPTS):
            check_replaceable(self._target)
            try:
                old = self._swap()
                break
            except OSError as error:  # another process may have removed or made the target meanwhile
                meanwhile = error.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
                if not meanwhile or attempt == _ATTEMPTS - 1 or not os.path.lexists(self._directory):
                    raise
        self._release()  # from here on the old one may have our name; if the next line fails, nothing must be deleted
        replaced = [path for path in (old, leftovers.aside_name(self._target)) if path and os.path.lexists(path)]
        doomed = [leftovers.doom_replaced(path) for path in replaced]
        try:
            self._sync(self._parent)
        except BaseException:
            for each in doomed:
                each.keep()
            raise
        for each in doomed:
            self.notes += each.delete()

    def _swap(self) -> str | None:
        """Put the directory at the target; returns where the old one is now."""
        link = os.path.islink(self._target)
        if not link and not (os.path.isdir(self._target) and os.listdir(self._target)):
            os.rename(self._directory, self._target)  # to where nothing is, or an empty directory
            return None
        if self._file_system.rename_at_once(self._directory, self._target, EXCHANGE):
            return self._directory
        if not os.path.exists(self._target):
            os.unlink(self._target)  # a link to nothing; what waits aside, if anything, is the old checkpoint
            os.rename(self._directory, self._target)
            return None
        aside = leftovers.aside_name(self._target)
        if os.path.lexists(aside):
            self.notes += leftovers.doom_replaced(aside).delete()
        os.rename(self._target, aside)
        try:
            os.rename(self._directory, self._target)
        except OSError:
            with suppress(OSError):  # where it stays aside, readers find it
                os.rename(aside, self._target)
            raise
        return aside

    def discard(self) -> None:
        """Remove the directory, as far as that is possible: what failed before is worth more than what fails here."""
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


def _create(path: str, visible_within_s: float | None, *, shared: bool = False) -> int:
    """Open a new file; waits until this machine sees its directory, unless it did before: then None.

    ``shared``: another rank may have made it.

    Raises:
        FileNotFoundError: if it does not within ``visible_within_s``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_NOFOLLOW if shared else os.O_EXCL)
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
            os.listdir(os.path.dirname(directory))  # has a network file system look again
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
