"""The operations on an object store that checkpoints need: through obstore, or fsspec for ``memory://`` and the web.

Options have fsspec's names, and credentials are found as botocore finds them. obstore retries what passes, such as
throttling and connections that break, within the bounds of ``Tuning``. Errors are OSErrors that name action and URL.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import MAX_JSON_BYTES
from lightning_shardckpt.storage.local_files import locked
from lightning_shardckpt.storage.protocol import Bytes
from lightning_shardckpt.system.host import TUNING, Tuning

UPLOAD_LOCK = f"lightning-shardckpt-uploads-{os.getuid()}"  # a file in the folder for temporary ones
_UPLOADS = 4  # of pieces at a time, each in memory
_MOST_PIECES = 10_000  # of an object in S3
_first_process = list[int]()  # the process that used obstore
_ERRORS = {  # of obstore
    **dict.fromkeys(("AlreadyExistsError", "PreconditionError"), errno.EEXIST),
    **dict.fromkeys(("PermissionDeniedError", "UnauthenticatedError"), errno.EACCES),
}


class ObjectStat(NamedTuple):
    """The size of an object, and a tag that changes when it is replaced."""

    size: int
    tag: dict[str, str]


class ObjectStore:
    """A bucket, whose objects are named by URLs. Thread-safe.

    Args:
        url: of anything in the bucket; a ValueError if its protocol is unknown, or it names no bucket.
        options: by fsspec's names, and ``throttle_uploads``: only one process of each machine uploads at a time. An
            unknown one is a TypeError, a lack of credentials a PermissionError.
        tuning: sizes, attempts and times of requests.
    """

    def __init__(self, url: str, options: Mapping[str, Any], tuning: Tuning = TUNING) -> None:
        protocol, _, rest = url.partition("://")
        given, self._is_forkable, self.conditional = dict(options), protocol in ("memory", "http", "https"), True
        self._throttles, self._part_bytes = given.pop("throttle_uploads", False), tuning.upload_part_bytes
        if self._is_forkable:
            self._root = f"{protocol}://"
            self._bucket: Any = _FsspecBucket(protocol, given)
        else:
            self._root = f"{protocol}://{rest.partition('/')[0]}/"
            self._bucket = _open_bucket(url, given, tuning)

    def stat(self, url: str) -> ObjectStat:
        """Return the size and the tag of an object. Raises FileNotFoundError."""
        with self._call("looking at", url) as (bucket, key):
            return _stat(bucket.head(key))

    def tag(self, url: str) -> dict[str, str] | None:
        """Return the tag of an object; None if there is none at the URL itself."""
        with suppress(FileNotFoundError):
            return self.stat(url).tag
        return None

    def read(self, url: str, start: int, stop: int) -> bytes:
        """Return the bytes ``[start, stop)``, which must exist."""
        if start == stop:
            return b""
        with self._call(action := f"reading bytes {start} to {stop} of", url) as (bucket, key):
            content = bytes(bucket.get_range(key, start=start, end=stop))
        if len(content) != stop - start:
            raise OSError(errno.EIO, f"{action} {url}: {len(content)} bytes came")
        return content

    def get(self, url: str) -> tuple[bytes, dict[str, str]]:
        """Return a whole object and its tag. Raises FileNotFoundError, and FormatError if JSON can't be so large."""
        with self._call("reading", url) as (bucket, key):
            found = bucket.get(key)
            size, tag = _stat(found.meta)
            if size > MAX_JSON_BYTES:
                raise FormatError(f"{url} has {size} bytes, more than {MAX_JSON_BYTES}")
            return bytes(found.bytes()), tag

    def put(self, url: str, content: bytes, expected: Mapping[str, str] | None) -> None:
        """Write an object if the current one has the tag ``expected`` (None: if there is none); else FileExistsError.

        The content must be of this save alone: an object that has it already counts as written. In a store that can't
        compare and write in one step, which sets ``conditional`` to False, the tag is compared right before the put.
        """
        for is_last in (False, True):  # obstore doesn't repeat a conditional put whose answer was lost
            try:
                mode: Any = expected or "create"
                if not self.conditional:
                    if self.tag(url) != expected:
                        raise FileExistsError(f"another object is at {url}")
                    mode = "overwrite"
                with self._call("writing", url) as (bucket, key):
                    bucket.put(key, content, mode=mode, use_multipart=False)
                return
            except OSError as error:
                with suppress(OSError, FormatError):  # else an attempt succeeded, and its answer was lost
                    if self.get(url)[0] == content:
                        return
                if isinstance(error, FileNotFoundError) and expected is not None:
                    raise FileExistsError(f"the object at {url} was deleted meanwhile") from error
                if is_last or isinstance(error, FileExistsError | PermissionError | FileNotFoundError):
                    raise
                self.conditional = self.conditional and "501 Not Implemented" not in str(error)

    def upload(self, url: str, parts: Iterable[Bytes], nbytes: int = 0) -> None:
        """Write a new object from its parts: if it may be large, of ``nbytes``, in pieces, as many as S3 takes."""
        piece_bytes, copies = max(self._part_bytes, -(-nbytes // _MOST_PIECES)), map(bytes, parts)
        turn: Any = locked(os.path.join(tempfile.gettempdir(), UPLOAD_LOCK)) if self._throttles else nullcontext()
        with turn, self._call("writing", url) as (bucket, key):
            if nbytes <= piece_bytes:
                bucket.put(key, b"".join(copies), use_multipart=False)
            else:  # obstore keeps references to its input, hence the copies
                bucket.put(key, copies, use_multipart=True, chunk_size=piece_bytes, max_concurrency=_UPLOADS)

    def list(self, folder: str) -> dict[str, ObjectStat]:
        """Return the objects below a folder by relative name. Empty ones may be a console's markers of folders."""
        with self._call("listing", folder) as (bucket, key):
            found = chain.from_iterable(bucket.list(key))
            return {entry["path"].removeprefix(key).removeprefix("/"): _stat(entry) for entry in found}

    def delete(self, urls: Iterable[str]) -> None:
        """Delete objects, many with one request; missing ones are no error."""
        all_urls = [*urls]
        try:
            if all_urls:
                with self._call("deleting", all_urls[0]) as (bucket, _):
                    bucket.delete([*map(self._key, all_urls)])
        except PermissionError:
            raise
        except OSError:  # a missing object stops it on GCS and Azure, a lost connection on S3; others lack it
            for url in all_urls:
                with suppress(FileNotFoundError), self._call("deleting", url) as (bucket, key):
                    bucket.delete(key)

    def _key(self, url: str) -> str:
        return f"{url}/".removeprefix(self._root).strip("/")

    @contextmanager
    def _call(self, action: str, url: str) -> Iterator[tuple[Any, str]]:
        """Yield the bucket and the key of a URL; errors become OSErrors that begin with the action."""
        if not self._is_forkable:  # a fork does not copy obstore's threads
            _first_process[:] = _first_process or [os.getpid()]
            if os.getpid() != _first_process[0]:
                raise RuntimeError(
                    f"{self._root} can't be reached in this process, which was forked from one that had used an object "
                    "store: start processes with spawn, or before an object store is used"
                )
        try:
            yield self._bucket, self._key(url)
        except Exception as error:
            is_missing, name = isinstance(error, FileNotFoundError), type(error).__name__
            if not is_missing and not type(error).__module__.startswith(("obstore.", "aiohttp.")):
                raise
            code = errno.ENOENT if is_missing else _ERRORS.get(name, errno.EIO)
            text = " ".join(str(error).partition("\n\nDebug source")[0].split()) or name
            advice = "; the store does not permit it: check the credentials" if code == errno.EACCES else ""
            raise OSError(code, f"{action} {url}: {text}{advice}") from error


def _stat(found: Any) -> ObjectStat:
    return ObjectStat(found["size"], {name: found[name] for name in ("e_tag", "version") if found.get(name)})


_KEPT_FOR = timedelta(minutes=6)  # obstore asks again five minutes before the end: botocore renews when asked
_PROTOCOLS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "az", "abfss": "az"}
_OPTIONS: dict[str, dict[str, str]] = {
    "s3": {
        "endpoint_url": "endpoint",
        "client_kwargs.endpoint_url": "endpoint",
        "client_kwargs.region_name": "region",
        "anon": "skip_signature",
        "requester_pays": "request_payer",
        "s3_additional_kwargs.ServerSideEncryption": "server_side_encryption",
        "s3_additional_kwargs.SSEKMSKeyId": "sse_kms_key_id",
        **dict.fromkeys(("key", "secret", "token", "profile"), ""),
    },
    "gs": {"token": "token", "endpoint_url": "base_url"},
    "az": {
        **{name: name for name in ("account_name", "account_key", "tenant_id", "client_id", "client_secret")},
        "sas_token": "sas_key",
        "anon": "skip_signature",
    },
}
"""obstore's names by those of s3fs, gcsfs and adlfs; a dot leads into a dictionary. Empty: for ``find_aws``."""
_CLIENT = ("config_kwargs.connect_timeout", "config_kwargs.read_timeout", "client_kwargs.verify")


def _open_bucket(url: str, options: Mapping[str, Any], tuning: Tuning) -> Any:
    """Return obstore's store for the bucket of a URL; raises like ``ObjectStore``."""
    protocol, _, rest = url.partition("://")
    bucket, kind = rest.partition("/")[0], _PROTOCOLS.get(protocol)
    if kind is None or not bucket:
        protocols = ", ".join(f"{name}://" for name in (*_PROTOCOLS, "memory"))
        raise ValueError(f"{url!r} is no path of a checkpoint: they are in file systems or at {protocols}")
    try:
        import obstore.store
    except ImportError as error:
        raise ImportError(f'{url!r} can\'t be opened: {error}; pip install "lightning-shardckpt[s3]"') from error

    given = dict[str, Any]()
    for name, value in options.items():
        given |= {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, Mapping) else {name: value}
    known = (*_OPTIONS[kind], *_CLIENT)
    if unknown := sorted(given.keys() - {*known}):
        raise TypeError(
            f"unknown storage_options for {url!r}: {', '.join(unknown)}; known are {', '.join(sorted(known))} (a dot "
            "leads into a dictionary) and throttle_uploads"
        )
    config = {new: given[name] for name, new in _OPTIONS[kind].items() if new and name in given}
    if kind == "gs" and (token := config.pop("token", None)) is not None:
        is_file, is_anonymous = os.path.exists(token), token == "anon"
        name = "skip_signature" if is_anonymous else "application_credentials" if is_file else "bearer_token"
        config[name] = is_anonymous or token
    found, provider = find_aws(url, given) if kind == "s3" else ({}, None)
    verify = given.get("client_kwargs.verify", True)
    client: dict[str, Any] = {
        "allow_http": True,
        "timeout": timedelta(minutes=10),  # of a stalled connection
        "connect_timeout": timedelta(seconds=given.get("config_kwargs.connect_timeout", 10)),
        "read_timeout": timedelta(seconds=given.get("config_kwargs.read_timeout", 30)),
        "allow_invalid_certificates": verify is False,
        **({} if isinstance(verify, bool) else {"root_certificate": Path(verify).read_bytes()}),
    }
    retry: dict[str, Any] = {
        "max_retries": tuning.retry_attempts - 1,
        "retry_timeout": timedelta(seconds=tuning.retry_total_s),
        "backoff": {"init_backoff": timedelta(seconds=tuning.retry_pause_s)},  # later ones double
    }
    root, settings = f"{'gs' if kind == 'gs' else protocol}://{bucket}", {**found, **config}
    open_url: Any = obstore.store.from_url  # its typed dictionaries can't be built from tables
    return open_url(root, config=settings, client_options=client, retry_config=retry, credential_provider=provider)


def find_aws(url: str, given: Mapping[str, Any]) -> tuple[dict[str, str], Callable[[], dict[str, Any]] | None]:
    """Find the settings of S3 that are not ``given`` as botocore does: in the environment, profiles, files and roles.

    Returns the region and the endpoint, if any, and without ``anon`` a function that returns credentials for obstore,
    renewed by botocore. Raises PermissionError without credentials.
    """
    from botocore.configprovider import ConfiguredEndpointProvider  # type: ignore[import-untyped]  # comes with obstore
    from botocore.credentials import Credentials  # type: ignore[import-untyped]
    from botocore.session import Session  # type: ignore[import-untyped]

    session = Session(profile=given.get("profile"))
    endpoint = ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()
    settings = {"region": session.get_config_variable("region"), "endpoint": endpoint}
    found = {name: value for name, value in settings.items() if value}
    if given.get("anon"):
        return found, None
    own = Credentials(*map(given.get, ("key", "secret", "token"))) if "key" in given else None
    if (credentials := own or session.get_credentials()) is None:
        raise PermissionError(
            errno.EACCES,
            f"no credentials for {url!r}: set AWS_PROFILE or AWS_ACCESS_KEY_ID, or storage_options (key, secret; or "
            "anon=True)",
        )

    def provide() -> dict[str, Any]:
        key, secret, token = credentials.get_frozen_credentials()[:3]
        expires_at = datetime.now(UTC) + _KEPT_FOR
        return {"access_key_id": key, "secret_access_key": secret, "token": token, "expires_at": expires_at}

    return found, provide


class _FsspecBucket:
    """This process's memory, or servers of the web, with the methods of a bucket of obstore. No retries."""

    _putting = threading.Lock()

    def __init__(self, protocol: str, options: Mapping[str, Any]) -> None:
        import fsspec  # type: ignore[import-untyped]  # comes with lightning; here: only these URLs need it

        self._root, self._fs = f"{protocol}://", fsspec.filesystem(protocol, **options)

    def head(self, key: str) -> dict[str, Any]:
        try:
            found = self._fs.info(self._root + key)
        except FileNotFoundError as error:  # fsspec calls every failure so
            if error.__cause__ is None or getattr(error.__cause__, "status", None) == 404:
                raise
            raise error.__cause__ from None
        if found["type"] != "file" or found["size"] is None:
            raise FileNotFoundError("no file, or none of a known size")
        return self._entry(key, found)

    def get_range(self, key: str, *, start: int, end: int) -> bytes:
        return bytes(self._fs.cat_file(self._root + key, start=start, end=end))

    def get(self, key: str) -> SimpleNamespace:
        return SimpleNamespace(meta=self.head(key), bytes=partial(self._fs.cat_file, self._root + key))

    def put(self, key: str, content: Any, *, mode: Any = "overwrite", **sizes: Any) -> None:
        url = self._root + key
        with self._putting:
            found = self.head(key)["e_tag"] if mode != "overwrite" and self._fs.isfile(url) else None
            if mode != "overwrite" and found != (None if mode == "create" else mode["e_tag"]):
                raise FileExistsError(f"another object is at {url}")
            self._fs.pipe_file(url, content if isinstance(content, bytes) else b"".join(content))

    def list(self, folder: str) -> Iterator[list[dict[str, Any]]]:
        url = self._root + folder
        found = self._fs.find(url, detail=True) if self._fs.exists(url) else {}
        yield [self._entry(name.removeprefix(self._root).strip("/"), entry) for name, entry in found.items()]

    def delete(self, keys: Any) -> None:
        for key in [keys] if isinstance(keys, str) else keys:
            self._fs.rm_file(self._root + key)

    @staticmethod
    def _entry(key: str, found: Mapping[str, Any]) -> dict[str, Any]:
        tag = str(found.get("ETag", found.get("created", "")))
        return {"path": key, "size": found["size"] or 0, "e_tag": tag}
