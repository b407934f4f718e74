"""Views of a source that turn stored state dicts into objects, and stored objects into state dicts.

Fabric's own strategies and plain files do not distinguish the state dict of a module from one that a script kept as a
value, such as the best weights so far. A script may also save the result of ``state_dict()`` and load it into objects.
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


def find_state_dicts(
    state: Mapping[str, Any], keys: Mapping[str, Any], modules: Sequence[Path], optimizers: Sequence[Path]
) -> tuple[list[Path], list[Path]]:
    """Return the paths of state dicts for the modules and optimizers that are not stored as objects.

    A single module gets the single state dict, whatever its key.

    Args:
        state: the trainer's state, with any placeholders for its tensors.
        keys: the places of stored modules and optimizers.
        modules: paths of requested modules.
        optimizers: paths of requested optimizers.
    """
    paths = [path for path in modules if key_of(path) not in keys["modules"] and _is_state_dict(_at(state, path))]
    if not paths and len(modules) == 1 and not keys["modules"]:
        candidates: list[Path] = [()] if _is_state_dict(_at(state, ())) else [(key,) for key in state]
        candidates = [path for path in candidates if _is_state_dict(_at(state, path))]
        paths = candidates if len(candidates) == 1 else []
    others = (path for path in optimizers if key_of(path) not in keys["optimizers"])
    return paths, [path for path in others if is_optimizer_state(_at(state, path))]


def blank_trainer(source: Source) -> dict[str, Any]:
    """Return the trainer's state with meta tensors for its tensors."""
    specs = source.components().get("trainer", _EMPTY).tensors

    def blank(key: str) -> torch.Tensor:
        return torch.empty(specs[key].shape, dtype=TORCH_DTYPES[specs[key].dtype], device="meta")

    return source.trainer(blank)


def with_model(source: Source) -> Source:
    """Return a source whose only state dict is the model, and state dicts of optimizers are optimizers, in order.

    A source with a model, or with several state dicts, is returned unchanged.

    Raises:
        FormatError: if the places of modules and optimizers are malformed.
    """
    if "model" in source.components() or source.document("optimizer"):
        return source
    state = blank_trainer(source)
    keys = check_keys(state.get(KEYS), source.path)
    if keys is None:
        return source
    modules, _ = find_state_dicts(state, keys, [("model",)], [])
    optimizers: list[Path] = [(key,) for key, value in state.items() if is_optimizer_state(value)]
    return as_objects(source, keys, modules, optimizers) if modules else source


def _at(state: Mapping[str, Any], path: Path) -> Any:
    try:
        return value_at(state, path) if path else {key: value for key, value in state.items() if key != KEYS}
    except LookupError:
        return None


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, Mapping) or not any(isinstance(one, torch.Tensor) for one in value.values()):
        return False
    return all(isinstance(k, str) and (isinstance(v, torch.Tensor) or is_extra_state(k)) for k, v in value.items())


class _InMemory:
    """A source of tensors in memory, which were inline in JSON."""

    def __init__(self, leaves: Mapping[str, Leaves]) -> None:
        self._leaves = leaves
        self._components = {name: Component(specs_of(name, one, ((0, 1),))) for name, one in leaves.items()}

    def components(self) -> Mapping[str, Component]:
        """Return the tensors by component."""
        return self._components

    def checked_shape(self, component: str, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._leaves[component].tensors[key].shape)

    def read(self, targets: list[ReadTarget]) -> Callable[[], None]:
        """Return the function that copies into the targets."""

        def fill() -> None:
            for target in targets:
                target.copy_from(self._leaves[target.component].tensors[target.key])

        return fill


