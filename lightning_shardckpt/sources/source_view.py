"""Sources under the names that a load asks for, and reads into other dtypes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import Source, StoredTensor
from lightning_shardckpt.state.module_versions import rename_versions
from lightning_shardckpt.system.text import list_some


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
    names: Mapping[str, str],
    optimizers: Sequence[int],
    left_out: Collection[str] = (),
) -> Source:
    """Return a source with the names that a load asks for.

    Args:
        source: the stored state, which the caller closes.
        names: stored names of the model's entries, by name in the result; others are left out. Two entries may have
            the same stored name.
        optimizers: the numbers of the stored optimizers that are 0, 1, … in the result.
        left_out: stored names that the user leaves out, along with their optimizer state.

    Raises:
        MismatchError: for names to leave out of optimizers that number their parameters.
    """
    components = source.components()
    model = components.get("model", Component({}))
    # owners of ties come first
    stored_names = dict(sorted(names.items(), key=lambda item: item[1] in model.aliases))
    owners: dict[str, str] = {}  # name in the result by stored key: of the key itself, if it has one, else of an alias
    for name, stored in stored_names.items():
        owners.setdefault(model.aliases.get(stored, stored), name)
    keys = {name: model.aliases.get(stored, stored) for name, stored in stored_names.items()}
    keys = {name: key for name, key in keys.items() if key in model.tensors}

    absent = {model.aliases.get(name, name) for name in left_out} - owners.keys()

    def name_of(param: str) -> str | None:
        key = model.aliases.get(param, param)
        return None if key in absent else owners.get(key, param)

    table = {"model": {name: source.table["model"][key] for name, key in keys.items() if owners[key] == name}}
    aliases = {"model": {name: owners[key] for name, key in keys.items() if owners[key] != name}}
    numbers = {str(number): str(place) for place, number in enumerate(optimizers)}
    of_optimizers: dict[str, StoredTensor] = {}
    for key in components.get("optimizer", Component({})).tensors:
        number, _, rest = key.partition("/")
        if number in numbers:
            param, _, state = rest.rpartition("/")
            if (new := name_of(param)) is not None:
                of_optimizers[f"{numbers[number]}/{new}/{state}"] = source.table["optimizer"][key]
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
    return source.with_names(table | {"optimizer": of_optimizers}, aliases, documents)


def _rename_optimizer(one: dict[str, Any], name_of: Callable[[str], str | None]) -> dict[str, Any]:
    """Return the document of an optimizer with renamed parameters, without those that have no name."""
    if one["numbered"]:
        return one

    def with_names(entry: dict[str, Any]) -> dict[str, Any]:
        return {**entry, "params": [name for name in map(name_of, entry["params"]) if name is not None]}

    groups = {number: with_names(group) for number, group in one["groups"].items()}
    values = {name: list(map(with_names, shared)) for name, shared in one["values"].items()}
    return {**one, "groups": groups, "values": values}
