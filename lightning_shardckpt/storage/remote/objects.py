"""The operations on an object store that checkpoints need, over any fsspec file system; each is retried.

Keys are fsspec's paths, without a protocol. S3 has better calls than fsspec's: parallel multipart uploads from memory,
and conditional puts.

Retries are for transient failures: throttling, connection resets, timeouts. Clients of object stores have retries of
their own, with different rules, and nested retries multiply. The clients' retries are switched off where possible;
here, the number of attempts and the total time are bounded.
"""

from __future__ import annotations

import errno
import io
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple, TypeVar

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import Worker

_T = TypeVar("_T")

_TRANSIENT_STATUS = {408, 425, 429, 500, 502, 503, 504}  # HTTP
_FINAL = (FileNotFoundError, PermissionError, FileExistsError, IsADirectoryError, NotADirectoryError)
_CLIENTS = ("aiohttp.", "aiobotocore.", "botocore.", "urllib3.", "requests.", "http.client")
_MISUSE = ("Credential", "ParamValidation", "NoRegion", "Profile", "UnknownService", "InvalidURL")


class IncompleteAnswerError(OSError):
    """Raised if a store sent fewer bytes than were requested."""


def retry_call(action: str, call: Callable[[], _T], tuning: Tuning) -> _T:
    """Return the result of ``call``, which is repeated after transient failures.

    Args:
        action: the beginning of error messages, such as "reading s3://b/a".
        call: the request.
        tuning: the number and duration of attempts; pauses double, with jitter.

    Raises:
        FileExistsError: from ``call``, unchanged and at once, like everything that is not an OSError.
        FileNotFoundError, PermissionError: at once, with the action that failed.
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
            if isinstance(error, FileNotFoundError):  # a missing bucket is not named by all clients
                raise FileNotFoundError(errno.ENOENT, f"{action}: {_describe(error)}") from error
            if not is_transient(error):
                if isinstance(error, OSError) and not isinstance(error, _FINAL):
                    raise OSError(error.errno or errno.EIO, f"{action}: {_describe(error)}") from error
                raise
            pause = min(tuning.retry_pause_s * 2 ** (attempt - 1), tuning.retry_longest_pause_s)
            pause *= random.uniform(0.5, 1.0)
            elapsed = time.monotonic() - start
            if attempt >= tuning.retry_attempts or elapsed + pause > tuning.retry_total_s:
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
_TIME_FIELDS = ("created", "LastModified", "last_modified", "mtime")
_VERSION_FIELDS = ("ETag", "etag", "md5", "crc32c", "generation", *_TIME_FIELDS, "size")


class ObjectStat(NamedTuple):
    """Size of an object, and a tag that changes when the object is replaced."""

    size: int
    tag: str


class ObjectStore:
    """An object store over any fsspec file system. Thread-safe."""

    def __init__(self, fs: Any, tuning: Tuning = TUNING) -> None:
        self.fs, self._tuning = fs, tuning
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
        """Return the sizes of the objects below ``folder`` by their names relative to it; no markers of folders."""

        def look() -> dict[str, int]:
            try:
                infos = self.fs.find(folder, detail=True)
            except FileNotFoundError:
                return {}
            start = folder.rstrip("/") + "/"
            sizes = {key: int(info["size"] or 0) for key, info in infos.items() if key.startswith(start)}
            # consoles mark a folder by an empty object whose name ends with a slash
            return {key.removeprefix(start): size for key, size in sizes.items() if size or not key.endswith("/")}

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
        return retry_call(action, call, self._tuning)


_LARGER_AFTER = 2000  # parts, after which the part size doubles
_MAX_DELETED = 1000  # objects per request, S3's limit
_CONDITION_FAILED, _BAD_REQUEST, _NOT_IMPLEMENTED = (409, 412), 400, 501  # HTTP


def s3_options(user_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options for s3fs: the user's, over our defaults.

    By default, botocore's retries are off (``retry`` has ours), stalled connections time out, and listings are not
    cached.
    """
    ours = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 30, "max_pool_connections": 32}
    config = {**ours, **user_options.get("config_kwargs", {})}
    return {"use_listings_cache": False, **user_options, "config_kwargs": config}