def as_objects(
    source: Source, keys: Mapping[str, Any], modules: Sequence[Path], optimizers: Sequence[Path]
) -> SourceView:
    """Return a view in which state dicts of the trainer's state are modules and optimizers.

    Args:
        source: the stored state, which the caller closes.
        keys: the places of its modules and optimizers.
        modules: paths of state dicts of modules.
        optimizers: paths of state dicts of optimizers.
    """
    stored, blanks = source.components(), dict[str, torch.Tensor]()

    def blank(key: str) -> torch.Tensor:
        spec = stored["trainer"].tensors[key]
        return blanks.setdefault(key, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta"))

    trainer_state = source.trainer(blank)
    is_single = len(modules) == 1 and "model" not in stored
    prefixes = {path: "" if is_single else f"{key_of(path)}/" for path in modules}
    state = {prefix + n: value for path, prefix in prefixes.items() for n, value in _at(trainer_state, path).items()}
    document = source.document("optimizer") or {}
    states: list[Any] = [{}] * len(document) + [_at(trainer_state, path) for path in optimizers]
    leaves, values = model_leaves(state)
    of_optimizers, described = optimizer_leaves(states)
    key_of_blank = {id(tensor): key for key, tensor in blanks.items()}
    components = {"model": leaves, "optimizer": of_optimizers}
    inline = {n: {k: t for k, t in one.tensors.items() if id(t) not in key_of_blank} for n, one in components.items()}
    memory, moved = _InMemory({name: Leaves(tensors) for name, tensors in inline.items()}), set[str]()
    table = dict[str, dict[str, Place]]()
    for name, component in components.items():
        table[name] = {key: place_of(source, name, key) for key in stored.get(name, _EMPTY).tensors}
        for key, tensor in component.tensors.items():
            of = key_of_blank.get(id(tensor))
            table[name][key] = Place(memory, name, key) if of is None else place_of(source, "trainer", of)
            moved.update(() if of is None else (of,))
    trainers = stored.get("trainer", _EMPTY).tensors
    table["trainer"] = {key: place_of(source, "trainer", key) for key in trainers if key not in moved}
    objects = {
        "modules": {**keys["modules"], **{key_of(path): prefix for path, prefix in prefixes.items()}},
        "optimizers": [*keys["optimizers"][: len(document)], *map(key_of, optimizers)],
    }

    def trainer(stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        rest = source.trainer(lambda key: _NOTHING if key in moved else stored(key))
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
    """Keys of a state that request state dicts of stored modules and optimizers; "" is the whole state.

    Attributes:
        modules: the prefix of the module's stored names, by key of ``key_of``.
        optimizers: the number of the stored optimizer, and whether the state numbers parameters, by key.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    optimizers: Mapping[str, tuple[int, bool]] = field(default_factory=dict)


def places_of(
    source: Source, keys: Mapping[str, Any] | None, state: Mapping[str, Any], asked: Sequence[Path], *, alone: bool
) -> Places:
    """Return the places of requested state dicts that are stored as modules and optimizers.

    A single state dict gets the single stored module, whatever its key; optimizers are found by key, or in order.

    Args:
        source: the stored state.
        keys: the places of its modules and optimizers, if known.
        state: the requested state.
        asked: the paths of its tensors and values.
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
    dicts = {key_of(path): value for path in within if is_optimizer_state(value := value_at(state, path))}
    numbers = dict(zip([*dicts] if keys is None else keys["optimizers"], range(len(document)), strict=False))
    optimizers = {
        key: (numbers[key], _has_numbers(dicts.get(key), document[str(numbers[key])]))
        for path in within
        if (key := key_of(path)) in numbers
    }
    return Places(modules, optimizers)


def _has_numbers(asked: Any, stored: Mapping[str, Any]) -> bool:
    """Return whether a requested state dict numbers the parameters, in param groups of the stored sizes."""
    if asked is None:
        return False
    sizes = [len(stored["groups"][str(number)]["params"]) for number in range(len(stored["groups"]))]
    groups = [group["params"] for group in asked["param_groups"]]
    return [*map(len, groups)] == sizes and all(type(param) is int for group in groups for param in group)


def as_values(source: Source, places: Places) -> SourceView:
    """Return a view whose trainer's state has state dicts of stored modules and optimizers, which remain stored.

    Args:
        source: the stored state, which the caller closes.
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
    for place, keys in entries.items():
        table |= {_inside(place, name): place_of(source, "model", key) for name, key in keys.items()}
    document = source.document("optimizer") or {}
    optimizers: list[tuple[str, bool, StoredOptimizer, dict[str, str]]] = []
    for place, (number, by_number) in places.optimizers.items():
        one = StoredOptimizer(number, document[str(number)], optimizer, decode_equal)
        numbers = one.numbers if by_number else {}
        new_keys = {  # by stored key
            key: f"{_inside(place, 'state')}/{numbers.get(param, param)}/{name}"
            for param, of_param in one.tensors.items()
            for name, key in of_param.items()
        }
        table |= {name: place_of(source, "optimizer", key) for key, name in new_keys.items()}
        optimizers.append((place, by_number, one, new_keys))
    values = source.document("model") or {}

    def trainer(stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        trainer_state = source.trainer(stored)
        for place, prefix in places.modules.items():
            state: dict[str, Any] = OrderedDict((name, stored(_inside(place, name))) for name in entries[place])
            others = {n.removeprefix(prefix): decode_small(v) for n, v in values.items() if n.startswith(prefix)}
            _put(trainer_state, place, state | others)
        for place, by_number, one, new_keys in optimizers:
            tensors = {key: stored(name) for key, name in new_keys.items()}
            _put(trainer_state, place, one.state_dict(tensors, by_number=by_number))
        return trainer_state

    return SourceView(source, {"trainer": table}, {}, {}, trainer)


def _inside(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


def _put(trainer_state: dict[str, Any], place: str, state: Mapping[str, Any]) -> None:
    if place:
        insert(trainer_state, place, state)
    else:
        trainer_state.update(state)
