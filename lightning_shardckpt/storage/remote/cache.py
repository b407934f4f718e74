"""How is a checkpoint read from a local copy of the files that are needed? Made on the first use, and kept.

The folder of a save has its id and the checksum of its root index in its name, so nothing is taken for another save's.
Ranks of a machine share it: who needs a file first downloads it under a lock, the others wait for that.
"""

from __future__ import annotations

import os
import re
import threading
import time

from lightning_shardckpt.header import checksum
from lightning_shardckpt.index import ROOT_NAME
from lightning_shardckpt.storage import locks
from lightning_shardckpt.storage.durable import make_directories, write_at
from lightning_shardckpt.storage.local import LocalReader
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.threads import start

_SAVE_ID = re.compile(rb'"save_id":"([0-9a-f]{32})"')
_WINDOW_BYTES = 8 << 20
_THREADS = 8
_POLL_S, _WAIT_S = 0.05, 3600.0


class CachedReader:
    """A checkpoint whose files are copied to a local folder as they are needed. Threads can share it."""

    is_far = False

    def __init__(self, reader: Reader, folder: str) -> None:
        self._reader, self._lock = reader, threading.Lock()
        root = read_all(reader, ROOT_NAME)
        found = _SAVE_ID.search(root)
        save_id = found[1].decode() if found else "unknown"
        self.folder = os.path.join(os.path.abspath(folder), f"{save_id}-{checksum(root)}")
        make_directories(self.folder, sync=False)
        self._local = LocalReader(self.folder)
        self._here: set[str] = set()

    def size(self, name: str) -> int:
        """Length of a file in bytes, as the store says."""
        return self._reader.size(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on; has the file copied before."""
        if name == ROOT_NAME:
            self._reader.read_into(name, offset, target)
            return
        with self._lock:
            if name not in self._here:
                have_copy(self._reader, name, self.folder)
                self._here.add(name)
            local = self._local.twin()
        try:
            local.read_into(name, offset, target)
        finally:
            local.close()

    def names(self) -> list[str]:
        """Every entry of the checkpoint, sorted."""
        return self._reader.names()

    def twin(self) -> CachedReader:
        """Itself: threads can share it."""
        return self

    def close(self) -> None:
        """Release what is open."""
        self._local.close()
        self._reader.close()


def have_copy(reader: Reader, name: str, folder: str) -> None:
    """Have the whole file in a folder, unless it is; other processes may be about to, too.

    Raises:
        OSError: naming the file here, such as for a full disk.
        TimeoutError: if another process takes too long to download it.
    """
    size, path = reader.size(name), os.path.join(folder, name)
    if _is_whole(path, size):
        return
    unfinished = path + ".part"
    file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _WAIT_S
        while locks.take(file) is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"another process has been downloading {path!r} for {_WAIT_S:g} s")
            time.sleep(_POLL_S)
        if _is_whole(path, size):  # by then another rank had downloaded it
            return
        _download(reader, name, size, file)
        os.fsync(file)  # a file of the right size counts as whole from here on
        os.rename(unfinished, path)
    finally:
        locks.release(file)


def _download(reader: Reader, name: str, size: int, file: int) -> None:
    os.ftruncate(file, size)
    begins, failures, lock = iter(range(0, size, _WINDOW_BYTES)), list[BaseException](), threading.Lock()

    def work() -> None:
        try:
            while not failures:
                with lock:
                    begin = next(begins, None)
                if begin is None:
                    return
                window = memoryview(bytearray(min(_WINDOW_BYTES, size - begin)))
                reader.read_into(name, begin, window)
                write_at(file, window, begin)
        except BaseException as error:
            failures.append(error)

    count = min(_THREADS, -(-size // _WINDOW_BYTES)) - 1
    threads = [threading.Thread(target=work, name="shardckpt-download") for _ in range(count)]
    start(*threads)
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _is_whole(path: str, size: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_size == size
    except FileNotFoundError:
        return False
