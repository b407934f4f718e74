"""State dicts as objects and as values: views of a source for a load that asks for the other one.

Fabric's own strategies and plain files do not tell the state dict of a module from one that a script kept as a value,
such as the best weights so far. And a script may have saved what ``state_dict()`` returned, and load it into objects.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.sources.source_view import Place, SourceView, place_of
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.model import is_extra_state, model_leaves
from lightning_shardckpt.state.nested_dict import remove_at, value_at
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from lightning_shardckpt.state.state_dicts import KEYS, Path, check_keys, insert, is_optimizer_state, key_of
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

_EMPTY = Component({})
_NOTHING = torch.empty(0, device="meta")

# ── state dicts as objects ────────────────────────────────────────────────────────────────────────────────────────────


def dicts_for(
    known: Mapping[str, Any], keys: Mapping[str, Any], modules: Sequence[Path], optimizers: Sequence[Path]
) -> tuple[list[Path], list[Path]]:
    """Return the places of state dicts that stand for modules and optimizers, of those that are not stored themselves.

    A single module takes the single state dict, whatever its key.

    Args:
        known: the trainer's state, with anything for its tensors.
        keys: where modules and optimizers are stored.
        modules: places of modules that are asked for.
        optimizers: places of optimizers that are.
    """
    found = [path for path in modules if key_of(path) not in keys["modules"] and _is_state_dict(_at(known, path))]
    if not found and len(modules) == 1 and not keys["modules"]:
        places: list[Path] = [()] if _is_state_dict(_at(known, ())) else [(key,) for key in known]
        places = [path for path in places if _is_state_dict(_at(known, path))]
        found = places if len(places) == 1 else []
    others = (path for path in optimizers if key_of(path) not in keys["optimizers"])
    return found, [path for path in others if is_optimizer_state(_at(known, path))]


def trainer_of(source: Source) -> dict[str, Any]:
    """Return the trainer's state with blanks for its tensors."""
    specs = source.components().get("trainer", _EMPTY).tensors

    def blank(key: str) -> torch.Tensor:
        return torch.empty(specs[key].shape, dtype=TORCH_DTYPES[specs[key].dtype], device="meta")

    return source.trainer(blank)


def with_objects(source: Source) -> Source:
    """Return a source whose only state dict is the model, with those of optimizers in order, for one module.

    Other sources, and those that have a model, are returned as they are.

    Raises:
        FormatError: if it says of modules and optimizers what cannot be.
    """
    if "model" in source.components() or source.document("optimizer"):
        return source
    known = trainer_of(source)
    keys = check_keys(known.get(KEYS), source.path)
    if keys is None:
        return source
    modules, _ = dicts_for(known, keys, [("model",)], [])
    optimizers: list[Path] = [(key,) for key, value in known.items() if is_optimizer_state(value)]
    return as_objects(source, keys, modules, optimizers) if modules else source


def _at(known: Mapping[str, Any], path: Path) -> Any:
    try:
        return value_at(known, path) if path else {key: value for key, value in known.items() if key != KEYS}
    except LookupError:
        return None


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, Mapping) or not any(isinstance(one, torch.Tensor) for one in value.values()):
        return False
    return all(isinstance(k, str) and (isinstance(v, torch.Tensor) or is_extra_state(k)) for k, v in value.items())


class _InMemory:
    """Tensors that are in memory already: those inside of JSON."""

    def __init__(self, leaves: Mapping[str, Leaves]) -> None:
        self._leaves = leaves
        self._components = {name: Component(specs_of(name, found, ((0, 1),))) for name, found in leaves.items()}

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""
        return self._components

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._leaves[component].tensors[key].shape)

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Return what copies into the targets."""

        def fill() -> None:
            for target in targets:
                target.copy_from(self._leaves[target.component].tensors[target.key])

        return fill


def as_objects(
    source: Source, keys: Mapping[str, Any], modules: Sequence[Path], optimizers: Sequence[Path]
) -> SourceView:
    """Return a source in which some state dicts among the trainer's state are modules and optimizers.

    Args:
        source: what is stored, which stays the caller's to close.
        keys: where its modules and optimizers are.
        modules: places of state dicts of modules.
        optimizers: places of state dicts of optimizers.
    """
    stored, blanks = source.components(), dict[str, torch.Tensor]()

    def blank(key: str) -> torch.Tensor:
        spec = stored["trainer"].tensors[key]
        return blanks.setdefault(key, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta"))

    known = source.trainer(blank)
    is_alone = len(modules) == 1 and "model" not in stored
    prefixes = {path: "" if is_alone else f"{key_of(path)}/" for path in modules}
    state = {prefix + name: value for path, prefix in prefixes.items() for name, value in _at(known, path).items()}
    document = source.document("optimizer") or {}
    states: list[Any] = [{}] * len(document) + [_at(known, path) for path in optimizers]
    leaves, values = model_leaves(state)
    of_optimizers, described = optimizer_leaves(states)
    key_of_blank = {id(tensor): key for key, tensor in blanks.items()}
    table, in_memory = dict[str, dict[str, Place]](), dict[str, Leaves]()
    for name, found in (("model", leaves), ("optimizer", of_optimizers)):
        in_memory[name] = Leaves({key: t for key, t in found.tensors.items() if id(t) not in key_of_blank})
        table[name] = {key: place_of(source, name, key) for key in stored.get(name, _EMPTY).tensors}
    memory, taken = _InMemory(in_memory), set[str]()
    for name, found in (("model", leaves), ("optimizer", of_optimizers)):
        for key, tensor in found.tensors.items():
            of = key_of_blank.get(id(tensor))
            table[name][key] = Place(memory, name, key) if of is None else place_of(source, "trainer", of)
            taken.update(() if of is None else (of,))
    trainers = stored.get("trainer", _EMPTY).tensors
    table["trainer"] = {key: place_of(source, "trainer", key) for key in trainers if key not in taken}
    objects = {
        "modules": {**keys["modules"], **{key_of(path): prefix for path, prefix in prefixes.items()}},
        "optimizers": [*keys["optimizers"][: len(document)], *map(key_of, optimizers)],
    }

    def trainer(stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        rest = source.trainer(lambda key: _NOTHING if key in taken else stored(key))
        for path in (*modules, *optimizers):
            if path:
                remove_at(rest, path)
            else:
                rest.clear()
        return rest | {KEYS: objects}

    documents = {
        "model": (source.document("model") or {}) | values,
        "optimizer": {**described, **document} if states else source.document("optimizer"),
    }
    aliases = {"model": {**stored.get("model", _EMPTY).aliases, **leaves.aliases}}
    return SourceView(source, table, aliases, documents, trainer)


# ── objects as state dicts ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Places:
    """Where in a state values of modules and optimizers are asked for, as ``key_of`` spells places; "" is all of it.

    Attributes:
        modules: place → what stands before the module's stored names.
        optimizers: place → number of the stored optimizer, and whether parameters have numbers in the state.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, tuple[int, bool]] = field(default_factory=dict)


