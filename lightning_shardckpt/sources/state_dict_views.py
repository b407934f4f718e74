"""Views of a source in which stored modules and optimizers are state dicts, as a load asks for them.

Fabric's own strategies and plain files do not distinguish the state dict of a module from one that a script kept as a
value, such as the best weights so far.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.state_dicts import Path, insert, is_optimizer_state, items_of, key_of
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

_EMPTY = Component({})


def blank_trainer(source: Source) -> dict[str, Any]:
    """Return the trainer's state with meta tensors for its tensors."""
    specs = source.components().get("trainer", _EMPTY).tensors

    def blank(key: str) -> torch.Tensor:
        return torch.empty(specs[key].shape, dtype=TORCH_DTYPES[specs[key].dtype], device="meta")

    return source.trainer(blank)


def requested_dicts(
    source: Source, keys: Mapping[str, Any] | None, state: Mapping[str, Any], objects: Container[Path], *, alone: bool
) -> tuple[dict[str, str], dict[str, tuple[int, bool]]]:
    """Return the keys of a flat state that request state dicts of stored modules and optimizers; "" is the whole state.

    A single state dict gets the single stored module, under any key; optimizers are found by key, or in order.

    Args:
        source: the stored state.
        keys: the places of its modules and optimizers, if known.
        state: the requested state.
        objects: the paths of its modules and optimizers.
        alone: True if it has no modules, so that a state dict is most likely the model's.

    Returns:
        The prefix of the module's stored names by key; and by key the number of the stored optimizer, and whether the
        requested state dict numbers its parameters.
    """
    requested = {key_of(path): value for path, value in items_of(state, bool) if path not in objects}
    stored: Mapping[str, str] = {"": ""} if keys is None else keys["modules"]
    modules = {key: stored[key] for key in requested if key in stored}
    component, document = source.components().get("model", _EMPTY), source.document("optimizer") or {}
    if alone and not modules and len(stored) == 1:
        (prefix,) = stored.values()
        names = {*component.tensors, *component.aliases}
        dicts = {key: value for key, value in {"": state, **requested}.items() if isinstance(value, Mapping)}
        fitting = [key for key, value in dicts.items() if any(f"{prefix}{name}" in names for name in value)]
        modules = dict.fromkeys(fitting, prefix) if len(fitting) == 1 else {}
    states = [key for key, value in requested.items() if is_optimizer_state(value)]
    numbers = dict(zip(states if keys is None else keys["optimizers"], range(len(document)), strict=False))
    return modules, {
        key: (number, key in states and _has_numbers(requested[key], document[str(number)]))
        for key, number in numbers.items()
        if key in requested
    }


def _has_numbers(asked: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
    """Return whether a requested state dict numbers the parameters, in param groups of the stored sizes."""
    sizes = [len(stored["groups"][str(number)]["params"]) for number in range(len(stored["groups"]))]
    groups = [group["params"] for group in asked["param_groups"]]
    return [*map(len, groups)] == sizes and all(type(param) is int for group in groups for param in group)


def as_values(source: Source, modules: Mapping[str, str], optimizers: Mapping[str, tuple[int, bool]]) -> Source:
    """Return a source whose trainer's state has state dicts of stored modules and optimizers, which remain stored.

    Args:
        source: the stored state, which the caller closes.
        modules: of ``requested_dicts``.
        optimizers: of ``requested_dicts``.
    """
    model, optimizer = (source.components().get(name, _EMPTY) for name in ("model", "optimizer"))
    names, values = {name: name for name in model.tensors} | dict(model.aliases), source.document("model") or {}
    table, document = dict(source.table.get("trainer", {})), source.document("optimizer") or {}
    for place, prefix in modules.items():
        inside = {_inside(place, n.removeprefix(prefix)): key for n, key in names.items() if n.startswith(prefix)}
        table |= {name: source.table["model"][key] for name, key in inside.items()}
    states = list[tuple[str, bool, StoredOptimizer, dict[str, str]]]()
    for place, (number, by_number) in optimizers.items():
        one = StoredOptimizer(number, document[str(number)], optimizer, decode_equal)
        numbers = one.numbers if by_number else {}
        new_keys = {  # by stored key
            key: f"{_inside(place, 'state')}/{numbers.get(param, param)}/{name}"
            for param, of_param in one.tensors.items()
            for name, key in of_param.items()
        }
        table |= {name: source.table["optimizer"][key] for key, name in new_keys.items()}
        states.append((place, by_number, one, new_keys))

    def trainer(stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        trainer_state = source.trainer(stored)
        for place, prefix in modules.items():
            own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            others = {n.removeprefix(prefix): decode_small(v) for n, v in values.items() if n.startswith(prefix)}
            insert(trainer_state, place, OrderedDict((name, stored(_inside(place, name))) for name in own) | others)
        for place, by_number, one, new_keys in states:
            tensors = {key: stored(name) for key, name in new_keys.items()}
            insert(trainer_state, place, one.state_dict(tensors, by_number=by_number))
        return trainer_state

    return replace(source.with_names({"trainer": table}, {}, {}), trainer=trainer)


def _inside(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name
