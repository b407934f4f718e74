"""Objects in S3: parallel multipart uploads from memory, and conditional puts."""

from __future__ import annotations

import errno
import io
from collections import deque
from collections.abc import Iterable
from typing import Any

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.storage.remote.objects import ObjectStat, ObjectStore, RetryPolicy, http_status
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import Worker

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

    def __init__(self, fs: Any, *, retry_policy: RetryPolicy, tuning: Tuning = TUNING) -> None:
        super().__init__(fs, retry_policy=retry_policy, tuning=tuning)
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
