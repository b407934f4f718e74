"""Views of a source in which stored modules and optimizers are state dicts, as a load asks for them.

Fabric's own strategies and plain files do not distinguish the state dict of a module from one that a script kept as a
value, such as the best weights so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.state_dicts import Path, insert, is_optimizer_state, key_of, value_at
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

_EMPTY = Component({})


def blank_trainer(source: Source) -> dict[str, Any]:
    """Return the trainer's state with meta tensors for its tensors."""
    specs = source.components().get("trainer", _EMPTY).tensors

    def blank(key: str) -> torch.Tensor:
        return torch.empty(specs[key].shape, dtype=TORCH_DTYPES[specs[key].dtype], device="meta")

    return source.trainer(blank)


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

    A single state dict gets the single stored module, under any key; optimizers are found by key, or in order.

    Args:
        source: the stored state.
        keys: the places of its modules and optimizers, if known.
        state: the requested state.
        asked: the paths of its tensors and values.
        alone: True if it has no modules, so that a state dict is most likely the model's.
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


def as_values(source: Source, places: Places) -> Source:
    """Return a source whose trainer's state has state dicts of stored modules and optimizers, which remain stored.

    Args:
        source: the stored state, which the caller closes.
        places: of the state dicts.
    """
    components = source.components()
    model, optimizer = (components.get(name, _EMPTY) for name in ("model", "optimizer"))
    trainers = components.get("trainer", _EMPTY).tensors
    table = {key: source.table["trainer"][key] for key in trainers}
    names = {name: name for name in model.tensors} | dict(model.aliases)
    entries = {
        place: {name.removeprefix(prefix): key for name, key in names.items() if name.startswith(prefix)}
        for place, prefix in places.modules.items()
    }
    for place, keys in entries.items():
        table |= {_inside(place, name): source.table["model"][key] for name, key in keys.items()}
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
        table |= {name: source.table["optimizer"][key] for key, name in new_keys.items()}
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

    return replace(source.with_names({"trainer": table}, {}, {}), trainer=trainer)


def _inside(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


def _put(trainer_state: dict[str, Any], place: str, state: Mapping[str, Any]) -> None:
    if place:
        insert(trainer_state, place, state)
    else:
        trainer_state.update(state)
