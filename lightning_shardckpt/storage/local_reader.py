"""Reader of a checkpoint directory; it never reads files of a checkpoint that replaced this one."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from threading import Lock

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import HEAD_BYTES, ROOT_NAME, read_prefix
from lightning_shardckpt.storage.posix import errors_with_path
from lightning_shardckpt.storage.protocol import names_of_save

OPEN_FILES = 64  # per reader; the usual limit of a process is 1,024


class LocalReader:
    """Reader of a directory, which opens only regular files, relative to the directory's descriptor. Thread-safe.

    Symbolic links are refused unless ``follow_links``, which is for other programs' directories: Hugging Face's cache
    consists of links.
    """

    high_latency = False

    def __init__(self, path: str, *, follow_links: bool = False) -> None:
        self._path, self._follow_links, self.prefix = path, follow_links, ""
        self._directory = _OpenFile(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        self._files, self._lock = dict[str, _OpenFile](), Lock()
        self._root: os.stat_result | None = None

    def is_checkpoint(self) -> bool:
        """Return True if the directory has a root index; the reader then tells when another one is at its path.

        From then on, names are those in the indexes, without the prefix of a directory that was filled in place.
        """
        try:
            self._root = os.stat(ROOT_NAME, dir_fd=self._directory.descriptor)
        except FileNotFoundError:
            return False
        with suppress(FormatError):  # a link is reported when the root index is read
            head = os.pread(self._file(ROOT_NAME).descriptor, HEAD_BYTES, 0)
            self.prefix = read_prefix(head) or ""
        return True

    def size(self, name: str) -> int:
        """Return the length of a file in bytes."""
        return os.fstat(self._file(name).descriptor).st_size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on. Raises EOFError if the file is too short."""
        file, left, at = self._file(name), target, offset
        while left:
            try:
                count = os.preadv(file.descriptor, (left,), at)
            except OSError as error:
                error.filename = os.path.join(self._path, name)
                raise
            if count == 0:
                raise EOFError(f"{name} ends at byte {at}, expected {offset + len(target)}")
            left, at = left[count:], at + count

    def names(self) -> list[str]:
        """Return every entry of the directory, sorted; if names have a prefix, none of other saves."""
        return names_of_save(os.listdir(self._directory.descriptor), self.prefix)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._files.clear()
        self._directory.close()

    def _file(self, name: str) -> _OpenFile:
        if (file := self._files.get(name)) is None:
            with self._lock:
                file = self._files[name] = self._files.get(name) or self._open(name)
                if len(self._files) > OPEN_FILES:
                    del self._files[next(iter(self._files))]  # the one that was opened first
        return file

    def _open(self, name: str) -> _OpenFile:
        stored = name if name == ROOT_NAME else self.prefix + name
        try:
            with errors_with_path(os.path.join(self._path, name)):
                mode = os.stat(stored, dir_fd=self._directory.descriptor, follow_symlinks=self._follow_links).st_mode
                if stat.S_ISLNK(mode) or stat.S_ISSOCK(mode):
                    raise FormatError(f"{name} is a link or a socket; a checkpoint holds regular files only")
                if not stat.S_ISREG(mode):  # not even opened, since opening a device can act on it
                    raise FormatError(f"{name} is not a regular file")
                links = 0 if self._follow_links else os.O_NOFOLLOW
                flags = os.O_RDONLY | links | os.O_NONBLOCK | os.O_CLOEXEC
                return _OpenFile(os.open(stored, flags, dir_fd=self._directory.descriptor))
        except FileNotFoundError:
            if self._is_replaced():
                text = f"the checkpoint at {self._path!r} was replaced or deleted while it was read: load again"
                raise OSError(errno.ESTALE, text) from None
            raise

    def _is_replaced(self) -> bool:
        try:
            now = os.stat(os.path.join(self._path, ROOT_NAME))
        except OSError:
            return self._root is not None
        return self._root is not None and not os.path.samestat(self._root, now)


class _OpenFile:
    """An open file, which is closed at the latest when no thread uses it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    __del__ = close
