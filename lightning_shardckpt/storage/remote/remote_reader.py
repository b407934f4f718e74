"""Read the files of a checkpoint that are objects of a store; their names begin with a part of the save's id.

A root index says what that is, so a copy of the objects in a directory is read in the same way.
"""

from __future__ import annotations

import re
import threading

from lightning_shardckpt.format.file_names import is_part
from lightning_shardckpt.format.index import ROOT_NAME
from lightning_shardckpt.storage.protocol import Reader
from lightning_shardckpt.storage.remote.objects import ObjectStore

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

    def original(self, name: str) -> tuple[Reader, str]:
        """Return the reader that this one reads from, and the name that a file has there."""
        return self._reader, self._stored(name)

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

    def key(self, name: str, objects: ObjectStore) -> str | None:
        """Return the key of a file among these objects; None if it is in another store."""
        return f"{self._folder}/{name}" if objects.is_same(self._objects) else None

    def close(self) -> None:
        """Do nothing: nothing is open."""
