"""Select tensors by name, and list the names that they have. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from lightning_shardckpt.format.index import Component


def is_selected(names: Iterable[str], pattern: str | None) -> bool:
    """Return whether one of a tensor's names matches a pattern (``*``, ``?``, ``[…]``) or contains it as text.

    >>> is_selected(["a.weight"], "a.*"), is_selected(["a.weight"], "weigh"), is_selected(["a.weight"], "b.*")
    (True, True, False)
    """
    return pattern is None or any(fnmatchcase(name, pattern) or pattern in name for name in names)


def aliases_by_key(component: Component) -> dict[str, list[str]]:
    """Return the further names of each tensor that has any (tied weights), by the name under which it is stored."""
    found: dict[str, list[str]] = {}
    for alias, key in component.aliases.items():
        found.setdefault(key, []).append(alias)
    return found
