"""The calls that checkpoints need of an object store, over any file system of fsspec; each is retried.

Keys are fsspec's paths, without a protocol. A store with better calls of its own has a module for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.storage.remote.retry import IncompleteAnswerError, RetryPolicy, retry_call
from lightning_shardckpt.system.tuning import TUNING, Tuning

_T = TypeVar("_T")
_ONE_AT_A_TIME = threading.Lock()
_CHANGING = ("ETag", "etag", "md5", "crc32c", "generation", "created", "LastModified", "last_modified", "mtime", "size")


class ObjectStat(NamedTuple):
    """Size of an object, and what differs when another one has its key."""

    size: int
    tag: str


class ObjectStore:
    """Objects of any file system of fsspec; threads may share it."""

    def __init__(self, fs: Any, *, retry_policy: RetryPolicy, tuning: Tuning = TUNING) -> None:
        self.fs, self._retry_policy, self._tuning = fs, retry_policy, tuning
        protocols = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
        self.protocol = str(protocols[0])
        self.conditional = self.protocol == "memory"
        """Whether ``put`` compares and writes in one step, for all who write."""

    def key(self, url: str) -> str:
        """Return the key that a URL, or a key, names; without a slash at the end."""
        return str(self.fs._strip_protocol(url)).rstrip("/")

    def url(self, key: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.protocol}://{key.lstrip('/')}"

    def stat(self, key: str) -> ObjectStat:
        """Return what is known of an object. Raises FileNotFoundError."""

        def look() -> ObjectStat:
            found = self.fs.info(key)
            if found["type"] != "file":
                raise FileNotFoundError(f"no object {self.url(key)}")
            return ObjectStat(int(found["size"]), str([found[name] for name in _CHANGING if name in found]))

        return self._retried(f"looking at {self.url(key)}", look)

    def read(self, key: str, start: int, stop: int) -> bytes:
        """The bytes ``[start, stop)``, which are there: fewer are a failure of the network."""

        def get() -> bytes:
            found: bytes = self.fs.cat_file(key, start=start, end=stop)
            if len(found) != stop - start:
                raise IncompleteAnswerError(f"{len(found)} bytes came, {stop - start} were asked for")
            return found

        if stop == start:
            return b""
        return self._retried(f"reading bytes {start} to {stop} of {self.url(key)}", get)

    def put(self, key: str, content: bytes, expected: str | None) -> None:
        """Write an object in place of the one that has the tag ``expected``, or of none.

        Raises:
            FileExistsError: if another one is there.
        """

        def write() -> None:
            with _ONE_AT_A_TIME:
                with suppress(FileNotFoundError):
                    if self.stat(key).tag != expected:
                        raise FileExistsError(f"another object is at {self.url(key)}")
                self.fs.pipe_file(key, content)

        self._retried(f"writing {self.url(key)}", write)

    def upload(self, key: str, parts: Iterable[Bytes]) -> None:
        """Write a new object from its parts, which are not kept; nothing of it is left after an error."""
        with self.uploading(key) as put:
            for part in parts:
                put(part)

    @contextmanager
    def uploading(
        self, key: str, nbytes: int | None = None, *, replace: bool = True
    ) -> Iterator[Callable[[Bytes], object]]:
        """Write an object through a function that takes its parts, which are not kept, one after the other.

        An error inside leaves nothing of it. At the end it is in place of the one that was there. Of a file system that
        writes in place, an error may leave neither.

        Args:
            key: of the object.
            nbytes: how many bytes it will have, or a few less, if that is known.
            replace: whether another object may be there.

        Raises:
            FileExistsError: if it may not.
        """
        before = self._tag(key)
        if before is not None and not replace:
            raise FileExistsError(f"another object is at {self.url(key)}")
        file = self.fs.open(key, "wb", block_size=self._tuning.stream_block_bytes)
        try:
            yield file.write
            file.close()
        except BaseException:
            with suppress(Exception):  # what failed first is raised
                discard = getattr(file, "discard", None)
                if discard is not None:
                    discard()
            with suppress(Exception):
                file.closed = True  # else it would be completed when it is collected
            with suppress(Exception):
                if self._tag(key) != before:
                    self.fs.rm_file(key)
            raise

    def _tag(self, key: str) -> str | None:
        """Return an object's tag; None if there is no object."""
        try:
            return self.stat(key).tag
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> dict[str, int]:
        """Names, relative to ``folder``, and sizes of the objects below it."""

        def look() -> dict[str, int]:
            try:
                found = self.fs.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            start = folder.rstrip("/") + "/"
            files = {key: info for key, info in found.items() if key.startswith(start)}
            return {key.removeprefix(start): int(info["size"] or 0) for key, info in files.items()}

        self.fs.invalidate_cache()
        return self._retried(f"listing {self.url(folder)}", look)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._retried(f"deleting {self.url(key)}", lambda key=key: self.fs.rm_file(key))  # type: ignore[misc]

    def make_folder(self, folder: str) -> None:
        """Have a place for objects, where a file system wants to know."""
        self.fs.makedirs(folder, exist_ok=True)

    def drop_folder(self, folder: str) -> None:
        """Forget a place that is empty, where a file system knows it."""
        with suppress(OSError, NotImplementedError):
            self.fs.rmdir(folder)

    def unfinished(self, start: str) -> list[tuple[str, str]]:
        """Key and id of each upload that was begun to a key that begins with ``start``, as far as the store tells."""
        return []

    def abort(self, uploads: Iterable[tuple[str, str]]) -> None:
        """Have the store forget unfinished uploads."""

    def _retried(self, what: str, call: Callable[[], _T]) -> _T:
        return retry_call(what, call, self._retry_policy)
