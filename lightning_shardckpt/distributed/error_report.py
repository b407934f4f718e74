"""Errors as JSON, from which other ranks raise them again."""

from __future__ import annotations

import builtins
import re
from typing import NotRequired, TypedDict

import torch.distributed as dist

from lightning_shardckpt import errors
from lightning_shardckpt.errors import RankError

_OF_COLLECTIVES = re.compile(r"gloo|nccl|connection closed|connection reset|broken pipe|timed out", re.IGNORECASE)


class ErrorReport(TypedDict):
    """An error of a rank."""

    type: str
    message: str
    errno: int | None
    ranks: NotRequired[list[int]]
    """The first of those that failed, where it is known; the error is the first one's."""
    count: NotRequired[int]
    """Of those that failed, if it is more than one."""


def report_error(error: BaseException) -> ErrorReport:
    """Return what of an error can travel, of any class."""
    try:
        message = str(error)
    except Exception:  # of a class of the user's
        message = "(it has no message)"
    return {"type": type(error).__name__, "message": message, "errno": getattr(error, "errno", None)}


def rebuild_error(report: ErrorReport, message: str) -> Exception:
    """An exception of the class that was reported, if that is this package's or the system's, else a RankError."""
    kind = getattr(errors, report["type"], None) or getattr(builtins, report["type"], None)
    if isinstance(kind, type) and issubclass(kind, errors.ShardCkptError | OSError):
        if not issubclass(kind, errors.ShardCkptError) and report["errno"] is not None:
            return kind(report["errno"], message)
        return kind(message)
    return RankError(message)


def is_of_a_collective(error: BaseException) -> bool:
    """Return whether a collective of training failed, perhaps as other ranks are gone; gloo has no class for that."""
    return isinstance(error, RuntimeError) and not isinstance(error, errors.ShardCkptError) and (
        isinstance(error, dist.DistError) or _OF_COLLECTIVES.search(str(error)) is not None
    )
