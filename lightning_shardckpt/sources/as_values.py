"""State dicts of modules and optimizers as plain values: a view of a source for those who ask for values.

Fabric's own strategies and plain files do not tell the state dict of a module from one that a script kept as a value,
such as the best weights so far, or that another object gave as its state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_shardckpt.format.index import Component
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.source_view import SourceView
from lightning_shardckpt.state.json_tree import decode_equal, decode_small
from lightning_shardckpt.state.key_paths import Path, key_of
from lightning_shardckpt.state.nested_dict import value_at
from lightning_shardckpt.state.state_dicts import insert, is_optimizer_state
from lightning_shardckpt.state.stored_optimizer import StoredOptimizer

_EMPTY = Component({})


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


class AsValues(SourceView):
    """A source whose trainer's state has some of the stored state dicts; they stay what they are, too.

    Args:
        source: what is stored, which stays the caller's to close.
        places: of the state dicts.
    """

    def __init__(self, source: Source, places: Places) -> None:
        super().__init__(source)
        self._stored, self._places = source.components(), places
        model, optimizer = (self._stored.get(name, _EMPTY) for name in ("model", "optimizer"))
        names = {name: name for name in model.tensors} | dict(model.aliases)
        self._entries = {
            place: {name.removeprefix(prefix): of for name, of in names.items() if name.startswith(prefix)}
            for place, prefix in places.modules.items()
        }
        document = source.document("optimizer") or {}
        self._of: dict[str, tuple[str, str]] = {}  # key in the trainer's state → component and key where it is stored
        for place, entries in self._entries.items():
            self._of |= {_inside(place, name): ("model", of) for name, of in entries.items()}
        self._optimizers = {
            place: StoredOptimizer(number, document[str(number)], optimizer, decode_equal)
            for place, (number, _) in places.optimizers.items()
        }
        self._tensors: dict[str, dict[str, str]] = {}  # by place, stored key of an optimizer's tensor → key here
        for place, one in self._optimizers.items():
            numbers = one.numbers if places.optimizers[place][1] else {}
            self._tensors[place] = {
                of: f"{_inside(place, 'state')}/{numbers.get(param, param)}/{name}"
                for param, found in one.tensors.items()
                for name, of in found.items()
            }
            self._of |= {here: ("optimizer", of) for of, here in self._tensors[place].items()}

    @cached_property
    def _components(self) -> dict[str, Component]:
        trainer = self._stored.get("trainer", _EMPTY)
        added = {key: self._stored[component].tensors[one] for key, (component, one) in self._of.items()}
        return {**self._stored, "trainer": Component({**trainer.tensors, **added}, trainer.aliases)}

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""
        return self._components

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state with the state dicts in their places."""
        found = self._source.trainer(stored)
        values = self.document("model") or {}
        for place, prefix in self._places.modules.items():
            others = [name for name in values if name.startswith(prefix)]
            state: dict[str, Any] = OrderedDict((name, stored(_inside(place, name))) for name in self._entries[place])
            _put(found, place, state | {name.removeprefix(prefix): decode_small(values[name]) for name in others})
        for place, one in self._optimizers.items():
            tensors = {of: stored(here) for of, here in self._tensors[place].items()}
            _put(found, place, one.state_dict(tensors, by_number=self._places.optimizers[place][1]))
        return found

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor is stored, of the state dicts among the trainer's, too."""
        return self._of.get(key, (component, key)) if component == "trainer" else (component, key)


def _inside(place: str, name: str) -> str:
    return f"{place}/{name}" if place else name


def _put(found: dict[str, Any], place: str, state: Mapping[str, Any]) -> None:
    if place:
        insert(found, place, state)
    else:
        found.update(state)
