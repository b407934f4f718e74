"""Select tensors by name, and list them in tables of which only the first rows are shown. Pure."""

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
    hint: str = "--all lists them",
    right: Sequence[str] = ("size",),
) -> str:
    """Return a table of the first items, with a last line that counts the others and says how to see them.

    >>> print(long_table(("file", "size"), range(3), lambda i: (f"f{i}", f"{i} B"), limit=1, noun="file"))
    file  size
    f0     0 B
    … and 2 more files: --all lists them

    Args:
        header: the names of the columns.
        items: one for each row.
        row: makes the cells of one item; called for those that are shown.
        limit: number of rows; None for all.
        noun: the name of an item, in the singular.
        hint: how to see the others.
        right: the columns that are aligned to the right.
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
    """Return the further names of each tensor that has any (tied weights), by the name under which it is stored."""
    names: dict[str, list[str]] = {}
    for alias, key in component.aliases.items():
        names.setdefault(key, []).append(alias)
    return names
