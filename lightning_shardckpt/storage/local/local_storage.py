"""Checkpoints as directories of a file system that renames atomically.

A save fills a temporary sibling directory and exchanges it with the target in one system call, so that the path always
holds a whole checkpoint, old or new. Where the file system cannot exchange two names (some network file systems), the
old directory is first renamed to ``.old-<hash of its name>``; a reader that finds nothing at the path looks there.
Names of temporaries contain neither "ckpt_" nor end in ".ckpt": Lightning scans for both. ``leftovers`` says who may
delete them. A reader locks the directory that it reads, so what a save replaces meanwhile is deleted by a later one.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from lightning_shardckpt.errors import CheckpointNotFoundError, FormatError
from lightning_shardckpt.header import checksum
from lightning_shardckpt.index import ROOT_NAME
from lightning_shardckpt.storage import leftovers, locks
from lightning_shardckpt.storage.direct import write_durably
from lightning_shardckpt.storage.durable import (
    EXCHANGE,
    make_and_open,
    make_directories,
    naming,
    rename_at_once,
    sync_directory,
    write_at,
    write_parts,
)
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.storage.replaceable import check_replaceable
from lightning_shardckpt.storage.visible import create

_OPEN_FILES = 64  # of one reader; a process may often have 1,024
_ATTEMPTS = 20  # of what another process can get in the way of, again and again
_PAUSE_S = 0.01


class LocalStorage:
    """Directories on a local or shared POSIX file system.

    Args:
        visible_within_s: how long a network file system may take to show one machine what another one made.
        sync_files: whether what returned is durable. Without syncs a process may still die at any moment, but behind
            a crash of the machine neither the old nor the new checkpoint may be left.
    """

    def __init__(self, visible_within_s: float = 60.0, *, sync_files: bool = True) -> None:
        self.visible_within_s, self.sync_files = visible_within_s, sync_files

    def open(self, path: str) -> LocalReader:
        """The checkpoint at ``path``, or the one that an interrupted save moved aside from there.

        Raises:
            CheckpointNotFoundError: if there is none, if it is incomplete, or if the path is something else.
        """
        path = _checked(path)
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
        return LocalDraft(_checked(path), save_id, self.visible_within_s, sync_files=self.sync_files)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint (or the link to one) at ``path``; nothing else is ever deleted.

        The directory is renamed first, so that no half-deleted checkpoint is ever seen at the path. What cannot be
        deleted then, or is still being read, is left to the next save beside it.

        Returns:
            What went wrong then, as sentences.

        Raises:
            CheckpointNotFoundError: if what is there is no checkpoint.
        """
        path = _checked(path)
        if os.path.islink(path):
            os.unlink(path)
            return []
        self.open(path).close()
        notes, doomed = [], leftovers.doomed_name(path)
        if os.path.lexists(path) and os.path.lexists(_aside(path)):
            notes += leftovers.dispose(_aside(path))  # of a save that ended too early; else it would be found next
        try:
            os.rename(_or_aside(path), doomed)
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"no checkpoint at {path!r}: another process removed it just now") from None
        if self.sync_files:
            sync_directory(os.path.dirname(path))
        return notes + leftovers.delete_unread(doomed)


