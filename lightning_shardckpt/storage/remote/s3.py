"""Objects of S3: parts are uploaded side by side from memory, and a put compares in one step."""

from __future__ import annotations

import errno
import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.storage.remote.objects import ObjectStat, ObjectStore
from lightning_shardckpt.storage.remote.retry import RetryPolicy, status_of
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import Worker

_LARGER_AFTER = 2000  # parts of an object of unknown size
_DELETED_AT_ONCE = 1000  # S3's limit
_REFUSED, _BAD_REQUEST, _UNKNOWN = (409, 412), 400, 501  # HTTP; a condition does not hold, and nothing known


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what s3fs is made with: the user's options, and what is ours unless they say otherwise.

    Retries are ours (botocore's are off), a stalled connection is noticed, and listings are not remembered.
    """
    ours = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 30, "max_pool_connections": 32}
    return {"use_listings_cache": False, **given, "config_kwargs": {**ours, **given.get("config_kwargs", {})}}


class S3Objects(ObjectStore):
    """Objects of S3, or of what speaks its protocol, through s3fs."""

    def __init__(self, fs: Any, *, retry_policy: RetryPolicy, tuning: Tuning = TUNING) -> None:
        super().__init__(fs, retry_policy=retry_policy, tuning=tuning)
        fs.retries = 1  # of s3fs; ours are on top
        self.conditional = True

    def stat(self, key: str) -> ObjectStat:
        """Return what is known of an object.

        Raises:
            FileNotFoundError: if there is none.
            PermissionError: if the store takes the request for a bad one, which it does not say more of.
        """
        try:
            found = self.call("looking at", key, "head_object")
        except OSError as error:
            if status_of(error) != _BAD_REQUEST:
                raise
            raise PermissionError(
                errno.EACCES, f"looking at {self.url(key)}: {error}; have the credentials expired?"
            ) from error
        return ObjectStat(int(found["ContentLength"]), str(found["ETag"]))

    def put(self, key: str, content: bytes, expected: str | None) -> None:
        """Write an object in place of the one that has the tag ``expected``, or of none, if the store can compare.

        Raises:
            FileExistsError: if another one is there.
        """
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        try:
            self.call("writing", key, "put_object", Body=content, **condition)
        except FileNotFoundError:
            if expected is None:
                raise
            raise FileExistsError(f"the object at {self.url(key)} was deleted meanwhile") from None
        except OSError as error:
            if isinstance(error, FileExistsError) or status_of(error) in _REFUSED:
                raise FileExistsError(f"another object is at {self.url(key)}") from error
            if status_of(error) != _UNKNOWN:
                raise
            self.conditional = False
            super().put(key, content, expected)

    @contextmanager
    def uploading(
        self, key: str, nbytes: int | None = None, *, replace: bool = True
    ) -> Iterator[Callable[[Bytes], object]]:
        """Write an object through a function that takes its parts, which are not kept, one after the other.

        A small object is sent by one request at the end, a larger one in parts, several at a time. At the end it is in
        place of the one that was there. An error inside leaves that, and nothing of this.

        Raises:
            FileExistsError: if another one is there by then that may not be replaced.
        """
        upload = _Upload(self, key, nbytes, self._tuning)
        try:
            yield upload.add
            upload.wait()
            if not replace and self._tag(key) is not None:
                raise FileExistsError(f"another object is at {self.url(key)}")
            upload.complete()
        except BaseException as error:
            upload.give_up(error)
            raise

    def begin(self, key: str) -> str:
        """Return the id of a new upload. Where an answer was lost, there may be one more: not for long."""
        bucket, name = self._split(key)
        attempts = list[None]()

        def create() -> str:
            attempts.append(None)
            return str(self.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=name)["UploadId"])

        upload = self._retried(f"beginning {self.url(key)}", create)
        if len(attempts) > 1:
            self.abort([(of, other) for of, other in self.unfinished(key) if of == key and other != upload])
        return upload

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        wanted = list(keys)
        for begin in range(0, len(wanted), _DELETED_AT_ONCE):
            some = wanted[begin : begin + _DELETED_AT_ONCE]
            names = [{"Key": self._split(key)[1]} for key in some]
            found = self.call("deleting", some[0], "delete_objects", Delete={"Objects": names, "Quiet": True})
            for error in found.get("Errors", ()):
                raise OSError(f"deleting {error.get('Key')}: {error.get('Code')}: {error.get('Message')}")

    def make_folder(self, folder: str) -> None:
        """Do nothing: a store has no folders."""

    def drop_folder(self, folder: str) -> None:
        """Do nothing: a store has no folders."""

    def unfinished(self, start: str) -> list[tuple[str, str]]:
        """Key and id of each upload that was begun to a key that begins with ``start``."""
        bucket, prefix = self._split(start)
        found, after = list[tuple[str, str]](), dict[str, str]()
        while True:
            page = self.call("listing uploads to", start, "list_multipart_uploads", Prefix=prefix, **after)
            found += [(f"{bucket}/{one['Key']}", one["UploadId"]) for one in page.get("Uploads") or ()]
            if not page.get("IsTruncated"):
                return [(key, upload) for key, upload in found if key.startswith(start)]
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, uploads: Iterable[tuple[str, str]]) -> None:
        """Have the store forget unfinished uploads."""
        for key, upload in uploads:
            with suppress(FileNotFoundError):
                self.call("giving up", key, "abort_multipart_upload", UploadId=upload)

    def _split(self, key: str) -> tuple[str, str]:
        bucket, name, _ = self.fs.split_path(key)
        return bucket, name

    def call(self, doing: str, key: str, method: str, **about: Any) -> dict[str, Any]:
        """Return the answer to a request about an object; ``doing`` begins the message of an error."""
        bucket, name = self._split(key)
        if method not in ("delete_objects", "list_multipart_uploads"):
            about["Key"] = name

        def call() -> dict[str, Any]:
            body = {"Body": io.BytesIO(about["Body"])} if "Body" in about else {}  # read from its start each time
            found: dict[str, Any] = self.fs.call_s3(method, Bucket=bucket, **{**about, **body})
            return found

        return self._retried(f"{doing} {self.url(key)}", call)


def _part_bytes(number: int, nbytes: int | None, tuning: Tuning = TUNING) -> int:
    """The size of a part, from 1 on, of an object of ``nbytes``: all are as large as they must be; growing if unknown.

    >>> _part_bytes(1, 100) == _part_bytes(9000, 64 << 30) == _part_bytes(2000, None) == 8 << 20
    True
    >>> _part_bytes(2001, None) >> 20, _part_bytes(1, 1 << 40) >> 20
    (16, 105)
    """
    if nbytes is None:
        return tuning.upload_part_bytes << (number - 1) // _LARGER_AFTER
    return max(tuning.upload_part_bytes, -(-nbytes // tuning.upload_max_parts))


class _Upload:
    """An object that is being written: by one request if it is small, else in parts, a few at a time, by a thread each.

    Memory is bounded by those parts, and the one that is being filled.
    """

    def __init__(self, objects: S3Objects, key: str, nbytes: int | None, tuning: Tuning) -> None:
        self._objects, self._key, self._nbytes, self._tuning = objects, key, nbytes, tuning
        self._id: str | None = None
        self._number, self._rest = 1, bytearray()
        self._sent: dict[int, tuple[str, int]] = {}
        self._sending = deque[Worker]()

    def add(self, part: Bytes) -> None:
        """Take a copy of what comes next. Raises what sending an earlier part failed with."""
        left = memoryview(part)
        while len(left):
            part_bytes = _part_bytes(self._number, self._nbytes, self._tuning)
            room = part_bytes - len(self._rest)
            self._rest += left[:room]
            left = left[room:]
            if len(self._rest) == part_bytes:
                self._send_rest()

    def wait(self) -> None:
        """Send what is left, if there were parts, and wait for all of them. Raises what one failed with."""
        if self._id is not None and self._rest:
            self._send_rest()
        while self._sending:
            self._wait_for_first()

    def complete(self) -> None:
        """Have the object appear, in place of any other one."""
        self.wait()
        if self._id is None:
            self._objects.call("writing", self._key, "put_object", Body=bytes(self._rest))
            return
        listed = [{"PartNumber": number, "ETag": self._sent[number][0]} for number in sorted(self._sent)]
        about: dict[str, Any] = {"UploadId": self._id, "MultipartUpload": {"Parts": listed}}
        try:
            self._objects.call("completing", self._key, "complete_multipart_upload", **about)
        except FileNotFoundError:  # no such upload: was it completed, and the answer lost?
            if self._objects.stat(self._key).size != sum(size for _, size in self._sent.values()):
                raise

    def give_up(self, why: BaseException) -> None:
        """Wait for what is being sent, and have the store forget it; a note is added to the error if that fails."""
        while self._sending:
            self._sending.popleft().end(lambda interrupt: None)
        try:
            self._objects.abort([] if self._id is None else [(self._key, self._id)])
        except OSError as error:
            why.add_note(f"parts of the upload {self._id} may be left: {error}")

    def _send_rest(self) -> None:
        """Have a thread send the next part."""
        upload = self._id = self._id or self._objects.begin(self._key)
        while len(self._sending) >= self._tuning.upload_threads:
            self._wait_for_first()
        number, piece = self._number, bytes(self._rest)  # bytes, which BytesIO does not copy once more
        self._number, self._rest = number + 1, bytearray()

        def send() -> None:
            about = {"UploadId": upload, "PartNumber": number, "Body": piece}
            answer = self._objects.call(f"sending part {number} of", self._key, "upload_part", **about)
            self._sent[number] = answer["ETag"], len(piece)

        self._sending.append(Worker(send, name="shardckpt-upload"))
        self._sending[-1].start_or_run()

    def _wait_for_first(self) -> None:
        worker, interrupts = self._sending.popleft(), list[BaseException]()
        worker.end(interrupts.append)
        for error in filter(None, (worker.error, *interrupts)):
            raise error
