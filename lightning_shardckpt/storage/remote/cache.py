"""Read a checkpoint from local copies of its files, which are made when they are needed first, and kept.

The folder of a save has its id and the checksum of its root index in its name, so nothing is taken for another save's.
Ranks of a machine share it: who needs a file first downloads it under a lock, the others wait for that.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import closing, nullcontext

from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local import locks
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.local.posix import make_directories, write_at
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks

_SAVE_ID = re.compile(rb'"save_id":"([0-9a-f]{32})"')


class CachedReader:
    """A checkpoint whose files are copied to a local folder as they are needed. Threads can share it."""

    high_latency = False

    def __init__(self, reader: Reader, folder: str, tuning: Tuning = TUNING) -> None:
        self._reader, self._tuning, self._lock = reader, tuning, threading.Lock()
        root = read_all(reader, ROOT_NAME)
        found = _SAVE_ID.search(root)
        save_id = found[1].decode() if found else "unknown"
        self.folder = os.path.join(os.path.abspath(folder), f"{save_id}-{checksum(root)}")
        make_directories(self.folder, sync=False)
        self._here: set[str] = set()

    def size(self, name: str) -> int:
        """Length of a file in bytes, as the store says."""
        return self._reader.size(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on; downloads the file before, if it has to."""
        if name == ROOT_NAME:
            self._reader.read_into(name, offset, target)
            return
        with self._lock:
            if name not in self._here:
                download_file(self._reader, name, self.folder, self._tuning)
                self._here.add(name)
        with closing(LocalReader(self.folder)) as local:
            local.read_into(name, offset, target)

    def original(self, name: str) -> tuple[Reader, str]:
        """Return the reader that files are downloaded from, and a file's name there."""
        return self._reader, name

    def names(self) -> list[str]:
        """Return every entry of the checkpoint, sorted."""
        return self._reader.names()

    def clone(self) -> CachedReader:
        """Itself: threads can share it."""
        return self

    def close(self) -> None:
        """Do nothing: nothing is open."""


def download_file(reader: Reader, name: str, folder: str, tuning: Tuning = TUNING) -> None:
    """Download a whole file into a folder, unless it is there; other processes may be about to, too.

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
        if not locks.wait_for(file, tuning.turn_wait_s):
            raise TimeoutError(f"another process has been downloading {path!r} for {tuning.turn_wait_s:g} s")
        if _is_whole(path, size):  # by then another rank had downloaded it
            return
        _download(reader, name, size, file, tuning)
        os.fsync(file)  # a file of the right size counts as whole from here on
        os.rename(unfinished, path)
    finally:
        locks.release(file)


def _download(reader: Reader, name: str, size: int, file: int, tuning: Tuning) -> None:
    os.ftruncate(file, size)
    window_bytes = tuning.download_window_bytes

    def copy_window(begin: int) -> None:
        window = memoryview(bytearray(min(window_bytes, size - begin)))
        reader.read_into(name, begin, window)
        write_at(file, window, begin)

    begins = range(0, size, window_bytes)
    threads = min(tuning.download_threads, len(begins))
    run_tasks(begins, lambda: nullcontext(copy_window), threads=threads, name="shardckpt-download")


def _is_whole(path: str, size: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_size == size
    except FileNotFoundError:
        return False
