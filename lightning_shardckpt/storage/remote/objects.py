"""The operations on an object store that checkpoints need, over any fsspec file system; each is retried.

Keys are fsspec's paths, without a protocol. A store with better calls than fsspec's has its own module (``s3``).

Retries are for transient failures: throttling, connection resets, timeouts. Clients of object stores have retries of
their own, with different rules, and nested retries multiply. The clients' retries are switched off where possible;
here, the number of attempts and the total time are bounded.
"""

from __future__ import annotations

import errno
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, TypeVar

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.tuning import TUNING, Tuning

_T = TypeVar("_T")

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}  # HTTP
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_CLIENTS = ("aiohttp.", "aiobotocore.", "botocore.", "urllib3.", "requests.", "http.client")
_MISUSE = ("Credential", "ParamValidation", "NoRegion", "Profile", "UnknownService", "InvalidURL")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number and duration of attempts: pauses double from ``first_pause_s`` on, with jitter."""

    attempts: int = 6
    first_pause_s: float = 0.2
    longest_pause_s: float = 10.0
    total_s: float = 120.0


class IncompleteAnswerError(OSError):
    """Raised if a store sent fewer bytes than were requested."""


def retry_call(action: str, call: Callable[[], _T], policy: RetryPolicy) -> _T:
    """Return the result of ``call``, which is repeated after transient failures.

    Args:
        action: the beginning of error messages, such as "reading s3://b/a".
        call: the request.
        policy: the number and duration of attempts.

    Raises:
        FileNotFoundError, FileExistsError: from ``call``, unchanged and at once, like everything that is not an
            OSError.
        PermissionError: with the action that was denied.
        OSError: with the action, the number of attempts, the time and the last failure.
    """
    start = time.monotonic()
    for attempt in count(1):
        try:
            return call()
        except Exception as error:
            if isinstance(error, PermissionError):
                raise PermissionError(
                    errno.EACCES, f"{action}: the store does not permit it: {_describe(error)}; check the credentials"
                ) from error
            if not is_transient(error):
                if isinstance(error, OSError) and not isinstance(error, _FINAL):
                    raise OSError(error.errno or errno.EIO, f"{action}: {_describe(error)}") from error
                raise
            pause = min(policy.first_pause_s * 2 ** (attempt - 1), policy.longest_pause_s)
            pause *= random.uniform(0.5, 1.0)
            elapsed = time.monotonic() - start
            if attempt >= policy.attempts or elapsed + pause > policy.total_s:
                times = "once" if attempt == 1 else f"{attempt} times"
                raise OSError(
                    errno.EIO, f"{action}: failed {times} within {elapsed:.1f} s, at last with {_describe(error)}"
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed later.

    >>> is_transient(ConnectionResetError()), is_transient(PermissionError()), is_transient(ValueError())
    (True, False, False)
    """
    if isinstance(error, _FINAL):
        return False
    status = http_status(error)
    if status is not None:
        return status in _TRANSIENT_STATUS
    if isinstance(error, OSError | EOFError | TimeoutError):
        return not (isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.ENOSPC, errno.EROFS))
    cls = type(error)
    return f"{cls.__module__}.".startswith(_CLIENTS) and not any(word in cls.__name__ for word in _MISUSE)


def http_status(error: BaseException) -> int | None:
    """Return the HTTP status of an error or its causes, or None if no client set one."""
    return next((status for status in map(_status, _chain(error)) if status is not None), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of an error of botocore, aiohttp, gcsfs or azure, or None."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    if type(error).__module__ == "aiohttp.http_exceptions":  # the answer was not valid HTTP, for instance cut short
        return None
    for name in ("status_code", "status", "code"):
        status = getattr(error, name, None)
        if isinstance(status, int) and 400 <= status < 600:
            return status
    return None


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error) or 'no message'}"


_PUT_LOCK = threading.Lock()
_VERSION_FIELDS = (
    "ETag",
    "etag",
    "md5",
    "crc32c",
    "generation",
    "created",
    "LastModified",
    "last_modified",
    "mtime",
    "size",
)


class ObjectStat(NamedTuple):
    """Size of an object, and a tag that changes when the object is replaced."""

    size: int
    tag: str


