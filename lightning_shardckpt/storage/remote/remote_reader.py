"""Read the files of a checkpoint that are objects of a store; their names begin with a part of the save's id.

A root index says what that is, so a copy of the objects in a directory is read in the same way.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import closing, nullcontext

from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.file_names import is_part
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.local import locks
from lightning_shardckpt.storage.local.local_reader import LocalReader
from lightning_shardckpt.storage.local.posix import make_directories, write_at
from lightning_shardckpt.storage.protocol import Reader, read_all
from lightning_shardckpt.storage.remote.objects import ObjectStore
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import run_tasks

# ── a local cache ─────────────────────────────────────────────────────────────────────────────────────────────────────
# Read a checkpoint from local copies of its files, which are made when they are needed first, and kept.
#
# The folder of a save has its id and the checksum of its root index in its name, so nothing is taken for another
# save's. Ranks of a machine share it: who needs a file first downloads it under a lock, the others wait for that.


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
                _download_file(self._reader, name, self.folder, self._tuning)
                self._here.add(name)
        with closing(LocalReader(self.folder)) as local:
            local.read_into(name, offset, target)

    def names(self) -> list[str]:
        """Return every entry of the checkpoint, sorted."""
        return self._reader.names()

    def clone(self) -> CachedReader:
        """Itself: threads can share it."""
        return self

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _download_file(reader: Reader, name: str, folder: str, tuning: Tuning = TUNING) -> None:
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


HEAD_BYTES = 4096  # of a root index, where it says what its prefix is
_PREFIX = re.compile(rb'"prefix":"([0-9a-f]{16}-)"')
TAGGED = re.compile(r"([0-9a-f]{16}-)[A-Za-z0-9_-][A-Za-z0-9._-]*")
_FOR_EXPORTS = ("huggingface.json", "peft.json")
_START_BYTES = 16 << 10


def is_ours(name: str) -> bool:
    """Return whether an object below a checkpoint's path has a name that saves give; nothing else is ever deleted.

    >>> is_ours("0123456789abcdef-x.json"), is_ours("model-meta-dist-00000.index.json"), is_ours("trainer-state.json")
    (True, True, True)
    >>> is_ours("epoch=1.ckpt/model-dist-00000-shard-00001.safetensors"), is_ours("config.yaml")
    (False, False)
    """
    return TAGGED.fullmatch(name) is not None or is_part(name) or name in _FOR_EXPORTS


def prefix_in(root: bytes) -> str | None:
    """Return what a root index says that names begin with, from its first bytes.

    >>> prefix_in(b'{"prefix":"5afe5afe5afe5afe-"}'), prefix_in(b"{}")
    ('5afe5afe5afe5afe-', None)
    """
    found = _PREFIX.search(root)
    return found[1].decode() if found else None


def prefix_of(save_id: str) -> str:
    """Return what the names of a save's files begin with, so that they are nobody else's.

    >>> prefix_of("5afe5afe5afe5afe" + "0" * 16)
    '5afe5afe5afe5afe-'
    """
    return save_id[:16] + "-"


class PrefixedReader:
    """Files under the names that indexes have for them."""

    def __init__(self, reader: Reader, prefix: str) -> None:
        self._reader, self._prefix, self.high_latency = reader, prefix, reader.high_latency

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        return self._reader.size(self._stored(name))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on."""
        self._reader.read_into(self._stored(name), offset, target)

    def names(self) -> list[str]:
        """Return every entry; those of other saves with what their names begin with."""
        return sorted(name.removeprefix(self._prefix) for name in self._reader.names())

    def clone(self) -> PrefixedReader:
        """Return another reader of the same files."""
        return PrefixedReader(self._reader.clone(), self._prefix)

    def close(self) -> None:
        """Release what is open."""
        self._reader.close()

    def _stored(self, name: str) -> str:
        return name if name == ROOT_NAME else self._prefix + name


class RemoteReader:
    """A checkpoint as objects; the root index was read when it was opened. Threads can share it."""

    high_latency = True

    def __init__(self, objects: ObjectStore, folder: str, root: bytes) -> None:
        self._objects, self._folder, self._root = objects, folder, root
        self._sizes = {ROOT_NAME: len(root)}
        self._starts: dict[str, bytes] = {}  # of files that were read from their start, for the header to come
        self._lock = threading.Lock()

    def size(self, name: str) -> int:
        """Length of a file in bytes."""
        with self._lock:
            found = self._sizes.get(name)
        if found is None:
            found = self._objects.stat(f"{self._folder}/{name}").size
            with self._lock:
                self._sizes[name] = found
        return found

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` from ``offset`` on, by one request at most."""
        size, stop = self.size(name), offset + len(target)
        if stop > size:
            raise EOFError(f"{name} ends at byte {size}, expected {stop}")
        start = self._root if name == ROOT_NAME else self._start_of(name, size, wanted=offset == 0 and stop <= 8)
        if stop <= len(start):
            target[:] = start[offset:stop]
        else:
            target[:] = self._objects.read(f"{self._folder}/{name}", offset, stop)

    def _start_of(self, name: str, size: int, *, wanted: bool) -> bytes:
        """The start of a file, if its length of the header was asked for: so that takes no request of its own."""
        if wanted:
            found = self._objects.read(f"{self._folder}/{name}", 0, min(size, _START_BYTES))
            with self._lock:
                self._starts[name] = found
        with self._lock:
            return self._starts.get(name, b"")

    def names(self) -> list[str]:
        """Return every entry, sorted; not what other saves to the path have, or left."""
        prefix, names = prefix_in(self._root[:HEAD_BYTES]), sorted(self._objects.names(self._folder))
        return [name for name in names if prefix is None or name.startswith(prefix) or not TAGGED.fullmatch(name)]

    def clone(self) -> RemoteReader:
        """Itself: threads can share it."""
        return self

    def close(self) -> None:
        """Do nothing: nothing is open."""
