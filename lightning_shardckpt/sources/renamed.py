"""A part of stored state under other names: a view of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.source_view import SourceView


def model_names(source: Source) -> set[str]:
    """The stored names of all entries of the model: tensors, names that share one, and values."""
    model = source.components().get("model", Component({}))
    values, frozen = source.document("model") or {}, source.document("frozen") or {}
    return {*model.tensors, *model.aliases, *values, *frozen}


class RenamedSource(SourceView):
    """A source whose tensors have the names that a load asks for; the one that it reads stays the caller's to close.

    Args:
        source: what is stored.
        names: name here → stored name, of the model's entries that may be there; None if nothing is stored for it. Two
            may have the same stored name.
        others: stored name → name here, of any other entry; None leaves it out.
        optimizers: the numbers of the stored optimizers that are 0, 1, … here.
    """

    def __init__(
        self,
        source: Source,
        names: Mapping[str, str | None],
        others: Callable[[str], str | None],
        optimizers: Sequence[int],
    ) -> None:
        super().__init__(source)
        self._optimizers = optimizers
        self._stored = source.components()
        known = model_names(source)
        self._of = {name: stored for name, stored in names.items() if stored in known}  # name here → stored name
        taken = {*names, *self._of}
        hit = set(self._of.values())
        for stored in known - hit:
            name = others(stored)
            if name is not None:
                name = name if name not in taken else f"{stored} (of the checkpoint)"
                self._of[name] = stored
        self._here: dict[str, str] = {}  # stored name → the first name here
        for name, stored in self._of.items():
            self._here.setdefault(stored, name)
        self._optimizer_keys: dict[str, str] = {}

    @cached_property
    def _components(self) -> dict[str, Component]:
        found = dict(self._stored)
        found.pop("model", None)
        found.pop("optimizer", None)
        if "model" in self._stored and self._of:
            found["model"] = self._model(self._stored["model"])
        if "optimizer" in self._stored and self._optimizers:
            found["optimizer"] = Component(dict(self._optimizer_tensors(self._stored["optimizer"])))
        return found

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, under the names here."""
        return self._components

    def _model(self, stored: Component) -> Component:
        tensors: dict[str, TensorSpec] = {}
        aliases: dict[str, str] = {}
        first: dict[str, str] = {}
        for name, stored_name in self._of.items():
            key = stored.aliases.get(stored_name, stored_name)
            if key not in stored.tensors:
                continue
            if key in first:
                aliases[name] = first[key]
            else:
                first[key] = name
                tensors[name] = stored.tensors[key]
        return Component(tensors, aliases)

    def _optimizer_tensors(self, stored: Component) -> Iterable[tuple[str, TensorSpec]]:
        here = {f"{number}": str(place) for place, number in enumerate(self._optimizers)}
        for key, spec in stored.tensors.items():
            number, _, rest = key.partition("/")
            if number in here:
                param, _, state = rest.rpartition("/")
                name = f"{here[number]}/{self._param(param)}/{state}"
                self._optimizer_keys[name] = key
                yield name, spec

    def _param(self, stored: str) -> str:
        """The name here of a parameter of an optimizer."""
        if stored in self._here:
            return self._here[stored]
        aliases = self._stored["model"].aliases if "model" in self._stored else {}
        known = (self._here[alias] for alias, of in aliases.items() if of == stored and alias in self._here)
        return next(known, stored)

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role, with the names here."""
        found = self._source.document(role, rank)
        if role in ("model", "frozen"):
            return {name: found[stored] for name, stored in self._of.items() if stored in found} if found else found
        if role != "optimizer" or (found is None and self._optimizers):
            return found
        return {str(place): self._renamed(found[str(number)]) for place, number in enumerate(self._optimizers)}

    def _renamed(self, one: dict[str, Any]) -> dict[str, Any]:
        if one["numbered"]:
            return one

        def with_names(entry: dict[str, Any]) -> dict[str, Any]:
            return {**entry, "params": [self._param(param) for param in entry["params"]]}

        groups = {number: with_names(group) for number, group in one["groups"].items()}
        values = {name: [with_names(entry) for entry in shared] for name, shared in one["values"].items()}
        return {**one, "groups": groups, "values": values}

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor is stored."""
        if component == "model":
            stored = self._of[key]
            return component, self._stored["model"].aliases.get(stored, stored)
        return component, self._optimizer_keys[key] if component == "optimizer" else key