class ObjectStore:
    """An object store over any fsspec file system. Thread-safe."""

    def __init__(self, fs: Any, *, retry_policy: RetryPolicy, tuning: Tuning = TUNING) -> None:
        self.fs, self._retry_policy, self._tuning = fs, retry_policy, tuning
        protocols = [fs.protocol] if isinstance(fs.protocol, str) else list(fs.protocol)
        self.protocol = str(protocols[0])
        self.conditional = self.protocol == "memory"
        """True if ``put`` compares and writes atomically with respect to all writers."""

    def key(self, url: str) -> str:
        """Return the key of a URL or a key, without a trailing slash."""
        return str(self.fs._strip_protocol(url)).rstrip("/")

    def url(self, key: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.protocol}://{key.lstrip('/')}"

    def stat(self, key: str) -> ObjectStat:
        """Return the size and the tag of an object. Raises FileNotFoundError."""

        def look() -> ObjectStat:
            info = self.fs.info(key)
            if info["type"] != "file":
                raise FileNotFoundError(f"no object {self.url(key)}")
            return ObjectStat(int(info["size"]), str([info[name] for name in _VERSION_FIELDS if name in info]))

        return self._retry(f"looking at {self.url(key)}", look)

    def read(self, key: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``. They must exist: a shorter answer is retried as a network failure."""

        def get() -> bytes:
            content: bytes = self.fs.cat_file(key, start=start, end=stop)
            if len(content) != stop - start:
                raise IncompleteAnswerError(f"{len(content)} bytes came, {stop - start} were asked for")
            return content

        if stop == start:
            return b""
        return self._retry(f"reading bytes {start} to {stop} of {self.url(key)}", get)

    def put(self, key: str, content: bytes, expected: str | None) -> None:
        """Write an object if the current one has the tag ``expected`` (None: if there is none).

        Raises:
            FileExistsError: if another object is there.
        """

        def write() -> None:
            with _PUT_LOCK:
                with suppress(FileNotFoundError):
                    if self.stat(key).tag != expected:
                        raise FileExistsError(f"another object is at {self.url(key)}")
                self.fs.pipe_file(key, content)

        self._retry(f"writing {self.url(key)}", write)

    def upload(self, key: str, parts: Iterable[Bytes]) -> None:
        """Write a new object from its parts, without keeping references to them; after an error, none of it is left.

        File systems that write in place may also lose an older object then.
        """
        before = self._tag(key)
        file = self.fs.open(key, "wb", block_size=self._tuning.stream_block_bytes)
        try:
            for part in parts:
                file.write(part)
            file.close()
        except BaseException:
            with suppress(Exception):  # the first error is raised
                discard = getattr(file, "discard", None)
                if discard is not None:
                    discard()
            with suppress(Exception):
                file.closed = True  # else garbage collection would complete the upload
            with suppress(Exception):
                if self._tag(key) != before:
                    self.fs.rm_file(key)
            raise

    def _tag(self, key: str) -> str | None:
        """Return the tag of an object, or None if there is none."""
        try:
            return self.stat(key).tag
        except FileNotFoundError:
            return None

    def names(self, folder: str) -> dict[str, int]:
        """Return the sizes of the objects below ``folder`` by their names relative to it."""

        def look() -> dict[str, int]:
            try:
                infos = self.fs.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            start = folder.rstrip("/") + "/"
            return {
                key.removeprefix(start): int(info["size"] or 0) for key, info in infos.items() if key.startswith(start)
            }

        self.fs.invalidate_cache()
        return self._retry(f"listing {self.url(folder)}", look)

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        for key in keys:
            with suppress(FileNotFoundError):
                self._retry(f"deleting {self.url(key)}", lambda key=key: self.fs.rm_file(key))  # type: ignore[misc]

    def make_folder(self, folder: str) -> None:
        """Create a folder, if the file system has folders."""
        self.fs.makedirs(folder, exist_ok=True)

    def drop_folder(self, folder: str) -> None:
        """Remove an empty folder, if the file system has folders."""
        with suppress(OSError, NotImplementedError):
            self.fs.rmdir(folder)

    def _retry(self, action: str, call: Callable[[], _T]) -> _T:
        return retry_call(action, call, self._retry_policy)
