"""Checkpoints as directories of a file system.

A save fills a temporary directory beside the target, with the mode, owner and group of the directory that is there,
and exchanges the two in one system call, so that the path always holds a whole checkpoint, old or new.

A directory that cannot be replaced so is filled in place: an empty or current directory, a mount point, one whose
parent cannot be written or whose owner cannot be kept, an older checkpoint where the file system cannot exchange two
names (some network file systems), and a checkpoint that was filled in place. Then names begin with the save's id, as in
an object store, the root index is renamed into place last, and files of other saves are deleted after that. Names of
temporaries neither contain "ckpt_" nor end in ".ckpt", since Lightning scans for both.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import (
    EXPORT_FOLDER,
    HEAD_BYTES,
    PREFIXED_NAME,
    ROOT_NAME,
    is_ours,
    prefix_of,
    read_prefix,
)
from lightning_shardckpt.storage.local.leftovers import Claim, delete, is_claim, is_temporary, temporary_name
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.local.posix import (
    Rename,
    errors_with_path,
    is_mount_point,
    rename_with_flag,
    status_of,
    sync_directory,
    write_parts,
)
from lightning_shardckpt.storage.local.replacement import NotReplaceableError, Replacement, can_exchange, put_directory
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.text import count_text, size_text

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
        """Open the checkpoint at ``path``.

        Raises:
            CheckpointNotFoundError: if there is none, or it is incomplete or not a checkpoint.
        """
        path = absolute_path(path)
        for _ in range(_ATTEMPTS):
            with suppress(FileNotFoundError, NotADirectoryError):
                reader = LocalReader(path)
                if reader.is_checkpoint():
                    return reader
                reader.close()
            if not os.path.exists(os.path.join(path, ROOT_NAME)):
                raise CheckpointNotFoundError(_why_none(path))
        raise CheckpointNotFoundError(f"the checkpoint at {path!r} is replaced faster than it can be opened")

    def draft(self, path: str, save_id: str) -> LocalDraft:
        """Return a draft of a checkpoint that will appear at ``path``."""
        return LocalDraft(absolute_path(path), save_id, self)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint, or the link to one, at ``path``; nothing else is ever deleted.

        The directory is renamed first, so that the path never holds a half-deleted checkpoint. If it cannot be deleted
        after that, the next save in the same folder deletes it. One that was filled in place, or would be, loses its
        root index first, and stays as an empty directory.

        Returns:
            Notes about leftovers, and about failures after the rename.

        Raises:
            CheckpointNotFoundError: if no checkpoint is at the path.
        """
        path = absolute_path(path)
        if os.path.islink(path):
            os.unlink(path)
            return []
        self.open(path).close()
        try:
            return _delete_in_place(path, self) if is_filled_in_place(path) else self._rename_and_delete(path)
        except FileNotFoundError:
            text = f"no checkpoint at {path!r}: another process removed it just now"
            raise CheckpointNotFoundError(text) from None

    def _rename_and_delete(self, path: str) -> list[str]:
        name = uuid.uuid4().hex
        removed = temporary_name(name, name, os.path.dirname(path))
        claim, is_done = Claim.take(name, removed, self.machine), False
        try:
            os.rename(path, removed)
            self.sync(os.path.dirname(path))
            error = delete(removed)
            is_done = error is None
        finally:
            claim.release(is_done=is_done or not os.path.lexists(removed))
        failed = [] if error is None else [f"could not remove the deleted checkpoint {removed!r}: {error}"]
        return claim.notes + failed

    def sync(self, directory: str) -> None:
        """Sync a directory, unless syncs are disabled."""
        if self.sync_files:
            sync_directory(directory)


def absolute_path(path: str) -> str:
    """Return the absolute path of a path or ``file://`` URL. Raises ValueError for other URLs."""
    path = os.fspath(path)
    if "://" in path and not path.startswith(("file://", "local://")):
        raise ValueError(f"{path!r}: only paths of a file system are supported, not URLs")
    return os.path.abspath(path.removeprefix("file://").removeprefix("local://"))  # abspath drops a trailing slash


def _why_none(path: str) -> str:
    if os.path.islink(path) and not os.path.exists(path):
        return f"no checkpoint at {path!r}: it is a link to {os.readlink(path)!r}, which is gone"
    if not os.path.exists(path):
        return f"no checkpoint at {path!r}: there is nothing at this path"
    return f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}"


