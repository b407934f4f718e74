"""Checkpoints in an object store: find, read, write and delete them.

Atomic commit without renames: the names of a save's objects begin with its id, so no save touches the objects of
another. No reader finds them until the root index is put, which is the commit. It is put only if the root index that
was there when the save began is still there. All other objects below the path then belong to saves that can't be
committed any more, and are deleted. The root index records the prefix, so a copy in a directory can be read, too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

from lightning_shardckpt.errors import CheckpointNotFoundError
from lightning_shardckpt.format.index import (
    HEAD_BYTES,
    PREFIXED_NAME,
    ROOT_NAME,
    is_export,
    is_ours,
    prefix_of,
    read_prefix,
)
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.storage.local_storage import LocalReader
from lightning_shardckpt.storage.object_store import ObjectStat, ObjectStore
from lightning_shardckpt.storage.posix import locked, make_directories, write_at
from lightning_shardckpt.storage.protocol import Bytes, Reader, names_of_save, read_all
from lightning_shardckpt.system.text import count_text, size_text

_START_BYTES = 16 << 10  # of a file, which usually have its header
_WINDOW_BYTES, _THREADS = 8 << 20, 8  # of downloads
_APPENDS = 5  # attempts
_DOWNLOAD_WAIT_S = 3600.0  # for another process of this machine that downloads the same file


class RemoteStorage:
    """Checkpoints in an object store; paths are URLs."""

    visible_within_s = 10.0

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def open(self, path: str) -> RemoteReader:
        """Open the checkpoint at ``path``.

        Raises:
            CheckpointNotFoundError: if there is none, or it is incomplete or not a checkpoint.
            PermissionError: if the store denies access.
        """
        folder = self._folder(path)
        try:
            return RemoteReader(self._objects, folder, self._objects.read_json(f"{folder}/{ROOT_NAME}"))
        except FileNotFoundError:
            raise CheckpointNotFoundError(self._why_none(path, folder)) from None

    def draft(self, path: str, save_id: str) -> RemoteDraft:
        """Return a draft of a checkpoint that will appear at ``path``."""
        return RemoteDraft(self._objects, path, self._folder(path), save_id)

    def remove(self, path: str) -> list[str]:
        """Delete the checkpoint at ``path``: first the root index, then its other files.

        Files of other saves, finished or not, stay.

        Returns:
            Notes about files that could not be deleted.

        Raises:
            CheckpointNotFoundError: if there is none.
        """
        folder = self._folder(path)
        names = self._objects.sizes(folder)
        if ROOT_NAME not in names:
            raise CheckpointNotFoundError(self._why_none(path, folder))
        prefix = _read_prefix(self._objects, folder, names[ROOT_NAME])
        files = [n for n in names if is_ours(n) and (n.startswith(prefix) or not PREFIXED_NAME.fullmatch(n))]
        self.remove_export(path)
        self._objects.delete([f"{folder}/{ROOT_NAME}"])
        try:
            self._objects.delete([f"{folder}/{name}" for name in files])
        except OSError as error:
            return [f"could not remove all files of the deleted checkpoint {path!r}: {error}"]
        return []

    def list_complete(self, folder: str) -> dict[str, str]:
        """Return the URLs of the complete checkpoints directly below a folder, with the tags of their root indexes."""
        found = sorted(self._objects.stats(self._objects.key(folder)).items())
        roots = {n.removesuffix(f"/{ROOT_NAME}"): str(stat) for n, stat in found if n.endswith(f"/{ROOT_NAME}")}
        return {f"{folder.rstrip('/')}/{name}": tag for name, tag in roots.items() if "/" not in name}

    def is_complete(self, path: str) -> bool:
        """Return True if a complete checkpoint is at the path."""
        return self.is_object(f"{path}/{ROOT_NAME}")

    def is_object(self, path: str) -> bool:
        """Return True if an object is at the path itself."""
        try:
            self._objects.stat(self._objects.key(path))
        except FileNotFoundError:
            return False
        return True

    def is_empty(self, path: str) -> bool:
        """Return True if no object is below the path."""
        return not any(self._objects.sizes(self._objects.key(path)).values())

    def read_object(self, path: str) -> bytes:
        """Return the content of the object at the path itself. Raises FileNotFoundError."""
        return self._objects.read_json(self._objects.key(path))

    def put_object(self, path: str, content: bytes) -> None:
        """Write the object at the path itself."""
        self._objects.upload(self._objects.key(path), [content])

    def append_to_object(self, path: str, content: bytes) -> None:
        """Add content that no other writer adds to the object at the path itself: it is written anew.

        Raises:
            FileExistsError: if others write it all the time.
        """
        key = self._objects.key(path)
        for left in reversed(range(_APPENDS)):
            old, tag = b"", None
            with suppress(FileNotFoundError):
                tag = self._objects.stat(key).tag
                old = self._objects.read_json(key)
            try:
                self._objects.put(key, old + content, tag)
                return
            except FileExistsError:
                if not left:
                    raise

    def names_below(self, path: str) -> list[str]:
        """Return the names of the objects below the path."""
        return [*self._objects.sizes(self._objects.key(path))]

    def delete_object(self, path: str) -> None:
        """Delete the object at the path itself."""
        self._objects.delete([self._objects.key(path)])

    def add(self, path: str, name: str, parts: Iterable[Bytes]) -> None:
        """Put an object beside the files of a checkpoint, for its export."""
        self._objects.upload(f"{self._objects.key(path)}/{name}", parts)

    def remove_export(self, path: str) -> None:
        """Delete the objects of an export."""
        folder = self._objects.key(path)
        self._objects.delete(f"{folder}/{name}" for name in self._objects.sizes(folder) if is_export(name))

    def _folder(self, path: str) -> str:
        """Return the key of a checkpoint. Raises ValueError for a bucket alone."""
        if not (folder := self._objects.key(path)):
            raise ValueError(f"{path!r} is no path of a checkpoint, such as 's3://bucket/name.ckpt'")
        return folder

    def _why_none(self, path: str, folder: str) -> str:
        names = self._objects.sizes(folder)
        if not names and not self.is_object(path):
            return f"no checkpoint at {path!r}: there is nothing at this path"
        roots = sorted(name for name in names if name.endswith(f"/{ROOT_NAME}"))
        hint = f"; did you mean {path.rstrip('/')}/{roots[0].removesuffix(f'/{ROOT_NAME}')}?" if roots else ""
        return (
            f"{path!r} is not a complete checkpoint: it has no {ROOT_NAME}; checkpoints of other programs can't be "
            f"read at a URL: download it first{hint}"
        )


def _read_prefix(objects: ObjectStore, folder: str, size: int) -> str:
    """Return the prefix of the names of a checkpoint's objects, or one that no name has."""
    return read_prefix(objects.read(f"{folder}/{ROOT_NAME}", 0, min(size, HEAD_BYTES))) or "?"