class S3Objects(ObjectStore):
    """Object store of S3, or of a service with its protocol, through s3fs."""

    def __init__(self, fs: Any, tuning: Tuning = TUNING) -> None:
        super().__init__(fs, tuning)
        fs.retries = 1  # s3fs's own retries, replaced by ours
        self.conditional = True

    def stat(self, key: str) -> ObjectStat:
        """Return the size and the tag of an object.

        Raises:
            FileNotFoundError: if there is none.
            PermissionError: if the store answers 400 without a reason, as it does for expired credentials.
        """
        try:
            head = self.call("looking at", key, "head_object")
        except OSError as error:
            if http_status(error) != _BAD_REQUEST:
                raise
            raise PermissionError(
                errno.EACCES, f"looking at {self.url(key)}: {error}; have the credentials expired?"
            ) from error
        return ObjectStat(int(head["ContentLength"]), str(head["ETag"]))

    def put(self, key: str, content: bytes, expected: str | None) -> None:
        """Write an object if the current one has the tag ``expected`` (None: if there is none).

        Atomic, unless the store has no conditional writes.

        Raises:
            FileExistsError: if another object is there.
        """
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        try:
            self.call("writing", key, "put_object", Body=content, **condition)
        except FileNotFoundError:
            if expected is None:
                raise
            raise FileExistsError(f"the object at {self.url(key)} was deleted meanwhile") from None
        except OSError as error:
            if isinstance(error, FileExistsError) or http_status(error) in _CONDITION_FAILED:
                raise FileExistsError(f"another object is at {self.url(key)}") from error
            if http_status(error) != _NOT_IMPLEMENTED:
                raise
            self.conditional = False
            super().put(key, content, expected)

    def upload(self, key: str, parts: Iterable[Bytes]) -> None:
        """Write a new object from its parts, without keeping references to them; after an error, none of it is left.

        A small object is sent with one request, a larger one in parts, several at a time.
        """
        upload = _Upload(self, key, self._tuning)
        try:
            for part in parts:
                upload.add(part)
            upload.complete()
        except BaseException as error:
            upload.abort(error)
            raise

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; missing ones are no error."""
        all_keys = list(keys)
        for begin in range(0, len(all_keys), _MAX_DELETED):
            batch = all_keys[begin : begin + _MAX_DELETED]
            names = [{"Key": self._split(key)[1]} for key in batch]
            answer = self.call("deleting", batch[0], "delete_objects", Delete={"Objects": names, "Quiet": True})
            for error in answer.get("Errors", ()):
                raise OSError(f"deleting {error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

    def make_folder(self, folder: str) -> None:
        """Do nothing: a store has no folders."""

    def drop_folder(self, folder: str) -> None:
        """Do nothing: a store has no folders."""

    def _split(self, key: str) -> tuple[str, str]:
        bucket, name, _ = self.fs.split_path(key)
        return bucket, name

    def call(self, action: str, key: str, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of S3 on an object, with retries, and return the answer; errors begin with ``action``."""
        bucket, name = self._split(key)
        if not (bucket and name):
            raise ValueError(f"{self.url(key)!r} is no path of a checkpoint, such as 's3://bucket/name.ckpt'")
        if method != "delete_objects":
            parameters["Key"] = name

        def call() -> dict[str, Any]:
            # a new stream, since each attempt reads it from its start
            body = {"Body": io.BytesIO(parameters["Body"])} if "Body" in parameters else {}
            answer: dict[str, Any] = self.fs.call_s3(method, Bucket=bucket, **{**parameters, **body})
            return answer

        return self._retry(f"{action} {self.url(key)}", call)


def _part_bytes(number: int, tuning: Tuning = TUNING) -> int:
    """Return the size of part ``number``, counted from 1; later parts are larger, to stay within S3's limit of parts.

    >>> _part_bytes(2000) >> 20, _part_bytes(2001) >> 20
    (8, 16)
    """
    return tuning.upload_part_bytes << (number - 1) // _LARGER_AFTER


class _Upload:
    """An upload in progress: one request for a small object, else parts, of which each in flight has its own thread.

    Memory holds only the parts in flight and the part that is being filled.
    """

    def __init__(self, objects: S3Objects, key: str, tuning: Tuning) -> None:
        self._objects, self._key, self._tuning = objects, key, tuning
        self._id: str | None = None
        self._number, self._rest = 1, bytearray()
        self._sent: dict[int, tuple[str, int]] = {}
        self._sending = deque[Worker]()

    def add(self, part: Bytes) -> None:
        """Append a copy of the bytes. Raises the error of an earlier part that failed."""
        left = memoryview(part)
        while len(left):
            part_bytes = _part_bytes(self._number, self._tuning)
            room = part_bytes - len(self._rest)
            self._rest += left[:room]
            left = left[room:]
            if len(self._rest) == part_bytes:
                self._send_rest()

    def complete(self) -> None:
        """Make the object appear, in place of an older one. Raises the error of a part that failed."""
        if self._id is not None and self._rest:
            self._send_rest()
        while self._sending:
            self._wait_for_first()
        if self._id is None:
            self._objects.call("writing", self._key, "put_object", Body=bytes(self._rest))
            return
        listed = [{"PartNumber": number, "ETag": self._sent[number][0]} for number in sorted(self._sent)]
        parameters: dict[str, Any] = {"UploadId": self._id, "MultipartUpload": {"Parts": listed}}
        try:
            self._objects.call("completing", self._key, "complete_multipart_upload", **parameters)
        except FileNotFoundError:  # no such upload: perhaps it was completed, and the answer was lost
            if self._objects.stat(self._key).size != sum(size for _, size in self._sent.values()):
                raise

    def abort(self, cause: BaseException) -> None:
        """Wait for parts in flight, and abort the upload; if that fails, add a note to the error ``cause``."""
        while self._sending:
            self._sending.popleft().end(lambda interrupt: None)
        try:
            if self._id is not None:
                self._objects.call("giving up", self._key, "abort_multipart_upload", UploadId=self._id)
        except FileNotFoundError:
            return
        except OSError as error:
            cause.add_note(f"parts of the upload {self._id} may be left: {error}")

    def _send_rest(self) -> None:
        """Send the next part in a thread."""
        if self._id is None:
            self._id = str(self._objects.call("beginning", self._key, "create_multipart_upload")["UploadId"])
        upload_id = self._id
        while len(self._sending) >= self._tuning.upload_threads:
            self._wait_for_first()
        number, piece = self._number, bytes(self._rest)  # BytesIO shares bytes without a copy
        self._number, self._rest = number + 1, bytearray()

        def send() -> None:
            parameters = {"UploadId": upload_id, "PartNumber": number, "Body": piece}
            answer = self._objects.call(f"sending part {number} of", self._key, "upload_part", **parameters)
            self._sent[number] = answer["ETag"], len(piece)

        self._sending.append(Worker(send, name="shardckpt-upload"))
        self._sending[-1].start_or_run()

    def _wait_for_first(self) -> None:
        worker, interrupts = self._sending.popleft(), list[BaseException]()
        worker.end(interrupts.append)
        for error in filter(None, (worker.error, *interrupts)):
            raise error
