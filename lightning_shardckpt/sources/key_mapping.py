"""Key mappings from stored to new names, for loads, pretrained weights and exports, and renamed sources. No torch.

A mapping goes from the names in a checkpoint or file to new names. All are mapped at once, so they can be swapped. An
entry ``old: new`` is

- the mapping of one tensor, if ``old`` is its whole name: ``"head.weight": "lm_head.weight"``;
- a regular expression and its replacement, if ``old`` has any of ``^$*+?()[]{}|`` or a backslash, which names don't
  have: ``"^gpt_neox": "model"``. It may match anywhere in a name. Expressions are applied in one pass from left to
  right; of several matches at the same place the first counts. They do not apply to names with an entry of their own.

``new`` None leaves the tensor out; with an expression, every name in which it is found.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.sources.source import Source, StoredTensor
from lightning_shardckpt.state.state_dicts import rename_versions
from lightning_shardckpt.system.text import count_text, list_some

KeyMappingLike: TypeAlias = "KeyMapping | Mapping[str, str | None] | Callable[[str], str | None]"
"""A dict or a function from stored names to new names."""

_OF_EXPRESSIONS = frozenset("^$*+?()[]{}|\\")


@dataclass(frozen=True, slots=True)
class KeyMapping:
    """New names for stored names: the user's function, or the entries of a dict, for whole names and by expression."""

    function: Callable[[str], str | None] | None = None
    names: Mapping[str, str | None] = field(default_factory=dict)
    rules: Sequence[tuple[re.Pattern[str], str | None]] = ()

    @property
    def is_empty(self) -> bool:
        """True if all names stay as they are."""
        return self.function is None and not self.names and not self.rules

    @classmethod
    def of(cls, given: KeyMappingLike | None) -> KeyMapping:
        """Return the mapping of a user's dict or function. Raises a ValueError for a malformed one."""
        if isinstance(given, KeyMapping):
            return given
        if callable(given):
            return cls(given)
        if not isinstance(given, Mapping | None):
            raise ValueError(
                "key_mapping is a dict from stored names (or regular expressions that are found in them) to new names, "
                f"or a function, got {given!r}"
            )
        names, rules = dict[str, str | None](), list[tuple[re.Pattern[str], str | None]]()
        for old, new in (given or {}).items():
            if not isinstance(old, str) or not isinstance(new, str | None):
                raise ValueError(f"key_mapping has {old!r}: {new!r}, but a name must map to a name or None")
            if not _OF_EXPRESSIONS.intersection(old):
                names[old] = new
                continue
            try:
                pattern = re.compile(old)
                pattern.sub(new or "", "")
            except (re.error, IndexError) as error:
                raise ValueError(f"key_mapping: {old!r} is not a regular expression for {new!r}: {error}") from None
            rules.append((pattern, new))
        return cls(None, names, rules)

    @classmethod
    def of_texts(cls, texts: Iterable[str]) -> KeyMapping:
        """Return the mapping of arguments of a command, each ``OLD=NEW``; ``OLD=null`` leaves out. Raises as ``of``."""
        pairs = [text.rpartition("=") for text in texts]
        if wrong := [new for _, equals, new in pairs if not equals]:
            raise ValueError(f"key_mapping {wrong[0]!r} is not OLD=NEW")
        return cls.of({old: None if new == "null" else new for old, _, new in pairs})

    def __call__(self, name: str) -> str | None:
        """Return the new name of a stored name; None leaves it out."""
        if self.function is not None:
            given = self.function(name)
            if not isinstance(given, str | None):
                raise MismatchError(f"key_mapping returns {given!r} for {name!r}; it must be a name or None")
            return given
        if name in self.names:
            return self.names[name]
        if any(new is None and pattern.search(name) for pattern, new in self.rules):
            return None
        done, at = "", 0
        while at < max(len(name), 1):
            matches = [(match, new) for pattern, new in self.rules if (match := pattern.search(name, at))]
            if not matches:
                break
            match, new = min(matches, key=lambda pair: pair[0].start())
            end = match.end() + (match.end() == match.start())  # after an empty match, continue after a character
            done, at = done + name[at : match.start()] + match.expand(new or "") + name[match.end() : end], end
        return done + name[at:]

    def apply(self, names: Iterable[str]) -> dict[str, str]:
        """Return the stored name by new name. Raises a MismatchError that lists stored names of the same new name."""
        renamed: dict[str, list[str]] = {}
        for name in names:
            if (new := self(name)) is not None:
                renamed.setdefault(new, []).append(name)
        if collisions := [f"{new}  of {', '.join(olds)}" for new, olds in renamed.items() if len(olds) > 1]:
            listed = list_some(collisions, between="\n  ")
            raise MismatchError(f"key_mapping gives {count_text(len(collisions), 'name')} several times\n  {listed}")
        return {new: olds[0] for new, olds in renamed.items()}

    def unused(self, names: Collection[str]) -> list[str]:
        """Return a line for each entry that matches none of the stored names; none for a function."""
        unused = [old for old in self.names if old not in names]
        unused += [pattern.pattern for pattern, _ in self.rules if not any(map(pattern.search, names))]
        return [f"key_mapping: {old!r}  matches no name in the checkpoint" for old in unused]


