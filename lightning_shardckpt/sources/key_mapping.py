"""Key mappings from stored to new names, with one syntax for loads, pretrained weights and exports. No torch.

A mapping goes from the names in a checkpoint or file to new names, never in the other direction. All names are mapped
at once, so they can be swapped. An entry ``old: new`` is

- the mapping of one tensor, if ``old`` is its whole name: ``"head.weight": "lm_head.weight"``;
- a regular expression and its replacement, if ``old`` has any of ``^$*+?()[]{}|`` or a backslash, which names don't
  have: ``"^gpt_neox": "model"``. It may match anywhere in a name. Expressions are applied in one pass from left to
  right; of several matches at the same place the first counts. They do not apply to names with an entry of their own.

``new`` None leaves the tensor out. An expression with None leaves out every name in which it is found, also if another
expression matches there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.system.text import count_text, list_some

KeyMappingLike: TypeAlias = "KeyMapping | Mapping[str, str | None] | Callable[[str], str | None]"
"""A dict or a function from stored names to new names."""

_OF_EXPRESSIONS = frozenset("^$*+?()[]{}|\\")


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """New names for stored names.

    Attributes:
        names: new names by stored name; None leaves it out.
        rules: regular expressions and their replacements, for names that are not in ``names``.
        function: maps a stored name like a dict, in place of both.
        option: the name of the option in errors.
    """

    names: Mapping[str, str | None] = field(default_factory=dict)
    rules: tuple[tuple[re.Pattern[str], str | None], ...] = ()
    function: Callable[[str], str | None] | None = None
    option: str = "key_mapping"

    @property
    def is_empty(self) -> bool:
        """True if all names stay as they are."""
        return not self.names and not self.rules and self.function is None

    @classmethod
    def of(cls, given: KeyMappingLike | None, option: str = "key_mapping") -> KeyMapping:
        """Return the mapping of a user's argument.

        Args:
            given: a dict or a function.
            option: the name of the option in errors.

        Raises:
            ValueError: if it is neither, or an expression or a replacement is malformed.
        """
        if given is None:
            return cls(option=option)
        if isinstance(given, KeyMapping):
            return given
        if isinstance(given, Mapping):
            return cls._of_entries(given, option)
        if callable(given):
            return cls(function=given, option=option)
        raise ValueError(
            f"{option} is a dict from stored names (or regular expressions that are found in them) to new names, or a "
            f"function, got {given!r}"
        )

    @classmethod
    def _of_entries(cls, entries: Mapping[str, str | None], option: str) -> KeyMapping:
        names, rules = dict[str, str | None](), list[tuple[re.Pattern[str], str | None]]()
        for old, new in entries.items():
            if not isinstance(old, str) or not isinstance(new, str | None):
                raise ValueError(f"{option} has {old!r}: {new!r}, but a name must map to a name or None")
            if not _OF_EXPRESSIONS.intersection(old):
                names[old] = new
                continue
            try:
                pattern = re.compile(old)
                pattern.sub(new or "", "")
            except (re.error, IndexError) as error:
                raise ValueError(f"{option}: {old!r} is not a regular expression for {new!r}: {error}") from None
            rules.append((pattern, new))
        return cls(names, tuple(rules), option=option)

    @classmethod
    def of_texts(cls, texts: Iterable[str], option: str) -> KeyMapping:
        """Return the mapping of arguments of a command, each ``OLD=NEW``; ``OLD=null`` leaves out.

        Raises:
            ValueError: if one has no ``=``, or an expression or a replacement is malformed.
        """
        entries: dict[str, str | None] = {}
        for text in texts:
            old, equals, new = text.rpartition("=")
            if not equals:
                raise ValueError(f"{option} {text!r} is not OLD=NEW")
            entries.setdefault(old, None if new == "null" else new)
        return cls._of_entries(entries, option)

    def __call__(self, name: str) -> str | None:
        """Return the new name of a stored name; None leaves it out.

        >>> swap = KeyMapping.of({"^a": "b", "^b": "a", "scale": None})
        >>> swap("a.w"), swap("b.w"), swap("scale")
        ('b.w', 'a.w', None)
        """
        if self.function is not None:
            new = self.function(name)
            if not isinstance(new, str | None):
                raise MismatchError(f"{self.option} returns {new!r} for {name!r}; it must be a name or None")
            return new
        return self.names[name] if name in self.names else self._apply_rules(name)

    def _apply_rules(self, name: str) -> str | None:
        if any(new is None and pattern.search(name) for pattern, new in self.rules):
            return None
        rules = [(pattern, new) for pattern, new in self.rules if new is not None]
        done, at = "", 0
        while matches := [(match, new) for pattern, new in rules if (match := pattern.search(name, at))]:
            match, new = min(matches, key=lambda pair: pair[0].start())
            done, at = done + name[at : match.start()] + match.expand(new), match.end()
            if match.end() == match.start():  # an empty match: continue after the next character
                done, at = done + name[at : at + 1], at + 1
            if at >= len(name):
                break
        return done + name[at:]

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """Return the stored name by new name, of all that are not left out.

        Raises:
            MismatchError: listing stored names that get the same name.
        """
        renamed: dict[str, list[str]] = {}
        for name in names:
            if (new := self(name)) is not None:
                renamed.setdefault(new, []).append(name)
        collisions = [f"{new}  of {', '.join(olds)}" for new, olds in renamed.items() if len(olds) > 1]
        if collisions:
            listed = list_some(collisions, between="\n  ")
            raise MismatchError(f"{self.option} gives {count_text(len(collisions), 'name')} several times\n  {listed}")
        return {new: olds[0] for new, olds in renamed.items()}

    def unused(self, names: Iterable[str]) -> list[str]:
        """Return the entries that match none of the stored names; none for a function.

        >>> KeyMapping.of({"a": "b", "c": "d", "^l": "h", "x$": "y"}).unused(["a", "l.x", "z"])
        ['c']
        """
        known = {*names}
        return [old for old in self.names if old not in known] + [
            pattern.pattern for pattern, _ in self.rules if not any(map(pattern.search, known))
        ]

    def suggest(self, names: Iterable[str]) -> list[str]:
        """Return suggestions for entries that match no stored name.

        >>> mapping = KeyMapping.of({"new.w": "old.w", "gpt_neox": "model"})
        >>> for line in mapping.suggest(["old.w", "gpt_neox.w"]):
        ...     print(line)
        'new.w': 'old.w' is the other way round: write 'old.w': 'new.w', from stored names to new ones
        'gpt_neox' is the whole name of no tensor: write '^gpt_neox' or another regular expression for a part of names
        """
        known, lines = sorted({*names}), []
        for old, new in self.names.items():
            if old in known:
                continue
            if new in known:
                turned = f"write {new!r}: {old!r}, from stored names to new ones"
                lines.append(f"{old!r}: {new!r} is the other way round: {turned}")
            elif old and (inside := [name for name in known if old in name]):
                start = "^" if any(name.startswith(old) for name in inside) else "\\b"
                lines.append(
                    f"{old!r} is the whole name of no tensor: write '{start}{old}' or another regular expression for a "
                    "part of names"
                )
        return lines
