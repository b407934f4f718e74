"""Views of a source: a table of which stored tensor each one is, under names that a load asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.sources.source import ReadTarget, Source, TensorSource
from lightning_shardckpt.state.dtensor_layout import local_tensor, view_at
from lightning_shardckpt.state.module_versions import rename_versions
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, windows


class Place(NamedTuple):
    """The source that has a tensor, which is no view, and the tensor's component and key there."""

    source: TensorSource
    component: str
    key: str

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the tensor."""
        return self.source.components()[self.component].tensors[self.key]


def place_of(source: Source, component: str, key: str) -> Place:
    """Return where a tensor of a source is stored."""
    return source.table[component][key] if isinstance(source, SourceView) else Place(source, component, key)


def root_of(source: Source) -> Source:
    """Return the source that a view is of; any other source itself."""
    return source.root if isinstance(source, SourceView) else source


class SourceView:
    """Another source, which stays the caller's to close, with other names, documents or state of the trainer.

    Args:
        source: which source.
        table: by component and key here, where each tensor is stored; other components are those of the source.
        aliases: by component of ``table``, further names of its tensors.
        documents: by role, in place of the source's.
        trainer: in place of the source's.
    """

    def __init__(
        self,
        source: Source,
        table: Mapping[str, Mapping[str, Place]],
        aliases: Mapping[str, dict[str, str]],
        documents: Mapping[str, Any],
        trainer: Callable[[Callable[[str], torch.Tensor]], dict[str, Any]] | None = None,
    ) -> None:
        self.path, self.root, self._source = source.path, root_of(source), source
        self._documents, self._trainer = documents, trainer or source.trainer
        changed = {
            name: Component({key: place.spec for key, place in places.items()}, aliases.get(name, {}))
            for name, places in table.items()
        }
        self._components = {**source.components(), **changed}
        self.table = {
            name: table[name] if name in table else {key: place_of(source, name, key) for key in component.tensors}
            for name, component in self._components.items()
        }
        """By component and key, where each tensor is stored."""

    @property
    def tensors(self) -> StoredTensors:
        """The tensors as they are stored."""
        return self._source.tensors

    def close(self) -> None:
        """Do nothing: the source is the caller's."""

    def components(self) -> Mapping[str, Component]:
        """Tensors by component, under the names here."""
        return self._components

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role, with the names here."""
        return self._documents[role] if role in self._documents else self._source.document(role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state."""
        return self._trainer(stored)

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor, after making sure that its bytes can be there."""
        source, component, key = self.table[component][key]
        return source.backed(component, key)

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Verify what the targets need, each where it is stored; returns the function that fills them."""
        by_source: dict[int, tuple[TensorSource, list[ReadTarget]]] = {}
        for target in targets:
            source, component, key = self.table[target.component][target.key]
            same = (component, key) == (target.component, target.key)
            renamed = target if same else target.renamed(component, key)
            by_source.setdefault(id(source), (source, []))[1].append(renamed)
        fills = [source.read(renamed) for source, renamed in by_source.values()]

        def fill() -> None:
            for one in fills:
                one()

        return fill


# ── other dtypes ──────────────────────────────────────────────────────────────────────────────────────────────────────
# Read stored tensors in the dtype of the tensors that they are read into, through a bounded amount of memory.


_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8: what those mean, other tensors say
_COMPLEX = ("C64", "C128")
_WINDOW_BYTES, _BATCH_BYTES = 8 << 20, 32 << 20  # of stored elements on their way to another dtype


