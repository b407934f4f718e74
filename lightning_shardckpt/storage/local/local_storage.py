"""Checkpoints as directories of a file system.

A save fills a temporary directory beside the target, with the mode, owner and group of the directory that is there,
and exchanges the two in one system call, so that the path always holds a whole checkpoint, old or new. If the file
system cannot exchange two names (some network file systems), the old directory is first renamed to ``.old-<hash of its
name>``; a reader that finds nothing at the path looks there.

A directory that cannot or should not be replaced is filled in place: an empty or current directory, a mount point, one
whose parent cannot be written or whose owner cannot be kept, and a checkpoint that was filled in place. Then names
begin with the save's id, as in an object store, the root index is renamed into place last, and files of other saves are
deleted after that. Names of temporaries neither contain "ckpt_" nor end in ".ckpt", since Lightning scans for both.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import EXPORT_FOLDER, PREFIXED_NAME, ROOT_NAME, is_ours, prefix_of
from lightning_shardckpt.storage.local import leftovers
from lightning_shardckpt.storage.local.leftovers import Claim
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.local.posix import (
    errors_with_path,
    keep_owner_and_mode,
    make_directories,
    rename_with_flag,
    sync_directory,
    write_durably,
    write_parts,
)
from lightning_shardckpt.storage.local.targets import (
    Rename,
    absolute_path,
    check_replaceable,
    delete_files,
    describe_leftovers,
    is_filled_in_place,
    path_or_aside,
    prefix_at,
    sizes_of,
    swap,
)
from lightning_shardckpt.storage.protocol import Bytes

_ATTEMPTS = 20  # for operations that fail if another process replaces the path meanwhile
_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 1.0


class LocalStorage:
    """Directories on a local or shared POSIX file system.

    Args:
        visible_within_s: the time within which a network file system shows a machine the changes of another.
        sync_files: make files durable before a call returns. Without syncs, a process may still die at any moment, but
            after a crash of the machine neither the old nor the new checkpoint may be left.
        rename: renames with a flag, or returns False if the file system does not support it.
        machine: the name of this machine in claims.
    """

    def __init__(
        self,
        visible_within_s: float = 60.0,
        *,
        sync_files: bool = True,
        rename: Rename = rename_with_flag,
        machine: str | None = None,
    ) -> None:
        self.visible_within_s, self.sync_files = visible_within_s, sync_files
        self.rename, self.machine = rename, machine

    def open(self, path: str) -> LocalReader:
        """Open the checkpoint at ``path``, or the one that an interrupted save moved aside.

        Raises:
            CheckpointNotFoundError: if there is none, or it is incomplete or not a checkpoint.
        """
        path = absolute_path(path)
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError, NotADirectoryError):
                reader = LocalReader(path_or_aside(path))
                if reader.is_checkpoint():
                    return reader
                reader.close()
            if not os.path.exists(os.path.join(path_or_aside(path), ROOT_NAME)):
                raise CheckpointNotFoundError(_why_none(path))
        raise CheckpointNotFoundError(f"the checkpoint at {path!r} is replaced faster than it can be opened")

    def draft(self, path: str, save_id: str) -> LocalDraft:
        """Return a draft of a checkpoint that will appear at ``path``."""
        return LocalDraft(absolute_path(path), save_id, self)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint, or the link to one, at ``path``; nothing else is ever deleted.

        The directory is renamed first, so that the path never holds a half-deleted checkpoint. If it cannot be deleted
        after that, the next save in the same folder deletes it. One that was filled in place loses its root index
        first, and stays as an empty directory.

        Returns:
            Notes about failures after the rename.

        Raises:
            CheckpointNotFoundError: if no checkpoint is at the path.
        """
        path = absolute_path(path)
        if os.path.islink(path):
            os.unlink(path)
            return []
        self.open(path).close()
        current, aside = path_or_aside(path), leftovers.aside_name(path)
        if current == path and is_filled_in_place(path):
            return _delete_in_place(path, self)
        # one aside was left by an interrupted save; readers would find it as soon as the path is empty
        notes = self.delete(aside) if current == path and os.path.lexists(aside) else []
        try:
            return notes + self.delete(current)
        except FileNotFoundError:
            raise _removed_meanwhile(path) from None

    def delete(self, path: str) -> list[str]:
        """Rename a directory and delete it; a sentence tells if that fails after the rename.

        Raises:
            OSError: if it cannot be renamed.
        """
        removed = leftovers.temporary_name("", uuid.uuid4().hex, os.path.dirname(path))
        claim, is_done = Claim.of_removal(removed), False
        try:
            os.rename(path, removed)
            self.sync(os.path.dirname(path))
            error = leftovers.delete(removed)
            is_done = error is None
        finally:
            claim.release(is_done=is_done or not os.path.lexists(removed))
        return _told(error, removed)

    def sync(self, directory: str) -> None:
        """Sync a directory, unless syncs are disabled."""
        if self.sync_files:
            sync_directory(directory)


