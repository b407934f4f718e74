"""Objects of S3: parts are uploaded side by side from memory, and a put compares in one step."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.storage.remote.objects import Chunks, ObjectStat, ObjectStore
from lightning_shardckpt.storage.remote.retry import RetryPolicy, error_code, status_of
from lightning_shardckpt.system.tuning import TUNING, Tuning
from lightning_shardckpt.system.workers import TaskQueue, run_tasks

_T = TypeVar("_T")
_LARGER_AFTER = 2000  # parts of an object of unknown size
_DELETED_AT_ONCE = 1000  # S3's limit
_REFUSED, _UNKNOWN = (409, 412), 501  # HTTP: a condition does not hold, or is nothing that the store knows
_EXPIRED = ("ExpiredToken", "InvalidAccessKeyId", "TokenRefreshRequired", "400", "403")  # the last two answer HEAD
_RENEWAL = threading.Lock()


def options_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return what s3fs is made with: the user's options, and what is ours unless they say otherwise.

    Retries are ours (botocore's are off), a stalled connection is noticed, and listings are not remembered.
    """
    ours = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "read_timeout": 30, "max_pool_connections": 32}
    return {"use_listings_cache": False, **given, "config_kwargs": {**ours, **given.get("config_kwargs", {})}}


class S3Objects(ObjectStore):
    """Objects of S3, or of what speaks its protocol, through s3fs."""

    can_copy = True

    def __init__(self, fs: Any, *, retry_policy: RetryPolicy, tuning: Tuning = TUNING) -> None:
        super().__init__(fs, retry_policy=retry_policy, tuning=tuning)
        fs.retries = 1  # of s3fs; ours are on top
        self.conditional = True

    def stat(self, key: str) -> ObjectStat:
        """Return what is known of an object. Raises FileNotFoundError."""
        found = self._call("looking at", key, "head_object")
        return ObjectStat(int(found["ContentLength"]), str(found["ETag"]))

    def put(self, key: str, content: bytes, expected: str | None) -> None:
        """Write an object in place of the one that has the tag ``expected``, or of none, if the store can compare.

        Raises:
            FileExistsError: if another one is there.
        """
        condition = {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        try:
            self._call("writing", key, "put_object", Body=content, **condition)
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
        upload: str | None = None
        sending = _Sending(lambda number, piece: self._send(key, str(upload), number, piece), self._tuning)

        def take(number: int, piece: bytearray) -> None:
            nonlocal upload
            upload = upload or self._begin(key)
            sending.put(number, piece)

        chunks = Chunks(lambda number: _part_bytes(number, nbytes, self._tuning), take)
        try:
            try:
                yield chunks.add
                if upload is not None and chunks.rest:
                    take(chunks.number, chunks.rest)
            except BaseException as error:
                sending.fail(error)
            sent = sending.end()
            if not replace and self._tag(key) is not None:
                raise FileExistsError(f"another object is at {self.url(key)}")
            if upload is None:
                self._call("writing", key, "put_object", Body=bytes(chunks.rest))
            else:
                self._complete(key, upload, sent)
        except BaseException as error:
            self._give_up(key, upload, error)
            raise

    def copy(self, source: str, key: str, nbytes: int) -> None:
        """Have the store write an object that is the same as another one; a large one in parts, several at a time.

        Raises:
            FileNotFoundError: if the other one is not there.
            OSError: if the store can't do it.
        """
        bucket, name = self._split(source)
        about: dict[str, Any] = {"CopySource": {"Bucket": bucket, "Key": name}}
        part_bytes = max(self._tuning.copy_part_bytes, -(-nbytes // self._tuning.upload_max_parts))
        if nbytes <= part_bytes:
            self._call("copying to", key, "copy_object", **about)
            return
        upload, sent = self._begin(key), dict[int, tuple[str, int]]()

        def copy_part(begin: int) -> None:
            number, stop = begin // part_bytes + 1, min(begin + part_bytes, nbytes)
            part = {"PartNumber": number, "CopySourceRange": f"bytes={begin}-{stop - 1}"}
            doing = f"copying part {number} to"
            found = self._call(doing, key, "upload_part_copy", UploadId=upload, **about, **part)
            sent[number] = found["CopyPartResult"]["ETag"], stop - begin

        try:
            parts, threads = range(0, nbytes, part_bytes), self._tuning.copy_threads
            run_tasks(parts, lambda: nullcontext(copy_part), threads=threads, name="shardckpt-copy")
            self._complete(key, upload, sent)
        except BaseException as error:
            self._give_up(key, upload, error)
            raise

    def _give_up(self, key: str, upload: str | None, why: BaseException) -> None:
        try:
            self.abort([] if upload is None else [(key, upload)])
        except OSError as error:
            why.add_note(f"parts of the upload {upload} may be left: {error}")

    def _begin(self, key: str) -> str:
        """A new upload's id. Where an answer was lost, there may be one more, of which nobody knows: not for long."""
        attempts = list[None]()

        def begin() -> dict[str, Any]:
            attempts.append(None)
            bucket, name = self._split(key)
            found: dict[str, Any] = self.fs.call_s3("create_multipart_upload", Bucket=bucket, Key=name)
            return found

        upload = str(self._retried(f"beginning {self.url(key)}", begin)["UploadId"])
        if len(attempts) > 1:
            self.abort([(of, other) for of, other in self.unfinished(key) if of == key and other != upload])
        return upload

    def _send(self, key: str, upload: str, number: int, piece: bytes) -> tuple[str, int]:
        name = f"part {number} of"
        found = self._call(f"sending {name}", key, "upload_part", UploadId=upload, PartNumber=number, Body=piece)
        return found["ETag"], len(piece)

    def _complete(self, key: str, upload: str, sent: dict[int, tuple[str, int]]) -> None:
        listed = [{"PartNumber": number, "ETag": sent[number][0]} for number in sorted(sent)]
        try:
            about: dict[str, Any] = {"UploadId": upload, "MultipartUpload": {"Parts": listed}}
            self._call("completing", key, "complete_multipart_upload", **about)
        except FileNotFoundError:  # no such upload: was it completed, and the answer lost?
            if self.stat(key).size != sum(size for _, size in sent.values()):
                raise

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        wanted = list(keys)
        for begin in range(0, len(wanted), _DELETED_AT_ONCE):
            some = wanted[begin : begin + _DELETED_AT_ONCE]
            names = [{"Key": self._split(key)[1]} for key in some]
            found = self._call("deleting", some[0], "delete_objects", Delete={"Objects": names, "Quiet": True})
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
            page = self._call("listing uploads to", start, "list_multipart_uploads", Prefix=prefix, **after)
            found += [(f"{bucket}/{one['Key']}", one["UploadId"]) for one in page.get("Uploads") or ()]
            if not page.get("IsTruncated"):
                return [(key, upload) for key, upload in found if key.startswith(start)]
            after = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort(self, uploads: Iterable[tuple[str, str]]) -> None:
        """Have the store forget unfinished uploads."""
        for key, upload in uploads:
            with suppress(FileNotFoundError):
                self._call("giving up", key, "abort_multipart_upload", UploadId=upload)

    def _retried(self, what: str, call: Callable[[], _T]) -> _T:
        """As for any store. After an answer that credentials expired, they are read again, once, by a new client."""

        def renew_and_call() -> _T:
            client = self.fs.s3
            try:
                return call()
            except OSError as error:
                if error_code(error) not in _EXPIRED:
                    raise
            with _RENEWAL:
                if self.fs.s3 is client:  # else another thread has done it
                    self.fs.connect(refresh=True)
            try:
                return call()
            except OSError as error:
                if error_code(error) not in _EXPIRED:
                    raise
                raise PermissionError(f"{error}; have the credentials expired?") from error

        return super()._retried(what, renew_and_call)

    def _split(self, key: str) -> tuple[str, str]:
        bucket, name, _ = self.fs.split_path(key)
        return bucket, name

    def _call(self, doing: str, key: str, method: str, **about: Any) -> dict[str, Any]:
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


class _Sending:
    """Sends pieces from a few threads; ``put`` waits while all are busy, so that memory is bounded.

    Args:
        send: sends a piece with its number; returns its tag and size.
        tuning: how many pieces of the usual size are sent at a time; a larger one counts as several.
    """

    def __init__(self, send: Callable[[int, bytes], tuple[str, int]], tuning: Tuning) -> None:
        self._send, self._tuning = send, tuning
        self._sent: dict[int, tuple[str, int]] = {}
        self._room = SimpleQueue[None]()
        for _ in range(tuning.upload_threads):
            self._room.put(None)
        self._pieces = TaskQueue(
            self._send_piece, threads=tuning.upload_threads, name="shardckpt-upload", release=self._free_room
        )
        self.fail = self._pieces.fail

    def put(self, number: int, piece: bytearray) -> None:
        """Have a copy of a piece sent, when there is room for it. Raises what an earlier one failed with."""
        for _ in range(self._weight(len(piece))):
            self._room.get()
        self._pieces.put((number, bytes(piece)))  # which BytesIO does not copy once more

    def end(self) -> dict[int, tuple[str, int]]:
        """Return what ``send`` returned, by number, when all is sent, or raise the first failure. No thread is left."""
        self._pieces.end()
        return self._sent

    def _send_piece(self, piece: tuple[int, bytes]) -> None:
        self._sent[piece[0]] = self._send(*piece)

    def _free_room(self, piece: tuple[int, bytes]) -> None:
        for _ in range(self._weight(len(piece[1]))):
            self._room.put(None)

    def _weight(self, nbytes: int) -> int:
        return min(max(-(-nbytes // self._tuning.upload_part_bytes), 1), self._tuning.upload_threads)