# ── drafts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RemoteDraft:
    """A draft of objects whose names begin with the save's id; the root index is held back until ``publish``."""

    def __init__(self, objects: ObjectStore, path: str, folder: str, save_id: str) -> None:
        self._objects, self._path, self._folder, self.prefix = objects, path, folder, prefix_of(save_id)
        self._before: ObjectStat | None = None
        self._begun = False
        self._root: bytes | None = None
        self._written: set[str] = set()
        self.notes: list[str] = []

    def begin(self) -> None:
        """Check the path, and remember its root index, on which the commit depends.

        Raises:
            FileExistsError: if an object is at the path, or objects below it that are not a checkpoint.
        """
        with suppress(FileNotFoundError):
            self._objects.stat(self._folder)
            raise FileExistsError(
                f"a file is in the way at {self._path!r}: a sharded checkpoint is a folder; move it or use another path"
            )
        with suppress(FileNotFoundError):
            self._before = self._objects.stat(self._key(ROOT_NAME))
        sizes = self._objects.sizes(self._folder)
        foreign = [name for name, size in sizes.items() if size and not PREFIXED_NAME.fullmatch(name)]
        if self._before is None and foreign:
            raise FileExistsError(
                f"{self._path!r} is not empty ({foreign[0]!r} …) and holds no checkpoint of this package, so it is not "
                "replaced; move it or use another path"
            )
        self._begun = True

    def write(self, name: str, parts: Iterable[Bytes], *, nbytes: int = 0) -> None:
        """Write a new object; the root index is held back, to be put last."""
        if name in self._written:
            raise FileExistsError(f"{name} was written already")
        self._written.add(name)
        if name == ROOT_NAME:
            self._root = b"".join(parts)
            return
        self._objects.upload(self._key(self.prefix + name), parts, nbytes)

    def publish(self) -> None:
        """Put the root index; then delete the replaced checkpoint and leftovers of other saves.

        Raises:
            FileExistsError: if another process saved to the path, or removed it, since this save began.
        """
        assert self._root is not None
        replaced = "?"
        with suppress(FileNotFoundError):
            if self._before is not None:
                replaced = _read_prefix(self._objects, self._folder, self._before.size)
        others = self._others()
        self._objects.delete(self._key(name) for name in others if is_export(name))  # which is of the replaced one
        compared = self._objects.conditional
        try:
            self._objects.put(self._key(ROOT_NAME), self._root, None if self._before is None else self._before.tag)
        except FileExistsError:
            raise FileExistsError(
                f"another process saved to {self._path!r}, or removed it, since this save began; let each job save to "
                "paths of its own"
            ) from None
        if compared and not self._objects.conditional:
            self.notes.append(
                f"the store of {self._path!r} can't compare and write in one step: of two jobs that save to one path "
                "in the same instant, the later one counts; let each job save to paths of its own"
            )
        self._begun = False
        try:
            self._delete_others(others, replaced)
        except OSError as error:
            self.notes.append(f"could not remove the replaced checkpoint at {self._path!r}: {error}")

    def discard(self) -> None:
        """Delete this save's objects, as far as possible."""
        if self._begun:
            with suppress(OSError):
                ours = [name for name in self._objects.sizes(self._folder) if name.startswith(self.prefix)]
                self._objects.delete(map(self._key, ours))

    def _others(self) -> dict[str, int]:
        """Return the sizes of other saves' objects below the path."""
        sizes = self._objects.sizes(self._folder)
        missing = sorted(name for name in self._written - {ROOT_NAME} if self.prefix + name not in sizes)
        if missing:
            raise FileExistsError(
                f"another process saved to {self._path!r} since this save began, and deleted {missing[0]} of this "
                "save; let each job save to paths of its own"
            )
        return {n: size for n, size in sizes.items() if is_ours(n) and not n.startswith(self.prefix)}

    def _delete_others(self, others: dict[str, int], replaced: str) -> None:
        """Delete the replaced checkpoint, and objects of saves that can't be committed any more after this commit.

        In a store without conditional puts, such a save might still be committed: its objects stay.
        """
        dead = {name for name in others if PREFIXED_NAME.fullmatch(name) and not name.startswith(replaced)}
        of_replaced = [] if self._before is None else [name for name in others if name not in dead]
        self._objects.delete(map(self._key, [*of_replaced, *(dead if self._objects.conditional else ())]))
        if dead and self._objects.conditional:
            self.notes.append(
                f"removed the leftover of an unfinished save at {self._path!r}: {count_text(len(dead), 'file')}, "
                f"{size_text(sum(others[name] for name in dead))}"
            )

    def _key(self, name: str) -> str:
        return f"{self._folder}/{name}"


