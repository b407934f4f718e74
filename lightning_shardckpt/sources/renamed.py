"""A part of stored state under other names: a view of a source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.source_view import SourceView
from lightning_shardckpt.state.module_versions import renamed_versions


def model_names(source: Source) -> set[str]:
    """The stored names of all entries of the model: tensors, names that share one, values, parameters of optimizers."""
    model = source.components().get("model", Component({}))
    values, frozen = source.document("model") or {}, source.document("frozen") or {}
    document = source.document("optimizer") or {}
    return {*model.tensors, *model.aliases, *values, *frozen, *parameters_of(document, range(len(document)))}


def parameters_of(document: Mapping[str, Any] | None, numbers: Iterable[int]) -> Iterator[str]:
    """Yield the names of the parameters of some stored optimizers, of those that have names."""
    for one in [document[str(number)] for number in numbers] if document else ():
        if not one["numbered"]:
            yield from chain.from_iterable(group["params"] for group in one["groups"].values())


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
        aliases = self._aliases = self._stored["model"].aliases if "model" in self._stored else {}
        self._of = dict(sorted(self._of.items(), key=lambda item: item[1] in aliases))  # owners of ties come first
        self._here: dict[str, str] = {}  # stored key → the name here under which it comes: its own, if it has one
        for name, stored in self._of.items():
            self._here.setdefault(aliases.get(stored, stored), name)
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
        keys = {name: self._aliases.get(of, of) for name, of in self._of.items()}
        keys = {name: key for name, key in keys.items() if key in stored.tensors}
        tensors = {name: stored.tensors[key] for name, key in keys.items() if self._here[key] == name}
        return Component(tensors, {name: self._here[key] for name, key in keys.items() if self._here[key] != name})

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
        return self._here.get(self._aliases.get(stored, stored), stored)

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role, with the names here."""
        found = self._source.document(role, rank)
        if role == "versions":
            return renamed_versions(found, self._of)
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
