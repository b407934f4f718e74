"""Write exports to an object store: each file appears at once, and the one that makes them whole is the last.

Nothing is kept on a disk, and of a file no more in memory than its parts that are being sent. In place of an older
export a directory cannot appear at once: that is deleted first, so that the two are never mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

from lightning_shardckpt.storage.protocol import Contents, File, NewFile
from lightning_shardckpt.storage.remote.objects import ObjectStore


class RemoteOutputs:
    """``Outputs`` of a store; paths are URLs."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    def kind(self, path: str) -> Literal["file", "directory", "other"] | None:
        """Return what is at a path: an object, or some below it."""
        key = self._objects.key(path)
        with suppress(FileNotFoundError):
            self._objects.stat(key)
            return "file"
        return "directory" if self._objects.names(key) else None

    def contents(self, path: str) -> Contents:
        """The objects below a path."""
        folder = self._objects.key(path)
        sizes = self._objects.names(folder)

        def head(name: str, nbytes: int) -> bytes:
            return self._objects.read(f"{folder}/{name}", 0, min(sizes[name], nbytes))

        return Contents(sorted(sizes), head)

    @contextmanager
    def file(self, path: str, nbytes: int, *, overwrite: bool) -> Iterator[tuple[File, list[str]]]:
        """An object, which appears at the end; where the store knows no such thing, it grows there.

        Raises:
            FileExistsError: if one is there that may not be replaced, or objects below the path.
        """
        there = self.kind(path)
        if there is not None and not (overwrite and there == "file"):
            raise FileExistsError(f"something is at {path!r}, so nothing is written there")
        key = self._objects.key(path)
        self._objects.make_folder(key.rpartition("/")[0])
        with self._objects.uploading(key, nbytes, replace=overwrite) as put:
            yield put, []

    @contextmanager
    def directory(self, path: str, *, replaceable: Callable[[Contents], bool]) -> Iterator[tuple[NewFile, list[str]]]:
        """A function that makes objects below the path, one after the other; an error deletes them.

        Raises:
            FileExistsError: if something is there that is not replaceable; or if another process wrote there meanwhile.
        """
        there = self.kind(path)
        if there is not None and not (there == "directory" and replaceable(self.contents(path))):
            raise FileExistsError(f"something is at {path!r}, so nothing is written there")
        old, folder, written = self.contents(path).names, self._objects.key(path), list[str]()
        for is_mark in (True, False):  # first what makes it whole
            self._objects.delete(f"{folder}/{name}" for name in old if name.endswith(".json") == is_mark)

        @contextmanager
        def new(name: str, nbytes: int) -> Iterator[File]:
            key = f"{folder}/{name}"
            self._objects.make_folder(key.rpartition("/")[0])
            with self._objects.uploading(key, nbytes, replace=False) as put:
                yield put
            written.append(name)

        try:
            yield new, []
        except BaseException as error:
            try:
                self._delete(path, written)
            except OSError as why:
                error.add_note(f"files may be left at {path!r}: {why}")
            raise

    def _delete(self, path: str, names: Iterable[str]) -> None:
        folder = self._objects.key(path)
        self._objects.delete([f"{folder}/{name}" for name in names])
        self._objects.drop_folder(folder)
