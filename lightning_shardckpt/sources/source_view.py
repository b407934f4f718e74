"""Views of a source under other names, and reads into other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.sources.source import ReadTarget, Source, TensorSource
from lightning_shardckpt.state.dtensor_layout import local_tensor, view_at
from lightning_shardckpt.state.module_versions import rename_versions
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.system.text import list_some
from lightning_shardckpt.transfer.whole_tensors import StoredTensors, windows


class Place(NamedTuple):
    """The place of a stored tensor: a source that is not a view, and the tensor's component and key there."""

    source: TensorSource
    component: str
    key: str

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape of the tensor."""
        return self.source.components()[self.component].tensors[self.key]


def place_of(source: Source, component: str, key: str) -> Place:
    """Return the place of a tensor of a source."""
    return source.table[component][key] if isinstance(source, SourceView) else Place(source, component, key)


def root_of(source: Source) -> Source:
    """Return the source below a view; any other source unchanged."""
    return source.root if isinstance(source, SourceView) else source


class SourceView:
    """A source with other names, documents or trainer state than an underlying source, which the caller closes.

    Args:
        source: the underlying source.
        table: places of tensors, by component and key in the view; other components are unchanged.
        aliases: further names of tensors, by component of ``table``.
        documents: by role, in place of the source's.
        trainer: in place of the source's.

    Attributes:
        table: places of all tensors, by component and key in the view.
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

    @property
    def tensors(self) -> StoredTensors:
        """The tensors of the underlying source."""
        return self._source.tensors

    def close(self) -> None:
        """Do nothing: the caller closes the underlying source."""

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component, under the view's names."""
        return self._components

    def document(self, role: str, rank: int = 0) -> Any:
        """Return the JSON of a role, under the view's names."""
        return self._documents[role] if role in self._documents else self._source.document(role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """Return the trainer's state."""
        return self._trainer(stored)

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor after checking that files of its size exist."""
        source, component, key = self.table[component][key]
        return source.checked_shape(component, key)

    def read(self, targets: list[ReadTarget]) -> None:
        """Fill the targets from their sources, and verify their bytes on the way."""
        by_source: dict[int, tuple[TensorSource, list[ReadTarget]]] = {}
        for target in targets:
            source, component, key = self.table[target.component][target.key]
            same = (component, key) == (target.component, target.key)
            at_source = target if same else target.with_key(component, key)
            by_source.setdefault(id(source), (source, []))[1].append(at_source)
        for source, own_targets in by_source.values():
            source.read(own_targets)


# ── other dtypes ──────────────────────────────────────────────────────────────────────────────────────────────────────


_FLOATING = ("F64", "F32", "F16", "BF16")  # not F8, whose scales are in other tensors
_COMPLEX = ("C64", "C128")
_WINDOW_BYTES, _BATCH_BYTES = 8 << 20, 32 << 20  # of stored elements to convert


def converts(stored: str, live: str | None) -> bool:
    """Return whether a stored tensor of one dtype may be loaded into a live tensor of another.

    >>> converts("BF16", "F32"), converts("I64", "I32"), converts("F8_E4M3", "BF16")
    (True, False, False)
    """
    return stored == live or any(stored in kind and live in kind for kind in (_FLOATING, _COMPLEX))


def read_converted(source: Source, targets: list[ReadTarget]) -> None:
    """Read like ``source.read``, with targets of other dtypes, through a bounded amount of memory."""
    specs = {name: component.tensors for name, component in source.components().items()}
    converted = [t for t in targets if TORCH_DTYPES[specs[t.component][t.key].dtype] != t.local.dtype]
    others = {*converted}
    source.read([target for target in targets if target not in others] if converted else targets)
    for batch in _batches(source, converted):
        source.read(batch)
        for window in batch:
            assert window.region is not None
            view_at(local_tensor(window.tensor), window.region).copy_(window.local)


def _batches(source: Source, targets: Sequence[ReadTarget]) -> Iterator[list[ReadTarget]]:
    """Yield windows of the targets with memory of the stored dtype, in batches of bounded size."""
    batch: list[ReadTarget] = []
    for target in targets:
        dtype = TORCH_DTYPES[source.components()[target.component].tensors[target.key].dtype]
        for region in windows(tuple(target.local.shape), _WINDOW_BYTES // dtype.itemsize):
            window = ReadTarget(target.component, target.key, target.tensor, region, dtype=dtype)
            if batch and sum(t.local.nbytes for t in batch) + window.local.nbytes > _BATCH_BYTES:
                yield batch
                batch = []
            batch.append(window)
    if batch:
        yield batch


# ── other names ───────────────────────────────────────────────────────────────────────────────────────────────────────


def model_names(source: Source) -> set[str]:
    """Return the stored names of all entries of the model: tensors, aliases, values, parameters of optimizers."""
    model = source.components().get("model", Component({}))
    values, frozen = source.document("model") or {}, source.document("frozen") or {}
    document = source.document("optimizer") or {}
    return {*model.tensors, *model.aliases, *values, *frozen, *parameters_of(document, range(len(document)))}


def parameters_of(document: Mapping[str, Any] | None, numbers: Iterable[int]) -> Iterator[str]:
    """Yield the names of the parameters of stored optimizers, if they were saved by name."""
    for one in [document[str(number)] for number in numbers] if document else ():
        if not one["numbered"]:
            yield from chain.from_iterable(group["params"] for group in one["groups"].values())


def rename_source(
    source: Source,
    names: Mapping[str, str | None],
    others: Callable[[str], str | None],
    optimizers: Sequence[int],
    left_out: Collection[str] = (),
) -> SourceView:
    """Return a view of a source with the names that a load asks for.

    Args:
        source: the stored state, which the caller closes.
        names: stored names of the model's entries, by name in the view; None if not stored. Two entries may have the
            same stored name.
        others: returns the name in the view of any other stored name; None leaves it out.
        optimizers: the numbers of the stored optimizers that are 0, 1, … in the view.
        left_out: stored names that the user leaves out, along with their optimizer state.

    Raises:
        MismatchError: for names to leave out of optimizers that number their parameters.
    """
    components, known = source.components(), model_names(source)
    model = components.get("model", Component({}))
    stored_names = {name: stored for name, stored in names.items() if stored in known}
    used = {*names, *stored_names}
    for stored in known.difference(stored_names.values()):
        name = others(stored)
        if name is not None:
            stored_names[f"{stored} (of the checkpoint)" if name in used else name] = stored
    # owners of ties come first
    stored_names = dict(sorted(stored_names.items(), key=lambda item: item[1] in model.aliases))
    owners: dict[str, str] = {}  # name in the view by stored key: of the key itself, if it has one, else of an alias
    for name, stored in stored_names.items():
        owners.setdefault(model.aliases.get(stored, stored), name)
    keys = {name: model.aliases.get(stored, stored) for name, stored in stored_names.items()}
    keys = {name: key for name, key in keys.items() if key in model.tensors}

    absent = {model.aliases.get(name, name) for name in left_out} - owners.keys()

    def name_of(param: str) -> str | None:
        key = model.aliases.get(param, param)
        return None if key in absent else owners.get(key, param)

    table = {"model": {name: place_of(source, "model", key) for name, key in keys.items() if owners[key] == name}}
    aliases = {"model": {name: owners[key] for name, key in keys.items() if owners[key] != name}}
    numbers, of_optimizers = {str(number): str(place) for place, number in enumerate(optimizers)}, dict[str, Place]()
    for key in components.get("optimizer", Component({})).tensors:
        number, _, rest = key.partition("/")
        if number in numbers:
            param, _, state = rest.rpartition("/")
            if (name := name_of(param)) is not None:
                of_optimizers[f"{numbers[number]}/{name}/{state}"] = place_of(source, "optimizer", key)
    documents: dict[str, Any] = {"versions": rename_versions(source.document("versions"), stored_names)}
    for role in ("model", "frozen"):
        entries = source.document(role)
        documents[role] = entries and {name: entries[old] for name, old in stored_names.items() if old in entries}
    document = source.document("optimizer")
    if absent and any(document[str(number)]["numbered"] for number in optimizers if document):
        raise MismatchError(
            f"{source.path!r} has optimizer state by number, so the state of {list_some(sorted(absent))} can't be left "
            "out: load the model without its optimizers, or resume once without changes and save again"
        )
    if document is not None or not optimizers:
        renamed = (_rename_optimizer(document[str(number)], name_of) for number in optimizers)
        documents["optimizer"] = {str(place): one for place, one in enumerate(renamed)}
    return SourceView(source, table | {"optimizer": of_optimizers}, aliases, documents)


def _rename_optimizer(one: dict[str, Any], name_of: Callable[[str], str | None]) -> dict[str, Any]:
    """Return the document of an optimizer with renamed parameters, without those that have no name."""
    if one["numbered"]:
        return one

    def with_names(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "params": [name for name in map(name_of, entry["params"]) if name is not None]}

    groups = {number: with_names(group) for number, group in one["groups"].items()}
    values = {name: list(map(with_names, shared)) for name, shared in one["values"].items()}
    return {**one, "groups": groups, "values": values}
