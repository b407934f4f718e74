"""Retry requests after failures that pass by themselves: throttling, resets, timeouts.

Clients of object stores retry by themselves, each by rules of its own, and rules multiply. So theirs are switched off
where that can be done, and what is sent is bounded here: by a number of attempts and by time.
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

_AGAIN = {408, 425, 429, 500, 502, 503, 504}  # HTTP
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
    """A store sent fewer bytes than were asked for."""


def retry_call(what: str, call: Callable[[], _T], policy: RetryPolicy) -> _T:
    """The result of ``call``, which is called again after a failure that may pass.

    Raises:
        FileNotFoundError, FileExistsError: as they come, at once, as does all that is no OSError.
        PermissionError: saying what was not permitted.
        OSError: what failed, how often and for how long; ``what`` begins its message.
    """
    begun = time.monotonic()
    for attempt in count(1):
        try:
            return call()
        except Exception as error:
            if isinstance(error, PermissionError):
                raise PermissionError(
                    errno.EACCES, f"{what}: the store does not permit it: {_said(error)}; check the credentials"
                ) from error
            if not may_pass(error):
                if isinstance(error, OSError) and not isinstance(error, _FINAL):
                    raise OSError(error.errno or errno.EIO, f"{what}: {_said(error)}") from error
                raise
            pause = min(policy.first_pause_s * 2 ** (attempt - 1), policy.longest_pause_s)
            pause *= random.uniform(0.5, 1.0)
            taken = time.monotonic() - begun
            if attempt >= policy.attempts or taken + pause > policy.total_s:
                times = "once" if attempt == 1 else f"{attempt} times"
                raise OSError(
                    errno.EIO, f"{what}: failed {times} within {taken:.1f} s, at last with {_said(error)}"
                ) from error
            time.sleep(pause)
    raise AssertionError("unreachable")


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later.

    >>> may_pass(ConnectionResetError()), may_pass(PermissionError()), may_pass(ValueError())
    (True, False, False)
    """
    if isinstance(error, _FINAL):
        return False
    status = status_of(error)
    if status is not None:
        return status in _AGAIN
    if isinstance(error, OSError | EOFError | TimeoutError):
        return not (isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.ENOSPC, errno.EROFS))
    kind = type(error)
    return f"{kind.__module__}.".startswith(_CLIENTS) and not any(word in kind.__name__ for word in _MISUSE)


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status of an error, if a client tells it."""
    return next((status for status in map(_status, _chain(error)) if status is not None), None)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(10):
        if error is None:
            return
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error of botocore, aiohttp, gcsfs or azure has."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    if type(error).__module__ == "aiohttp.http_exceptions":  # of an answer that is not HTTP, such as a short one
        return None
    for name in ("status_code", "status", "code"):
        found = getattr(error, name, None)
        if isinstance(found, int) and 400 <= found < 600:
            return found
    return None


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error) or 'no message'}"