def places_of(
    source: Source, keys: Mapping[str, Any] | None, state: Mapping[str, Any], asked: Sequence[Path], *, alone: bool
) -> Places:
    """Return the places of state dicts that are asked for, and stored as modules and optimizers.

    A single state dict takes the single stored module, whatever its key; optimizers are found by key, or in order.

    Args:
        source: what is stored.
        keys: where its modules and optimizers were, if that is known.
        state: what is asked for.
        asked: the places of its tensors and values.
        alone: whether it has no modules, so that a state dict is most likely the model's.
    """
    within = dict.fromkeys(path[:end] for path in asked for end in range(1, len(path) + 1))
    stored: Mapping[str, str] = {"": ""} if keys is None else keys["modules"]
    modules = {key: stored[key] for path in within if (key := key_of(path)) in stored}
    component, document = source.components().get("model", _EMPTY), source.document("optimizer") or {}
    if alone and not modules and len(stored) == 1:
        (prefix,) = stored.values()
        names = {*component.tensors, *component.aliases}
        around = dict.fromkeys(key_of(path[:-1]) for path in asked if f"{prefix}{path[-1]}" in names)
        modules = dict.fromkeys(around, prefix) if len(around) == 1 else {}
    dicts = {key_of(path): found for path in within if is_optimizer_state(found := value_at(state, path))}
    numbers = dict(zip([*dicts] if keys is None else keys["optimizers"], range(len(document)), strict=False))
    optimizers = {
        key: (numbers[key], _has_numbers(dicts.get(key), document[str(numbers[key])]))
        for path in within
        if (key := key_of(path)) in numbers
    }
    return Places(modules, optimizers)


def _has_numbers(asked: Any, stored: Mapping[str, Any]) -> bool:
    """Return whether parameters have numbers in a state dict of an optimizer, and are those of the stored one."""
    if asked is None:
        return False
    sizes = [len(stored["groups"][str(number)]["params"]) for number in range(len(stored["groups"]))]
    groups = [group["params"] for group in asked["param_groups"]]
    return [*map(len, groups)] == sizes and all(type(param) is int for group in groups for param in group)


def as_values(source: Source, places: Places) -> SourceView:
    """Return a source whose trainer's state has some of the stored state dicts; they stay what they are, too.

    Args:
        source: what is stored, which stays the caller's to close.
        places: of the state dicts.
    """
    components = source.components()
    model, optimizer = (components.get(name, _EMPTY) for name in ("model", "optimizer"))
    trainers = components.get("trainer", _EMPTY).tensors
    table = {key: place_of(source, "trainer", key) for key in trainers}
    names = {name: name for name in model.tensors} | dict(model.aliases)
    entries = {
        place: {name.removeprefix(prefix): key for name, key in names.items() if name.startswith(prefix)}
        for place, prefix in places.modules.items()
    }
    for place, found in entries.items():
        table |= {_inside(place, name): place_of(source, "model", key) for name, key in found.items()}
    document = source.document("optimizer") or {}
    optimizers: list[tuple[str, bool, StoredOptimizer, dict[str, str]]] = []
    for place, (number, by_number) in places.optimizers.items():
        one = StoredOptimizer(number, document[str(number)], optimizer, decode_equal)
        numbers = one.numbers if by_number else {}
        here = {  # stored key → key here
            key: f"{_inside(place, 'state')}/{numbers.get(param, param)}/{name}"
            for param, of_param in one.tensors.items()
            for name, key in of_param.items()
        }
        table |= {name: place_of(source, "optimizer", key) for key, name in here.items()}
        optimizers.append((place, by_number, one, here))
    values = source.document("model") or {}

    def trainer(stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        found = source.trainer(stored)
        for place, prefix in places.modules.items():
            state: dict[str, Any] = OrderedDict((name, stored(_inside(place, name))) for name in entries[place])
            others = {n.removeprefix(prefix): decode_small(v) for n, v in values.items() if n.startswith(prefix)}
            _put(found, place, state | others)
        for place, by_number, one, here in optimizers:
            tensors = {key: stored(name) for key, name in here.items()}
            _put(found, place, one.state_dict(tensors, by_number=by_number))
        return found

    return SourceView(source, {"trainer": table}, {}, {}, trainer)


def _inside(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


def _put(found: dict[str, Any], place: str, state: Mapping[str, Any]) -> None:
    if place:
        insert(found, place, state)
    else:
        found.update(state)
