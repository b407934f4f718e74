"""A file or directory that is written under a temporary name, and then replaces what is at its path.

It gets the mode, owner and group of what is there. A directory is exchanged with an older one in one system call, so
that the path always holds a whole one, old or new.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from uuid import uuid4

from lightning_shardckpt.storage.local.leftovers import Claim, delete, temporary_name
from lightning_shardckpt.storage.local.posix import (
    EXCHANGE,
    NO_REPLACE,
    Rename,
    keep_owner_and_mode,
    make_directories,
    status_of,
    sync_directory,
)


class NotReplaceableError(PermissionError):
    """What is at a path can't be replaced: its owner or group can't be kept, or it can't be exchanged."""


class Replacement:
    """The content for a path, under a temporary name until ``publish``; leftovers of killed processes are deleted.

    Args:
        target: the absolute path.
        save_id: 32 hex digits for the temporary name.
        make: creates the file or directory at the path that it gets.
        sync: make names durable.
        machine: the name of this machine in the claim; tests pass others.

    Attributes:
        path: the temporary path.
        notes: sentences for the user.

    Raises:
        FileExistsError: if another process is writing for this target.
        NotReplaceableError: if its owner or group can't be kept.
    """

    def __init__(
        self,
        target: str,
        save_id: str,
        make: Callable[[str], object],
        *,
        sync: bool = True,
        machine: str | None = None,
    ) -> None:
        status_of(target)
        make_directories(os.path.dirname(target), sync=sync)
        status_of(target)  # again, since a name's length is only checked if its parent exists
        self._target, self._sync, self.path = target, sync, temporary_name(target, save_id)
        self._claim = Claim.take(target, self.path, machine)
        self.notes = self._claim.notes
        try:
            make(self.path)
            if not keep_owner_and_mode(target, self.path, writable=True):
                text = "its owner or group can't be kept: delete it, or give another path"
                raise NotReplaceableError(errno.EPERM, text, target)
        except BaseException:
            self.discard()
            raise

    def publish(self, put: Callable[[str, str], str | None]) -> None:
        """Move the content to the target, sync, and delete what was there.

        Args:
            put: moves the first path to the second, and returns the new path of what was there, or None.
        """
        keep_owner_and_mode(self._target, self.path)
        old = put(self.path, self._target)
        is_done = False  # if the sync fails, nothing may be deleted
        try:
            if self._sync:
                sync_directory(os.path.dirname(self._target))
            error = None if old is None else delete(old)
            is_done = error is None
            if error is not None:
                self.notes.append(f"could not remove the replaced checkpoint {old!r}: {error}")
        finally:
            self._claim.release(is_done=is_done)

    def discard(self) -> None:
        """Delete the content, unless it was published. Never raises, so that an earlier error is not hidden."""
        if self._claim.is_held:
            self._claim.release(is_done=delete(self.path) is None)


def put_directory(rename: Rename, new: str, target: str) -> str | None:
    """Move a directory to the target; return the new path of what was there, if anything.

    An exchange leaves no moment without a directory at the target; two renames, where it is not supported, do.
    """
    is_empty = os.path.isdir(target) and not os.path.islink(target) and not os.listdir(target)
    if is_empty or not os.path.lexists(target):
        os.rename(new, target)
        return None
    if rename(new, target, EXCHANGE):
        return new
    old = temporary_name(target, uuid4().hex)
    os.rename(target, old)
    try:
        os.rename(new, target)
    except OSError:
        os.rename(old, target)
        raise
    return old


def put_new(rename: Rename, new: str, target: str) -> None:
    """Move a file or directory to the target. Raises FileExistsError if anything is there."""
    if rename(new, target, NO_REPLACE):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "a file appeared there meanwhile", target)
    os.rename(new, target)


def put_file(new: str, target: str) -> None:
    """Move a file to the target, in place of a file or link. Raises FileExistsError if anything else is there."""
    entry = status_of(target)
    if entry is not None and not (stat.S_ISREG(entry.st_mode) or stat.S_ISLNK(entry.st_mode)):
        raise FileExistsError(errno.EEXIST, "no regular file is there, so it is not replaced", target)
    os.replace(new, target)


def can_exchange(folder: str, rename: Rename) -> bool:
    """Return True if the file system of an empty directory exchanges two names."""
    one, other = os.path.join(folder, "1"), os.path.join(folder, "2")
    os.mkdir(one)
    os.mkdir(other)
    is_possible = rename(one, other, EXCHANGE)
    os.rmdir(one)
    os.rmdir(other)
    return is_possible
