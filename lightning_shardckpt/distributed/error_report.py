"""Errors as JSON, so that other ranks can raise them."""

from __future__ import annotations

import builtins
import re
from typing import NotRequired, TypedDict

import torch.distributed as dist

from lightning_shardckpt import errors
from lightning_shardckpt.errors import RankError

_COLLECTIVE_MESSAGES = re.compile(r"gloo|nccl|connection closed|connection reset|broken pipe|timed out", re.IGNORECASE)


class ErrorReport(TypedDict):
    """An error of a rank."""

    type: str
    message: str
    errno: int | None
    ranks: NotRequired[list[int]]
    """The first failed ranks, if known; the error is that of the first one."""
    count: NotRequired[int]
    """The number of failed ranks, if more than one."""


def report_error(error: BaseException) -> ErrorReport:
    """Return an error of any class as a report."""
    try:
        message = str(error)
    except Exception:  # a user's class whose __str__ raises
        message = "(it has no message)"
    return {"type": type(error).__name__, "message": message, "errno": getattr(error, "errno", None)}


def rebuild_error(report: ErrorReport, message: str) -> Exception:
    """Return an exception of the reported class if that is a ShardCkptError or an OSError, else a RankError."""
    cls = getattr(errors, report["type"], None) or getattr(builtins, report["type"], None)
    if isinstance(cls, type) and issubclass(cls, errors.ShardCkptError | OSError):
        if not issubclass(cls, errors.ShardCkptError) and report["errno"] is not None:
            return cls(report["errno"], message)
        return cls(message)
    return RankError(message)


def is_collective_failure(error: BaseException) -> bool:
    """Return True if a training collective raised ``error``, perhaps because a rank is gone.

    Also matches messages, since gloo has no exception class of its own.
    """
    return isinstance(error, RuntimeError) and not isinstance(error, errors.ShardCkptError) and (
        isinstance(error, dist.DistError) or _COLLECTIVE_MESSAGES.search(str(error)) is not None
    )
