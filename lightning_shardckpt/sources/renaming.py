"""Sources under other names: of a user's key mapping, for loads and exports. Ties, documents and optimizers follow.

A renamed source is another table over the same stored tensors. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.key_mapping import KeyMapping
from lightning_shardckpt.sources.source import Source, StoredTensor
from lightning_shardckpt.state.module_versions import rename_versions
from lightning_shardckpt.system.text import list_some


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
        source: the stored state, which the caller closes.
        names: stored names of the model's entries, by name in the result; others are left out. Two entries may have
            the same stored name.
        optimizers: the numbers of the stored optimizers that are 0, 1, … in the result; None if there are none.
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
    table = {"model": {name: source.table["model"][key] for name, key in keys.items() if owners[key] == name}}
    aliases = {"model": {name: owners[key] for name, key in keys.items() if owners[key] != name}}
    documents: dict[str, Any] = {"versions": rename_versions(source.document("versions"), stored_names)}
    for role in ("model", "frozen"):
        entries = source.document(role)
        documents[role] = entries and {name: entries[old] for name, old in stored_names.items() if old in entries}
    if optimizers is None:
        return source.with_names(table, aliases, documents)
    absent = {model.aliases.get(name, name) for name in left_out} - owners.keys()

    def name_of(param: str) -> str | None:
        key = model.aliases.get(param, param)
        return None if key in absent else owners.get(key, param)

    numbers = {str(number): str(place) for place, number in enumerate(optimizers)}
    of_optimizers: dict[str, StoredTensor] = {}
    for key in components.get("optimizer", Component({})).tensors:
        number, _, rest = key.partition("/")
        param, _, state = rest.rpartition("/")
        if number in numbers and (new := name_of(param)) is not None:
            of_optimizers[f"{numbers[number]}/{new}/{state}"] = source.table["optimizer"][key]
    stored_optimizers = [(source.document("optimizer") or {})[str(number)] for number in optimizers]
    if absent and any(one["numbered"] for one in stored_optimizers):
        raise MismatchError(
            f"{source.path!r} has optimizer state by number, so the state of {list_some(sorted(absent))} can't be left "
            "out: load the model without its optimizers, or resume once without changes and save again"
        )
    documents["optimizer"] = {str(i): _rename_optimizer(one, name_of) for i, one in enumerate(stored_optimizers)}
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
        optimizers: the numbers of the stored optimizers that are 0, 1, … in the result; all by default.

    Raises:
        MismatchError: if entries of the mapping are the wrong way round, or give a name several times.
    """
    if mapping.is_empty and move is None:
        return source, []
    model, document = source.components().get("model", Component({})), source.document("optimizer")
    values, frozen = source.document("model") or {}, source.document("frozen") or {}
    parameters = parameters_of(document, range(len(document or ())))
    stored = {*model.tensors, *model.aliases, *values, *frozen, *parameters}
    known = sorted(name.removeprefix(prefix) for name in stored if name.startswith(prefix))
    if suggestions := mapping.suggest(known):
        raise MismatchError(f"{source.path!r}: {mapping.option}: " + "\n  ".join(suggestions))
    problems = [f"{mapping.option}: {old!r}  matches no name in the checkpoint" for old in mapping.unused(known)]
    names = ((move(new) if move else new, prefix + stored) for new, stored in mapping.apply(known).items())
    kept = {name: stored for name, stored in names if name is not None}
    left_out = [prefix + name for name in known if mapping(name) is None]
    if optimizers is None and document is not None:
        optimizers = range(len(document))
    return rename(source, kept, optimizers, left_out), problems
