"""Read the files of a checkpoint that are objects of a store."""

from __future__ import annotations

import threading

from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.remote.objects import ObjectStore
from lightning_shardckpt.storage.remote.prefix import HEAD_BYTES, TAGGED, prefix_in

_START_BYTES = 16 << 10


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

    def key(self, name: str, objects: ObjectStore) -> str | None:
        """Return the key of a file among these objects; None if it is in another store."""
        return f"{self._folder}/{name}" if objects.is_same(self._objects) else None

    def close(self) -> None:
        """Do nothing: nothing is open."""
