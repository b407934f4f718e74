"""Read the files of a checkpoint directory, whatever its path names meanwhile."""

from __future__ import annotations

import errno
import os
import stat
import threading

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.storage.local import locks
from lightning_shardckpt.storage.local.posix import POSIX, FileSystem, add_path, naming

OPEN_FILES = 64  # of one reader; a process may often have 1,024


class LocalReader:
    """A checkpoint directory; files are opened relative to its descriptor, regular ones only.

    Links are refused, unless the directory is another program's: Hugging Face's cache consists of links.
    """

    high_latency = False

    def __init__(self, path: str, within: int | None = None, *, follow_links: bool = False) -> None:
        self._path, self._follow_links = path, follow_links
        self._directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=within)
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()  # around what closes a file, which a clone may be about to share
        self._original: LocalReader | None = None

    def clone(self) -> LocalReader:
        """Return another reader of the same directory, whatever its path is by now.

        Of files that are open here already it shares the position up to which the system has read ahead: if both read
        a file piece by piece in turn, that is one stream.
        """
        found = LocalReader(".", self._directory, follow_links=self._follow_links)
        found._path, found._original = self._path, self
        return found

    def stays(self, path: str) -> bool:
        """Return whether nobody will delete the files until this is closed; shares a lock that a deletion would need.

        Where there are no locks, a reader may find files missing that were not open when the path was replaced.
        """
        return locks.take(self._directory, shared=True) is not False and self.is_at(path)

    def is_at(self, path: str) -> bool:
        """Return whether the path still names this directory."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._directory))
        except FileNotFoundError:
            return False

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return os.fstat(self._file(name)).st_size

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""
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

    def link(self, name: str, path: str, file_system: FileSystem = POSIX) -> int:
        """Make a hard link to a file at ``path``; a descriptor of the file, valid until this reads another one.

        Raises:
            OSError: if that is not possible; nothing is there then.
        """
        file = self._file(name)
        file_system.link(name, self._directory, path)
        if not os.path.samestat(os.fstat(file), os.lstat(path)):
            os.unlink(path)
            raise FileNotFoundError(errno.ENOENT, "it was exchanged meanwhile", os.path.join(self._path, name))
        return file

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
            locks.release(self._directory)
            self._directory = -1

    def _file(self, name: str) -> int:
        if name in self._files:
            self._files[name] = self._files.pop(name)  # the last one used is the last one closed
            return self._files[name]
        with naming(os.path.join(self._path, name)):
            shared = self._shared(name)
            file = self._open(name) if shared is None else shared
        if len(self._files) >= OPEN_FILES:
            with self._lock:
                os.close(self._files.pop(next(iter(self._files))))
        self._files[name] = file
        return file

    def _shared(self, name: str) -> int | None:
        """The file that the reader this is a clone of has open, as a descriptor of our own."""
        if self._original is None:
            return None
        with self._original._lock:
            file = self._original._files.get(name)
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
