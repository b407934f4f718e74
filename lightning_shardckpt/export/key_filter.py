"""Which tensors are taken, and under what names? Filters, prefixes and mappings of names; no I/O."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Naming:
    """What becomes of a name. Filters are of the old names; then a prefix goes, a mapping is applied, a prefix comes.

    Attributes:
        include: patterns (``*``, ``?``, ``[…]``), one of which a name must match; none means all.
        exclude: patterns that it must not match.
        strip_prefix: what is taken away from the names that begin with it.
        pairs: old name → new name.
        rules: a regular expression and its replacement, as in ``re.sub``; of the names without a pair each is changed
            by the first rule that is found in it, alone, so names can be swapped.
        function: changes each name, in place of pairs and rules.
        add_prefix: what is put before every name.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    strip_prefix: str = ""
    pairs: Mapping[str, str] = field(default_factory=dict)
    rules: tuple[tuple[re.Pattern[str], str], ...] = ()
    function: Callable[[str], str] | None = None
    add_prefix: str = ""

    @property
    def changes_something(self) -> bool:
        """Whether a name may not stay as it is."""
        return self != Naming()

    def takes(self, name: str) -> bool:
        """Whether the filters let an old name through.

        >>> Naming(include=("model.*",), exclude=("*.bias",)).takes("model.head.bias")
        False
        """
        if self.include and not any(fnmatchcase(name, pattern) for pattern in self.include):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.exclude)

    def new(self, name: str) -> str:
        """The new name of one that is taken.

        >>> swap = Naming(strip_prefix="net.", rules=((re.compile(r"^a"), "b"), (re.compile(r"^b"), "a")))
        >>> swap.new("net.a.w"), swap.new("b.w")
        ('b.w', 'a.w')
        """
        return self.add_prefix + self._mapped(name.removeprefix(self.strip_prefix))

    def _mapped(self, name: str) -> str:
        if self.function is not None:
            return self.function(name)
        if name in self.pairs:
            return self.pairs[name]
        rule = next((rule for rule in self.rules if rule[0].search(name)), None)
        return name if rule is None else rule[0].sub(rule[1], name)

    def check(self, names: Iterable[str]) -> None:
        """Make sure that every part of it has something to do.

        Raises:
            ValueError: listing patterns, pairs and prefixes that none of the names has.
        """
        names = list(names)
        stripped = [name.removeprefix(self.strip_prefix) for name in names if self.takes(name)]
        unused = [repr(p) for p in (*self.include, *self.exclude) if not any(fnmatchcase(n, p) for n in names)]
        if self.strip_prefix and not any(name.startswith(self.strip_prefix) for name in names):
            unused.append(f"the prefix {self.strip_prefix!r}")
        unused += [repr(old) for old in self.pairs if old not in stripped]
        unused += [repr(rule.pattern) for rule, _ in self.rules if not any(map(rule.search, stripped))]
        if unused:
            near = difflib.get_close_matches(unused[0].strip("'"), [*names, *stripped], n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"no tensor has a name for {', '.join(unused)}{hint}")


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
