"""A view of a source, passed on as it is: what views that change names, dtypes or values are made from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch

from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.state.dtensor_layout import local_tensor, view_at
from lightning_shardckpt.state.module_versions import renamed_versions
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, windows


def origin_of(source: Source, component: str, key: str) -> tuple[Source, str]:
    """Return the source that views are of, and the key under which it has a tensor of theirs."""
    while isinstance(source, SourceView):
        if key:
            component, key = source.stored_as(component, key)
        source = source.source
    return source, key


class SourceView:
    """Another source, which stays the caller's to close; a view overrides what it changes.

    A view that has other names says in ``stored_as`` what each is stored as, and lists them in ``components``.
    """

    def __init__(self, source: Source) -> None:
        self.path, self._source = source.path, source
        self._stored_targets: dict[ReadTarget, ReadTarget] = {}

    @property
    def source(self) -> Source:
        """The source that this is a view of."""
        return self._source

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as they are stored."""
        return self._source.tensors

    def close(self) -> None:
        """Do nothing: what is stored is the caller's."""

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, under the names here."""
        return self._source.components()

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role."""
        return self._source.document(role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state."""
        return self._source.trainer(stored)

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor of this view is stored."""
        return component, key

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor, after making sure that its bytes can be there."""
        return self._source.backed(*self.stored_as(component, key))

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify what the targets need, as the source does; returns how many bytes were read."""
        return self._source.verify([self._stored_target(target) for target in targets])

    def fill(self, targets: list[ReadTarget]) -> None:
        """Fill the targets, as the source does; nothing is remembered of them afterwards, so that memory is bounded."""
        found = [self._stored_target(target) for target in targets]
        for target in targets:
            self._stored_targets.pop(target, None)
        self._source.fill(found)

    def _stored_target(self, target: ReadTarget) -> ReadTarget:
        """The target under its stored name; the same object each time, since the source knows targets by identity."""
        where = self.stored_as(target.component, target.key)
        if where == (target.component, target.key):
            return target
        if target.fresh:  # a window that is filled at once; known by nobody
            return target.renamed(*where)
        if target not in self._stored_targets:
            self._stored_targets[target] = target.renamed(*where)
        return self._stored_targets[target]


# ── other dtypes ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Stored tensors in the dtype of the tensors that they are read into, through a bounded amount of memory.


_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8: what those mean, other tensors say
_COMPLEX = ("C64", "C128")
_WINDOW_BYTES, _BATCH_BYTES = 8 << 20, 32 << 20  # of stored elements on their way to another dtype


def converts(stored: str, live: str | None) -> bool:
    """Return whether a tensor of one dtype may be loaded into one of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


class CastingSource(SourceView):
    """Another source, whose tensors may be read into tensors of another dtype; it stays the caller's to close."""

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify all; what is to be converted is read for that alone, unless nobody minds what is in its memory."""
        same, converted = self._divided(targets)
        found = self._source.verify(same)
        for batch in self._batches([target for target in converted if not target.fresh]):
            found += self._source.verify(batch)
        return found

    def fill(self, targets: list[ReadTarget]) -> None:
        """Read into memory what keeps its dtype, and the rest through a bounded amount of it, verified once more."""
        same, converted = self._divided(targets)
        self._source.fill(same)
        for batch in self._batches(converted):
            self._source.verify(batch)
            self._source.fill(batch)
            for window in batch:
                assert window.region is not None
                view_at(local_tensor(window.tensor), window.region).copy_(window.local)

    def _stored(self, target: ReadTarget) -> torch.dtype:
        return TORCH_DTYPES[self.components()[target.component].tensors[target.key].dtype]

    def _divided(self, targets: list[ReadTarget]) -> tuple[list[ReadTarget], list[ReadTarget]]:
        """The targets that have the stored dtype, and those that have another one."""
        components = self.components()
        specs = {name: component.tensors for name, component in components.items()}
        converted = [t for t in targets if TORCH_DTYPES[specs[t.component][t.key].dtype] != t.local.dtype]
        if not converted:  # as nearly always
            return targets, []
        apart = {*converted}
        return [target for target in targets if target not in apart], converted

    def _batches(self, targets: Sequence[ReadTarget]) -> Iterator[list[ReadTarget]]:
        """Windows of the targets, with memory of the stored dtype, not much of it at a time."""
        batch: list[ReadTarget] = []
        for target in targets:
            for window in self._windows(target):
                if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _BATCH_BYTES:
                    yield batch
                    batch = []
                batch.append(window)
        if batch:
            yield batch

    def _windows(self, target: ReadTarget) -> Iterator[ReadTarget]:
        dtype = self._stored(target)
        corner = target.region.start if target.region is not None else (0,) * target.local.ndim
        for window in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            yield ReadTarget(target.component, target.key, target.tensor, True, window.shift(corner), dtype=dtype)


# ── other names ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A part of stored state under other names: a view of a source.


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
