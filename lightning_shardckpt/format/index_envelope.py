"""What the root index and the per-rank indexes have in common: compact JSON of one format and some versions.

Whatever is wrong in a file becomes a FormatError that names the file; see FORMAT.md for the rules.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from lightning_shardckpt.errors import FormatError
from lightning_shardckpt.format.value_checks import shown

FORMAT = "lightning-shardckpt"
VERSION = 4
"""The highest that is read. What has the same words in version 1 is written as that."""
_T = TypeVar("_T")


def compact(value: Any) -> str:
    """Return a value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def decoded(value: Any, where: str, decode: Callable[[dict[str, Any]], _T], versions: tuple[int, ...]) -> _T:
    """Return what ``decode`` makes of a JSON object of our format.

    Args:
        value: the JSON.
        where: the file, for errors.
        decode: makes the index of the object.
        versions: those that it can have, in ascending order.

    Raises:
        FormatError: for everything that ``decode`` trips over, too.
    """
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise FormatError(f"{where}: not an index of {FORMAT}")
    version = value.get("version")
    if type(version) is not int or version not in versions:
        *others, newest = versions
        raise FormatError(
            f"{where}: format version {shown(version)}, this package reads {', '.join(map(str, others))} and "
            f"{newest}; use a newer lightning-shardckpt"
        )
    try:
        return decode(value)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from None
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {str(error)[:200]}"
        raise FormatError(f"{where}: a part is missing or malformed: {what}") from None