def _told(error: OSError | None, path: str) -> list[str]:
    return [] if error is None else [f"could not remove the replaced checkpoint {path!r}: {error}"]


def _removed_meanwhile(path: str) -> CheckpointNotFoundError:
    return CheckpointNotFoundError(f"no checkpoint at {path!r}: another process removed it just now")


def _why_none(path: str) -> str:
    if os.path.islink(path) and not os.path.exists(path):
        return f"no checkpoint at {path!r}: it is a link to {os.readlink(path)!r}, which is gone"
    if not os.path.exists(path):
        return f"no checkpoint at {path!r}: there is nothing at this path"
    return f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}"


# ── drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class LocalDraft:
    """A draft in a temporary directory next to the target, or in the target itself.

    ``begin`` decides which; ranks that don't call it find out when they write.
    """

    def __init__(self, target: str, save_id: str, storage: LocalStorage) -> None:
        self._target, self._parent, self._save_id = target, os.path.dirname(target), save_id
        self._storage = storage
        self._temporary = leftovers.temporary_name(target, save_id)
        self._directory: str | None = None  # where files are written, once this rank knows it
        self._claim: Claim | None = None
        self._written: set[str] = set()
        self.prefix = ""
        self.notes: list[str] = []

    def begin(self) -> None:
        """Create the directory, or claim the target to fill it in place, and delete leftovers of killed saves.

        Raises:
            FileExistsError: if the target exists and is neither a checkpoint of ours nor an empty directory, or if
                another process is saving to it.
            PermissionError: if neither the target nor its parent can be written.
        """
        check_replaceable(self._target)
        if not is_filled_in_place(self._target) and self._begin_beside():
            return
        try:
            self._claim = Claim.take(self._target, self._in_place(), self._storage.machine)
        except PermissionError as error:
            raise PermissionError(
                error.errno,
                "a checkpoint can't be saved here, since neither this directory nor its parent can be written; change "
                "the mode of one of them, or use another path",
                self._target,
            ) from None
        self._fill_in_place()
        self.notes += self._claim.notes

    def _begin_beside(self) -> bool:
        """Create the temporary directory; return False if it can't have the owner or group of the target."""
        make_directories(self._parent, sync=self._storage.sync_files)
        check_replaceable(self._target)  # again, since a name's length is only checked if its parent exists
        claim = Claim.take(self._target, self._temporary, self._storage.machine)
        try:
            os.mkdir(self._temporary)
            is_kept = keep_owner_and_mode(path_or_aside(self._target), self._temporary, writable=True)
        except BaseException:
            leftovers.delete(self._temporary)
            claim.release()
            raise
        self.notes += claim.notes
        if not is_kept:
            leftovers.delete(self._temporary)
            claim.release()
            return False
        self._claim, self._directory = claim, self._temporary
        return True

    def _in_place(self) -> str:
        return leftovers.temporary_name(self._target, self._save_id, self._target)

    def _fill_in_place(self) -> None:
        self._directory, self.prefix = self._target, prefix_of(self._save_id)

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new file; sync it and its entry in the directory, unless syncs are disabled."""
        with self._create(name) as file:
            if self._storage.sync_files:
                write_durably(file, parts)
            else:
                write_parts(file, parts)

    @contextmanager
    def _create(self, name: str) -> Iterator[int]:
        directory = self._find_directory()
        stored = self._in_place() if self.prefix and name == ROOT_NAME else os.path.join(directory, self.prefix + name)
        file = os.open(stored, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with errors_with_path(stored):
                yield file
        finally:
            os.close(file)
        self._storage.sync(directory)
        if name != ROOT_NAME:
            self._written.add(self.prefix + name)

    def _find_directory(self) -> str:
        """Return the directory in which ``begin`` lets all ranks write; wait until this machine sees it."""
        pause, within_s = _PAUSE_S, self._storage.visible_within_s
        deadline = time.monotonic() + within_s
        while self._directory is None:
            try:
                os.close(os.open(self._temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
                self._directory = self._temporary
                break
            except OSError as failure:
                if failure.errno not in (errno.ENOENT, errno.ESTALE):
                    raise
            with suppress(OSError):
                if any(leftovers.is_claim(name, self._temporary) for name in os.listdir(self._target)):
                    self._fill_in_place()
                    break
            if time.monotonic() >= deadline:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"the machine {os.uname().nodename!r} does not see this directory, which rank 0 made at least "
                    f"{within_s:g} s ago; the path must be on a file system that all ranks share",
                    self._temporary,
                )
            with suppress(OSError):
                os.listdir(self._parent)  # makes a network file system refresh its cache
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._directory or self._target

    def publish(self) -> None:
        """Make the checkpoint appear at the target, sync, and delete the old one."""
        assert self._claim is not None
        if self.prefix:
            self._publish_in_place(self._claim)
        else:
            self._publish_directory(self._claim)

    def _publish_directory(self, claim: Claim) -> None:
        for attempt in range(_ATTEMPTS):
            check_replaceable(self._target, filled=False)
            try:
                keep_owner_and_mode(path_or_aside(self._target), self._temporary)
                old = swap(self._temporary, self._target, self._storage.rename)
                break
            except OSError as conflict:  # another process may have removed or created the target meanwhile
                is_conflict = conflict.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
                if not is_conflict or attempt == _ATTEMPTS - 1 or not os.path.lexists(self._temporary):
                    raise
        self._claim = None  # the old one may have the draft's name: if the sync fails, nothing may be deleted
        is_done = False
        try:
            self._storage.sync(self._parent)
            error = leftovers.delete(self._temporary) if old == self._temporary else None
            self.notes += _told(error, self._temporary)
            is_done = error is None
            self._delete_aside()
        finally:
            claim.release(is_done=is_done)

    def _delete_aside(self) -> None:
        aside = leftovers.aside_name(self._target)
        if os.path.lexists(aside):
            try:
                self.notes += self._storage.delete(aside)
            except OSError as error:
                self.notes += _told(error, aside)

    def _publish_in_place(self, claim: Claim) -> None:
        sizes, replaced = sizes_of(self._target), prefix_at(self._target)
        if missing := sorted(self._written - sizes.keys()):
            raise FileExistsError(
                f"another process saved to {self._target!r} since this save began, and deleted {missing[0]} of it; let "
                "each job save to paths of its own"
            )
        if replaced is not None:
            _delete_export(self._target)
        os.rename(self._in_place(), os.path.join(self._target, ROOT_NAME))
        self._claim = None
        try:
            self._storage.sync(self._target)
            kept = (self.prefix, *map(prefix_of, claim.living))
            others = {name: size for name, size in sizes.items() if is_ours(name) and not name.startswith(kept)}
            self.notes += describe_leftovers(self._target, others, replaced)
            self.notes += delete_files(self._target, others)
            self._delete_aside()
        finally:
            claim.release()

    def discard(self) -> None:
        """Delete the files as far as possible. Never raises, so that an earlier error is not hidden."""
        if self._claim is None:
            return
        if self.prefix:
            with suppress(OSError):
                ours = [name for name in os.listdir(self._target) if name.startswith(self.prefix)]
                delete_files(self._target, ours)
            leftovers.delete(self._in_place())
            self._claim.release()
        else:
            self._claim.release(is_done=leftovers.delete(self._temporary) is None)
        self._claim = None


def _delete_export(directory: str) -> None:
    """Delete an export, which must not outlive its root index. Raises OSError."""
    if (error := leftovers.delete(os.path.join(directory, EXPORT_FOLDER))) is not None:
        raise error


def _delete_in_place(path: str, storage: LocalStorage) -> list[str]:
    prefix = prefix_at(path) or "?"
    names = [name for name in sizes_of(path) if name.startswith(prefix) or not PREFIXED_NAME.fullmatch(name)]
    _delete_export(path)
    try:
        os.unlink(os.path.join(path, ROOT_NAME))
    except FileNotFoundError:
        raise _removed_meanwhile(path) from None
    storage.sync(path)
    return delete_files(path, names)