# ── renamed sources ───────────────────────────────────────────────────────────────────────────────────────────────────
# Another table over the same stored tensors. Ties, documents and optimizers follow.


def parameters_of(document: Mapping[str, Any] | None, numbers: Iterable[int]) -> Iterator[str]:
    """Yield the names of the parameters of stored optimizers, if they were saved by name."""
    for one in [document[str(number)] for number in numbers] if document else ():
        if not one["numbered"]:
            yield from chain.from_iterable(group["params"] for group in one["groups"].values())


def rename(
    source: Source, names: Mapping[str, str], optimizers: Sequence[int] | None, left_out: Collection[str] = ()
) -> Source:
    """Return a source with other names.

    Args:
        source: the stored state.
        names: stored names of the model's entries, by name in the result; others are left out.
        optimizers: the numbers of the stored optimizers that are 0, 1, … in the result; None leaves them as they are.
        left_out: stored names that the user leaves out, along with their optimizer state.

    Raises:
        MismatchError: for names to leave out of optimizers that number their parameters.
    """
    model = source.component("model")
    stored_names = dict(sorted(names.items(), key=lambda item: item[1] in model.aliases))  # owners of ties come first
    renamed: dict[str, list[str]] = {}  # names in the result by stored key; all but the first are ties
    for name, stored in stored_names.items():
        renamed.setdefault(model.aliases.get(stored, stored), []).append(name)
    tensors = {key: new for key, new in renamed.items() if key in model.tensors}
    table = {"model": {new[0]: source.table["model"][key] for key, new in tensors.items()}}
    aliases = {"model": {tie: owner for owner, *ties in tensors.values() for tie in ties}}
    documents: dict[str, Any] = {"versions": rename_versions(source.document("versions"), stored_names)}
    for role in ("model", "frozen"):
        entries = source.document(role)
        documents[role] = entries and {name: entries[old] for name, old in stored_names.items() if old in entries}
    if optimizers is None:
        return source.with_names(table, aliases, documents)
    absent = {model.aliases.get(name, name) for name in left_out} - renamed.keys()

    def name_of(param: str) -> str | None:
        key = model.aliases.get(param, param)
        return None if key in absent else renamed.get(key, [param])[0]

    def with_names(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "params": [name for name in map(name_of, entry["params"]) if name is not None]}

    numbers, of_optimizers = {str(number): str(at) for at, number in enumerate(optimizers)}, dict[str, StoredTensor]()
    for key, tensor in source.table.get("optimizer", {}).items():
        number, _, rest = key.partition("/")
        param, _, state = rest.rpartition("/")
        if number in numbers and (new := name_of(param)) is not None:
            of_optimizers[f"{numbers[number]}/{new}/{state}"] = tensor
    documents["optimizer"] = {}
    for number, at in numbers.items():
        documents["optimizer"][at] = one = dict(source.document("optimizer")[number])
        if not one["numbered"]:
            one["groups"] = {n: with_names(group) for n, group in one["groups"].items()}
            one["values"] = {name: list(map(with_names, shared)) for name, shared in one["values"].items()}
        elif absent:
            raise MismatchError(
                f"{source.path!r} has optimizer state by number, so the state of {list_some(sorted(absent))} can't be "
                "left out: load the model without its optimizers, or resume once without changes and save again"
            )
    return source.with_names(table | {"optimizer": of_optimizers}, aliases, documents)


def map_names(
    source: Source,
    mapping: KeyMapping,
    *,
    prefix: str = "",
    move: Callable[[str], str | None] | None = None,
    optimizers: Sequence[int] | None = None,
) -> tuple[Source, list[str]]:
    """Return the source under the names that the user's mapping gives, and its unused entries, a line each.

    Args:
        source: the stored state.
        mapping: of the user, from stored names without ``prefix``.
        prefix: of the stored names; others are left out.
        move: returns the name in the result by mapped name, None to leave it out.
        optimizers: as in ``rename``, whose errors it raises, and those of ``KeyMapping.apply``; all by default.
    """
    if mapping.is_empty and move is None:
        return source, []
    model, document = source.component("model"), source.document("optimizer")
    entries = (*(source.document("model") or ()), *(source.document("frozen") or ()))
    stored = {*model.names, *entries, *parameters_of(document, range(len(document or ())))}
    known = sorted(name.removeprefix(prefix) for name in stored if name.startswith(prefix))
    mapped = mapping.apply(known)
    names = ((move(new) if move else new, prefix + stored) for new, stored in mapped.items())
    kept = {name: stored for name, stored in names if name is not None}
    left_out = [prefix + name for name in {*known}.difference(mapped.values())]
    if optimizers is None and document is not None:
        optimizers = range(len(document))
    return rename(source, kept, optimizers, left_out), mapping.unused({*known})