# ── readers ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class RemoteReader:
    """Reader of a checkpoint in an object store. The root index is already in memory. Thread-safe."""

    high_latency = True

    def __init__(self, objects: ObjectStore, folder: str, root: bytes) -> None:
        self._objects, self._folder, self._root = objects, folder, root
        self._prefix = read_prefix(root[:HEAD_BYTES]) or ""
        self._sizes = {ROOT_NAME: len(root)}
        self._starts = {ROOT_NAME: root}  # the first bytes of files

    def size(self, name: str) -> int:
        """Return the length of a file in bytes."""
        if name not in self._sizes:
            with self._replacement_named():
                self._sizes[name] = self._objects.stat(self._key(name)).size
        return self._sizes[name]

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on, with one request at most once the size is known.

        A reader of the length of a header reads the header next, which then usually needs no request of its own.
        """
        size, stop = self.size(name), offset + len(target)
        if stop > size:
            raise EOFError(f"{name} ends at byte {size}, expected {stop}")
        if offset == 0 and stop <= 8 and name not in self._starts:
            self._starts[name] = self._read(name, 0, min(size, _START_BYTES))
        start = self._starts.get(name, b"")
        target[:] = start[offset:stop] if stop <= len(start) else self._read(name, offset, stop)

    def _read(self, name: str, start: int, stop: int) -> bytes:
        with self._replacement_named():
            return self._objects.read(self._key(name), start, stop)

    def _key(self, name: str) -> str:
        return f"{self._folder}/{self._prefix}{name}"

    @contextmanager
    def _replacement_named(self) -> Iterator[None]:
        """Raise an OSError with ``errno.ESTALE`` for a missing file if the root index is no longer the one in memory.

        A save that replaces a checkpoint deletes its files. A checkpoint that merely lacks a file keeps its root index.
        """
        try:
            yield
        except FileNotFoundError:
            now = b""
            with suppress(FileNotFoundError):
                now = self._objects.read_json(f"{self._folder}/{ROOT_NAME}")
            if now == self._root:
                raise
            url = self._objects.url(self._folder)
            raise OSError(errno.ESTALE, f"{url} was replaced or deleted while it was read: open it again") from None

    def names(self) -> list[str]:
        """Return all entries, sorted, without files and leftovers of other saves to the path."""
        return names_of_save(self._objects.sizes(self._folder), self._prefix)

    def close(self) -> None:
        """Do nothing: no connection is held."""


class CachedReader:
    """Reader that copies files to a local folder before their first read, and keeps them. Thread-safe.

    The folder's name is the checksum of the checkpoint's root index, so files of different saves are never mixed. The
    ranks of a machine share it: the first rank that needs a file downloads it under a lock, the others wait.
    """

    high_latency = False

    def __init__(self, reader: Reader, folder: str) -> None:
        self._reader = reader
        self._folder = os.path.join(os.path.abspath(folder), checksum(read_all(reader, ROOT_NAME)))
        make_directories(self._folder, sync=False)
        self._local, self._downloaded = LocalReader(self._folder), set[str]()

    def size(self, name: str) -> int:
        """Return the length of a file in bytes, from the store."""
        return self._reader.size(name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fill ``target`` with the file's bytes from ``offset`` on; download the file first if it is not cached."""
        if name == ROOT_NAME:
            self._reader.read_into(name, offset, target)
            return
        if name not in self._downloaded:
            self._download(name)
            self._downloaded.add(name)
        self._local.read_into(name, offset, target)

    def _download(self, name: str) -> None:
        """Download a whole file into the folder, unless this or another process has already done so."""
        size, path = self._reader.size(name), os.path.join(self._folder, name)
        unfinished = f"{path}.part"

        def copy_window(begin: int) -> None:
            window = memoryview(bytearray(min(_WINDOW_BYTES, size - begin)))
            self._reader.read_into(name, begin, window)
            assert file is not None
            write_at(file, window, begin)

        if _is_whole(path, size):
            return
        with locked(unfinished, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, _DOWNLOAD_WAIT_S) as file:
            if file is None:
                raise TimeoutError(f"another process has been downloading {path!r} for {_DOWNLOAD_WAIT_S:g} s")
            if _is_whole(path, size):  # another rank downloaded it meanwhile
                return
            os.ftruncate(file, size)
            with ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(copy_window, range(0, size, _WINDOW_BYTES)))
            os.fsync(file)  # from the rename on, a file of the right size counts as complete
            os.rename(unfinished, path)

    def names(self) -> list[str]:
        """Return all entries of the checkpoint, sorted."""
        return self._reader.names()

    def close(self) -> None:
        """Close all files."""
        self._local.close()
        self._reader.close()


def _is_whole(path: str, size: int) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_size == size
    except FileNotFoundError:
        return False
