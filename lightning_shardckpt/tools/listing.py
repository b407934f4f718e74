"""Lists of tensors by name, and tables that are cut where they are long."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import TypeVar

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.system.text import count_text, table

_Item = TypeVar("_Item")


def long_table(
    header: Sequence[str],
    items: Sequence[_Item],
    row: Callable[[_Item], Sequence[str]],
    *,
    limit: int | None,
    noun: str = "",
    hint: str = "--tensors '*' lists them",
    right: Sequence[str] = ("size",),
) -> str:
    """Return a table of the first items, with a last line that counts the others and tells how to list them.

    >>> print(long_table(("file", "size"), range(3), lambda i: (f"f{i}", f"{i} B"), limit=1, noun="file"))
    file  size
    f0     0 B
    … and 2 more files: --tensors '*' lists them
    """
    text = table(header, [row(item) for item in items[:limit]], right)
    more = 0 if limit is None else max(len(items) - limit, 0)
    counted = count_text(more, f"more {noun}") if noun else f"{more:,} more"
    return f"{text}\n… and {counted}: {hint}" if more else text


def is_selected(names: Iterable[str], pattern: str | None) -> bool:
    """Return whether one of a tensor's names matches a pattern (``*``, ``?``, ``[…]``) or contains it as text.

    >>> is_selected(["a.weight"], "a.*"), is_selected(["a.weight"], "weigh"), is_selected(["a.weight"], "b.*")
    (True, True, False)
    """
    return pattern is None or any(fnmatchcase(name, pattern) or pattern in name for name in names)


def aliases_by_key(component: Component) -> dict[str, list[str]]:
    """Return the aliases of each tied tensor, by its stored name."""
    names: dict[str, list[str]] = {}
    for alias, key in component.aliases.items():
        names.setdefault(key, []).append(alias)
    return names
