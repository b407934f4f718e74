"""Choose tensors and their names: filters, prefixes and mappings of names; no I/O."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from lightning_shardckpt.sources.key_mapping import KeyMapping


@dataclass(frozen=True, slots=True)
class Naming:
    """Rules for names. Filters are of the old names; then a prefix goes, a mapping is applied, a prefix comes.

    Attributes:
        include: patterns (``*``, ``?``, ``[…]``), one of which a name must match; none means all.
        exclude: patterns that it must not match.
        strip_prefix: what is taken away from the names that begin with it.
        mapping: old names to new ones; what it leaves out is not taken.
        add_prefix: what is put before every name.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str = ""
    mapping: KeyMapping = field(default_factory=KeyMapping)
    add_prefix: str = ""

    @property
    def changes_something(self) -> bool:
        """True if a name may not stay as it is."""
        return self != Naming()

    def takes(self, name: str) -> bool:
        """Return whether the filters let an old name through, and the mapping does not leave it out.

        >>> Naming(include=("model.*",), exclude=("*.bias",)).takes("model.head.bias")
        False
        """
        return self._passes(name) and bool(self.mapping(name.removeprefix(self.strip_prefix)))

    def _passes(self, name: str) -> bool:
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def new(self, name: str) -> str:
        """The new name of one that is taken.

        >>> swap = Naming(strip_prefix="net.", mapping=KeyMapping.of({"^a": "b", "^b": "a"}))
        >>> swap.new("net.a.w"), swap.new("b.w")
        ('b.w', 'a.w')
        """
        new = self.mapping(name.removeprefix(self.strip_prefix))
        if len(new) != 1:
            raise ValueError(f"key_mapping gives {name!r} the names {list(new)}; in what is written a tensor has one")
        return self.add_prefix + new[0]

    def check(self, names: Iterable[str]) -> None:
        """Make sure that every part of it has something to do.

        Raises:
            ValueError: listing patterns, entries of the mapping and prefixes that none of the names has.
        """
        names = list(names)
        stripped = [name.removeprefix(self.strip_prefix) for name in names if self._passes(name)]
        unused = [repr(p) for p in (*self.include, *self.exclude) if not any(fnmatchcase(n, p) for n in names)]
        if self.strip_prefix and not any(name.startswith(self.strip_prefix) for name in names):
            unused.append(f"the prefix {self.strip_prefix!r}")
        unused += map(repr, self.mapping.unused(stripped))
        if unused:
            near = difflib.get_close_matches(unused[0].strip("'"), [*names, *stripped], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            wrong = "".join(f"\n  key_mapping: {line}" for line in self.mapping.misunderstood(stripped))
            raise ValueError(f"no tensor has a name for {', '.join(unused)}{hint}{wrong}")


def unique(names: Iterable[tuple[str, str, object]]) -> dict[str, str]:
    """New name → old name, of ``(old name, new name, what has it)``.

    Raises:
        ValueError: naming two tensors that would have the same name.
    """
    found: dict[str, tuple[str, object]] = {}
    for old, new, what in names:
        other = found.setdefault(new, (old, what))
        if other[1] != what:
            raise ValueError(f"two tensors would be called {new!r}: {other[0]!r} and {old!r}")
    return {new: old for new, (old, _) in found.items()}
