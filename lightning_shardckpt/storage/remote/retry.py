"""Retries of requests after transient failures: throttling, connection resets, timeouts.

Clients of object stores have retries of their own, with different rules, and nested retries multiply. The clients'
retries are switched off where possible; here, the number of attempts and the total time are bounded.
"""

from __future__ import annotations

import errno
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

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