def converts(stored: str, live: str | None) -> bool:
    """Return whether a tensor of one dtype may be loaded into one of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


def read_converted(source: Source, targets: list[ReadTarget]) -> Callable[[], None]:
    """Read as ``source.read`` does, where targets may have another dtype than what is stored for them.

    The converted ones are verified window by window, and again when they are filled. Those that are fresh are filled at
    once, so that nothing is left to verify when live tensors change.
    """
    specs = {name: component.tensors for name, component in source.components().items()}
    converted = [t for t in targets if TORCH_DTYPES[specs[t.component][t.key].dtype] != t.local.dtype]
    if not converted:  # as nearly always
        return source.read(targets)
    apart = {*converted}
    fill_same = source.read([target for target in targets if target not in apart])
    live = [target for target in converted if not target.fresh]
    for batch in _batches(source, live):
        source.read(batch)
    _convert(source, [target for target in converted if target.fresh])

    def fill() -> None:
        fill_same()
        _convert(source, live)

    return fill


def _convert(source: Source, targets: Sequence[ReadTarget]) -> None:
    for batch in _batches(source, targets):
        source.read(batch)()
        for window in batch:
            assert window.region is not None
            view_at(local_tensor(window.tensor), window.region).copy_(window.local)


def _batches(source: Source, targets: Sequence[ReadTarget]) -> Iterator[list[ReadTarget]]:
    """Yield windows of the targets, with memory of the stored dtype, not much of it at a time."""
    batch: list[ReadTarget] = []
    for target in targets:
        dtype = TORCH_DTYPES[source.components()[target.component].tensors[target.key].dtype]
        for region in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            window = ReadTarget(target.component, target.key, target.tensor, True, region, dtype=dtype)
            if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _BATCH_BYTES:
                yield batch
                batch = []
            batch.append(window)
    if batch:
        yield batch


# ── other names ───────────────────────────────────────────────────────────────────────────────────────────────────────
# A part of stored state under other names.


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


def renamed(
    source: Source,
    names: Mapping[str, str | None],
    others: Callable[[str], str | None],
    optimizers: Sequence[int],
) -> SourceView:
    """Return a source whose tensors have the names that a load asks for.

    Args:
        source: what is stored; it stays the caller's to close.
        names: name here → stored name, of the model's entries that may be there; None if nothing is stored for it. Two
            may have the same stored name.
        others: stored name → name here, of any other entry; None leaves it out.
        optimizers: the numbers of the stored optimizers that are 0, 1, … here.
    """
    components, known = source.components(), model_names(source)
    model = components.get("model", Component({}))
    stored_names = {name: stored for name, stored in names.items() if stored in known}
    taken = {*names, *stored_names}
    for stored in known.difference(stored_names.values()):
        name = others(stored)
        if name is not None:
            stored_names[f"{stored} (of the checkpoint)" if name in taken else name] = stored
    # owners of ties come first
    stored_names = dict(sorted(stored_names.items(), key=lambda item: item[1] in model.aliases))
    here: dict[str, str] = {}  # stored key → the name here under which it comes: its own, if it has one
    for name, stored in stored_names.items():
        here.setdefault(model.aliases.get(stored, stored), name)
    keys = {name: model.aliases.get(stored, stored) for name, stored in stored_names.items()}
    keys = {name: key for name, key in keys.items() if key in model.tensors}

    def name_of(param: str) -> str:
        return here.get(model.aliases.get(param, param), param)

    table = {"model": {name: place_of(source, "model", key) for name, key in keys.items() if here[key] == name}}
    aliases = {"model": {name: here[key] for name, key in keys.items() if here[key] != name}}
    numbers, of_optimizers = {str(number): str(place) for place, number in enumerate(optimizers)}, dict[str, Place]()
    for key in components.get("optimizer", Component({})).tensors:
        number, _, rest = key.partition("/")
        if number in numbers:
            param, _, state = rest.rpartition("/")
            of_optimizers[f"{numbers[number]}/{name_of(param)}/{state}"] = place_of(source, "optimizer", key)
    documents: dict[str, Any] = {"versions": rename_versions(source.document("versions"), stored_names)}
    for role in ("model", "frozen"):
        entries = source.document(role)
        documents[role] = entries and {name: entries[old] for name, old in stored_names.items() if old in entries}
    document = source.document("optimizer")
    if document is not None or not optimizers:
        found = (_rename_optimizer(document[str(number)], name_of) for number in optimizers)
        documents["optimizer"] = {str(place): one for place, one in enumerate(found)}
    return SourceView(source, table | {"optimizer": of_optimizers}, aliases, documents)


def _rename_optimizer(one: dict[str, Any], name_of: Callable[[str], str]) -> dict[str, Any]:
    """Return the document of an optimizer with other names of parameters."""
    if one["numbered"]:
        return one

    def with_names(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "params": list(map(name_of, entry["params"]))}

    groups = {number: with_names(group) for number, group in one["groups"].items()}
    values = {name: [with_names(entry) for entry in shared] for name, shared in one["values"].items()}
    return {**one, "groups": groups, "values": values}