# ── the target ────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_replaceable(target: str, *, filled: bool = True) -> None:
    """Check that a save may replace or fill ``target``.

    That is a missing path, a checkpoint of ours, a link, and a directory that is empty or, if ``filled``, has only
    files of an unfinished save in it.

    Raises:
        FileExistsError: for anything else.
        OSError: if the name is too long.
    """
    entry = status_of(target)
    if entry is None or stat.S_ISLNK(entry.st_mode):  # such as ModelCheckpoint's "last"; the link is replaced
        return
    if not stat.S_ISDIR(entry.st_mode):
        raise FileExistsError(
            f"a file is in the way at {target!r}: a sharded checkpoint is a directory; move it or use another path"
        )
    with suppress(FileNotFoundError):  # removed since
        names = os.listdir(target)
        is_foreign = ROOT_NAME not in names and not all(filled and _is_of_a_save(name) for name in names)
        if is_foreign and os.path.samestat(entry, os.lstat(target)):  # not replaced between these calls
            raise FileExistsError(
                f"the directory {target!r} is not empty and holds no checkpoint of this package, so it is not "
                "replaced; move it or use another path"
            )


def _is_of_a_save(name: str) -> bool:
    return PREFIXED_NAME.fullmatch(name) is not None or is_temporary(name)


def is_filled_in_place(target: str) -> bool:
    """Return True if a target is a directory that is filled in place on any file system."""
    entry = status_of(target)
    if entry is None or not stat.S_ISDIR(entry.st_mode):
        return False
    with suppress(FileNotFoundError):  # removed since
        names = os.listdir(target)
        return (
            ROOT_NAME not in names
            or any(map(PREFIXED_NAME.fullmatch, names))
            or is_mount_point(target)
            or not os.access(os.path.dirname(target), os.W_OK | os.X_OK, effective_ids=True)
            or _is_current(entry)
        )
    return False


def _is_current(entry: os.stat_result) -> bool:
    try:
        return os.path.samestat(entry, os.stat("."))
    except OSError:  # the current directory was deleted, or this user may not enter it
        return False


# ── drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class LocalDraft:
    """A draft in a temporary directory next to the target, or in the target itself.

    ``begin`` decides which; ranks that don't call it find out when they write.
    """

    def __init__(self, target: str, save_id: str, storage: LocalStorage) -> None:
        self._target, self._save_id, self._storage = target, save_id, storage
        self._temporary = temporary_name(target, save_id)
        self._root = temporary_name(target, save_id, target)  # if it is filled in place
        self._directory: str | None = None  # where files are written, once this rank knows it
        self._new: Replacement | None = None
        self._claim: Claim | None = None  # in place
        self._written: set[str] = set()
        self.prefix = ""
        self.notes: list[str] = []

    def begin(self) -> None:
        """Create the directory, or claim the target to fill it in place, and delete leftovers of killed saves.

        Raises:
            FileExistsError: if the target exists and is neither a checkpoint of ours nor an empty directory, or is a
                link that can't be replaced in one step, or if another process is saving to it.
            PermissionError: if neither the target nor its parent can be written.
        """
        check_replaceable(self._target)
        if not is_filled_in_place(self._target) and self._begin_beside():
            return
        try:
            self._claim = Claim.take(self._target, self._root, self._storage.machine)
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
        """Create the temporary directory; return False if it can't replace the target."""
        storage, is_sync = self._storage, self._storage.sync_files
        with suppress(NotReplaceableError):
            self._new = Replacement(
                self._target, self._save_id, self._make_directory, sync=is_sync, machine=storage.machine
            )
            self._directory, self.notes = self._temporary, self._new.notes
        if self._new is None and os.path.lexists(self._temporary):  # later saves in place would not look for it
            raise OSError(errno.EIO, "the file system fails to delete an empty directory", self._temporary)
        return self._new is not None

    def _make_directory(self, path: str) -> None:
        os.mkdir(path)
        if not os.path.isdir(self._target) or can_exchange(path, self._storage.rename):
            return
        if os.path.islink(self._target):
            raise FileExistsError(
                f"{self._target!r} is a link, and the file system can't exchange it for a directory in one step: "
                "delete the link, or save to another path"
            )
        raise NotReplaceableError(errno.EOPNOTSUPP, "the file system can't exchange two names", self._target)

    def _fill_in_place(self) -> None:
        self._directory, self.prefix = self._target, prefix_of(self._save_id)

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        """Write a new file; sync it and its entry in the directory, unless syncs are disabled."""
        directory = self._find_directory()
        stored = self._root if self.prefix and name == ROOT_NAME else os.path.join(directory, self.prefix + name)
        with self._removal_named():
            file = os.open(stored, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            with errors_with_path(stored):
                write_parts(file, parts, sync=self._storage.sync_files)
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
                if any(is_claim(name, self._temporary) for name in os.listdir(self._target)):
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
                os.listdir(os.path.dirname(self._target))  # makes a network file system refresh its cache
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return self._directory or self._target

    def publish(self) -> None:
        """Make the checkpoint appear at the target, sync, and delete the old one."""
        if self._new is not None:
            self._new.publish(partial(_put_checkpoint, self._storage.rename))
        else:
            assert self._claim is not None
            with self._removal_named():
                self._publish_in_place(self._claim)

    @contextmanager
    def _removal_named(self) -> Iterator[None]:
        """Raise a FileExistsError that says so if a directory that is filled in place was removed meanwhile."""
        try:
            yield
        except FileNotFoundError as error:
            if not self.prefix or os.path.isdir(self._target):
                raise
            raise FileExistsError(
                f"another process removed {self._target!r} since this save began; let each job save to paths of its own"
            ) from error

    def _publish_in_place(self, claim: Claim) -> None:
        sizes, replaced = sizes_of(self._target), prefix_at(self._target)
        if missing := sorted(self._written - sizes.keys()):
            raise FileExistsError(
                f"another process saved to {self._target!r} since this save began, and deleted {missing[0]} of it; let "
                "each job save to paths of its own"
            )
        if replaced is not None:
            _delete_export(self._target)
        os.rename(self._root, os.path.join(self._target, ROOT_NAME))
        self._claim = None
        try:
            self._storage.sync(self._target)
            kept = (self.prefix, *map(prefix_of, claim.living))
            others = {name: size for name, size in sizes.items() if is_ours(name) and not name.startswith(kept)}
            self.notes += describe_leftovers(self._target, others, replaced)
            self.notes += delete_files(self._target, others)
        finally:
            claim.release()

    def discard(self) -> None:
        """Delete the files as far as possible. Never raises, so that an earlier error is not hidden."""
        if self._new is not None:
            self._new.discard()
        elif self._claim is not None:
            with suppress(OSError):
                ours = [name for name in os.listdir(self._target) if name.startswith(self.prefix)]
                delete_files(self._target, ours)
            delete(self._root)
            self._claim.release()
            self._claim = None


def _put_checkpoint(rename: Rename, new: str, target: str) -> str | None:
    """Move a checkpoint to the target; return the new path of what was there, if anything."""
    for attempt in range(_ATTEMPTS):
        check_replaceable(target, filled=False)
        try:
            return put_directory(rename, new, target)
        except OSError as conflict:  # another process may have removed or created the target meanwhile
            is_conflict = conflict.errno in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST)
            if not is_conflict or attempt == _ATTEMPTS - 1 or not os.path.lexists(new):
                raise
    raise AssertionError("unreachable")