def _checked(path: str) -> str:
    path = os.fspath(path)
    if "://" in path and not path.startswith(("file://", "local://")):
        raise ValueError(f"{path!r}: only paths of a file system are supported, not URLs")
    return os.path.abspath(path.removeprefix("file://").removeprefix("local://"))  # without a slash at the end


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
    """A checkpoint directory; files are opened relative to its descriptor, regular ones only.

    Links are refused, unless the directory is another program's: Hugging Face's cache consists of links.
    """

    is_far = False

    def __init__(self, path: str, within: int | None = None, *, follow_links: bool = False) -> None:
        self._path, self._follow_links = path, follow_links
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()  # around what closes a file, which a twin may be about to share
        self._elder: LocalReader | None = None

    def twin(self) -> LocalReader:
        """Another reader of the same directory, whatever its path is by now.

        Of files that are open here already it shares the position up to which the system has read ahead: if both read
        a file piece by piece in turn, that is one stream.
        """
        found = LocalReader(".", self._directory, follow_links=self._follow_links)
        found._path, found._elder = self._path, self
        return found

    def stays(self, path: str) -> bool:
        """Whether nobody will delete the files until this is closed; shares a lock that a deletion would need.

        Where there are no locks, a reader may find files missing that were not open when the path was replaced.
        """
        return locks.take(self._directory, shared=True) is not False and self.is_at(path)

    def is_at(self, path: str) -> bool:
        """Whether the path still names this directory."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._directory))
        except FileNotFoundError:
            return False

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return os.fstat(self._file(name)).st_size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""
        file, done = self._file(name), 0
        while done < len(target):
            with naming(os.path.join(self._path, name)):
                count = os.preadv(file, [target[done:]], offset + done)
            if count == 0:
                raise EOFError(f"{name} ends at byte {offset + done}, expected {offset + len(target)}")
            done += count

    def names(self) -> list[str]:
        """Every entry of the directory, sorted."""
        return sorted(os.listdir(self._directory))

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
        if self._directory >= 0:
            locks.release(self._directory)
            self._directory = -1

    def _file(self, name: str) -> int:
        if name in self._files:
            self._files[name] = self._files.pop(name)  # the last one used is the last one closed
            return self._files[name]
        with naming(os.path.join(self._path, name)):
            shared = self._shared(name)
            file = self._open(name) if shared is None else shared
        if len(self._files) >= _OPEN_FILES:
            with self._lock:
                os.close(self._files.pop(next(iter(self._files))))
        self._files[name] = file
        return file

    def _shared(self, name: str) -> int | None:
        """The file that the elder twin has open, as a descriptor of our own."""
        if self._elder is None:
            return None
        with self._elder._lock:
            file = self._elder._files.get(name)
            return None if file is None else os.dup(file)

    def _open(self, name: str) -> int:
        kind = os.stat(name, dir_fd=self._directory, follow_symlinks=self._follow_links).st_mode
        if stat.S_ISLNK(kind) or stat.S_ISSOCK(kind):
            raise FormatError(f"{name} is a link or a socket; a checkpoint holds regular files only")
        if not stat.S_ISREG(kind):
            raise FormatError(f"{name} is not a regular file")  # not even opened: a device may act on that
        links = 0 if self._follow_links else os.O_NOFOLLOW
        file = os.open(name, os.O_RDONLY | links | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):  # it was exchanged since
            os.close(file)
            raise FormatError(f"{name} is not a regular file")
        return file


class LocalDraft:
    """A temporary directory beside the target."""

    prefix = ""

    def __init__(self, target: str, save_id: str, visible_within_s: float = 0.0, *, sync_files: bool = True) -> None:
        self._target, self._parent = target, os.path.dirname(target)
        self._directory = leftovers.temporary_name(target, save_id)
        self._visible_within_s, self._sync_files = visible_within_s, sync_files
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
        self._claim = leftovers.claim(self._target, self._directory, make_and_open)
        self._seen = True
        self.notes += self._claim.notes

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a new file; sync it and its entry in the directory, unless syncs are left out."""
        path = os.path.join(self._directory, name)
        file = create(path, None if self._seen else self._visible_within_s)
        self._seen = True
        write = write_durably if self._sync_files else write_parts
        try:
            with naming(path):
                write(file, parts)
        finally:
            os.close(file)
        self._sync(self._directory)

    def write_pieces(self, name: str, pieces: Iterable[tuple[int, Bytes]]) -> None:
        """Write pieces of a file that ranks make together; sync it and its entry, unless syncs are left out."""
        path = os.path.join(self._directory, name)
        file = create(path, None if self._seen else self._visible_within_s, shared=True)
        self._seen = True
        try:
            with naming(path):
                for offset, data in pieces:
                    write_at(file, memoryview(data), offset)
                if self._sync_files:
                    os.fsync(file)
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
        self._sync(self._parent)
        for path in (old, _aside(self._target)):
            if path is not None and os.path.lexists(path):
                self.notes += leftovers.dispose(path)

    def _swap(self) -> str | None:
        """Put the directory at the target; returns where the old one is now."""
        link = os.path.islink(self._target)
        if not link and not (os.path.isdir(self._target) and os.listdir(self._target)):
            os.rename(self._directory, self._target)  # to where nothing is, or an empty directory
            return None
        if _exchange(self._directory, self._target):
            return self._directory
        if not os.path.exists(self._target):
            os.unlink(self._target)  # a link to nothing; what waits aside, if anything, is the old checkpoint
            os.rename(self._directory, self._target)
            return None
        aside = _aside(self._target)
        if os.path.lexists(aside):
            self.notes += leftovers.dispose(aside)
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


def _exchange(a: str, b: str) -> bool:
    """Swap two names atomically; False where the system or the file system cannot."""
    return rename_at_once(a, b, EXCHANGE)
