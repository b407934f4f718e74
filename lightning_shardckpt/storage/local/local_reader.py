"""Reader of a checkpoint directory; it never reads files of a checkpoint that replaced this one."""

from __future__ import annotations

import errno
import os
import stat
import threading

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local.posix import add_path, errors_with_path

OPEN_FILES = 64  # per reader; the usual limit of a process is 1,024


class LocalReader:
    """Reader of a directory, which opens only regular files, relative to the directory's descriptor.

    Symbolic links are refused unless ``follow_links``, which is for other programs' directories: Hugging Face's cache
    consists of links.
    """

    high_latency = False

    def __init__(self, path: str, within: int | None = None, *, follow_links: bool = False) -> None:
        self._path, self._follow_links = path, follow_links
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()  # held while files are closed, since a clone may be duplicating a descriptor
        self._original: LocalReader | None = None
        self._root: os.stat_result | None = None

    def clone(self) -> LocalReader:
        """Return another reader of the same directory, even if its path was replaced.

        The clone duplicates the descriptors of open files, and so shares the kernel's read-ahead state: if both read a
        file piece by piece in turn, the kernel sees one stream.
        """
        clone = LocalReader(".", self._directory, follow_links=self._follow_links)
        clone._path, clone._original, clone._root = self._path, self, self._root
        return clone

    def is_checkpoint(self) -> bool:
        """Return True if the directory has a root index; the reader then tells when another one is at its path."""
        try:
            self._root = os.stat(ROOT_NAME, dir_fd=self._directory)
        except FileNotFoundError:
            return False
        return True

    def _is_replaced(self) -> bool:
        try:
            now = os.stat(os.path.join(self._path, ROOT_NAME))
        except OSError:
            return self._root is not None
        return self._root is not None and not os.path.samestat(self._root, now)

    def size(self, name: str) -> int:
        """Return the length of a file in bytes."""
        return os.fstat(self._file(name)).st_size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on. Raises EOFError if the file is too short."""
        file, left, at = self._file(name), target, offset
        while left:
            try:
                count = os.preadv(file, (left,), at)
            except OSError as error:
                add_path(error, os.path.join(self._path, name))
                raise
            if count == 0:
                raise EOFError(f"{name} ends at byte {at}, expected {offset + len(target)}")
            left, at = left[count:], at + count

    def names(self) -> list[str]:
        """Return every entry of the directory, sorted."""
        return sorted(os.listdir(self._directory))

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            for file in self._files.values():
                os.close(file)
            self._files.clear()
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    def _file(self, name: str) -> int:
        if name in self._files:
            self._files[name] = self._files.pop(name)  # moved to the end: the least recently used is closed first
            return self._files[name]
        try:
            with errors_with_path(os.path.join(self._path, name)):
                shared = self._duplicate(name)
                file = self._open(name) if shared is None else shared
        except FileNotFoundError:
            if self._is_replaced():
                text = f"the checkpoint at {self._path!r} was replaced or deleted while it was read: load again"
                raise OSError(errno.ESTALE, text) from None
            raise
        if len(self._files) >= OPEN_FILES:
            with self._lock:
                os.close(self._files.pop(next(iter(self._files))))
        self._files[name] = file
        return file

    def _duplicate(self, name: str) -> int | None:
        """Return a duplicate of the original reader's descriptor of a file, or None if it has not opened it."""
        if self._original is None:
            return None
        with self._original._lock:
            file = self._original._files.get(name)
            return None if file is None else os.dup(file)

    def _open(self, name: str) -> int:
        mode = os.stat(name, dir_fd=self._directory, follow_symlinks=self._follow_links).st_mode
        if stat.S_ISLNK(mode) or stat.S_ISSOCK(mode):
            raise FormatError(f"{name} is a link or a socket; a checkpoint holds regular files only")
        if not stat.S_ISREG(mode):
            raise FormatError(f"{name} is not a regular file")  # not even opened, since opening a device can act on it
        links = 0 if self._follow_links else os.O_NOFOLLOW
        file = os.open(name, os.O_RDONLY | links | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._directory)
        if not stat.S_ISREG(os.fstat(file).st_mode):  # replaced since the check
            os.close(file)
            raise FormatError(f"{name} is not a regular file")
        return file