# ── files of checkpoints that were filled in place ────────────────────────────────────────────────────────────────────


def sizes_of(directory: str) -> dict[str, int]:
    """Return the sizes of the files of all saves in a directory, without the root index."""
    names = (name for name in os.listdir(directory) if name != ROOT_NAME and is_ours(name))
    return {name: os.lstat(os.path.join(directory, name)).st_size for name in names}


def prefix_at(directory: str) -> str | None:
    """Return the prefix of the names of a checkpoint's files; None without a checkpoint."""
    with suppress(FileNotFoundError), open(os.path.join(directory, ROOT_NAME), "rb") as file:
        return read_prefix(file.read(HEAD_BYTES)) or ""
    return None


def describe_leftovers(directory: str, files: dict[str, int], replaced: str | None) -> list[str]:
    """Return a sentence about files of unfinished saves among those that are about to be deleted."""
    dead = (name for name in files if PREFIXED_NAME.fullmatch(name) and not name.startswith(replaced or "?"))
    left = [files[name] for name in dead]
    if not left:
        return []
    what = f"{count_text(len(left), 'file')}, {size_text(sum(left))}"
    return [f"removed the leftover of an unfinished save, {what}, from {directory!r}"]


def delete_files(directory: str, names: Iterable[str]) -> list[str]:
    """Delete files of replaced checkpoints and unfinished saves; return a sentence about a failure."""
    for name in names:
        try:
            os.unlink(os.path.join(directory, name))
        except FileNotFoundError:
            pass
        except OSError as error:
            return [f"could not remove all files of the replaced checkpoint in {directory!r}: {error}"]
    return []


def _delete_export(directory: str) -> None:
    """Delete an export, which must not outlive its root index. Raises OSError."""
    if (error := delete(os.path.join(directory, EXPORT_FOLDER))) is not None:
        raise error


def _delete_in_place(path: str, storage: LocalStorage) -> list[str]:
    prefix = prefix_at(path) or "?"
    names = [name for name in sizes_of(path) if name.startswith(prefix) or not PREFIXED_NAME.fullmatch(name)]
    _delete_export(path)
    os.unlink(os.path.join(path, ROOT_NAME))
    storage.sync(path)
    return delete_files(path, names)
