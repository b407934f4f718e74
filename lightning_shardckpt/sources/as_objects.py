"""Stored state dicts as modules and optimizers: a view of a source for those who ask for objects.

The inverse of ``as_values``: a script kept what ``state_dict()`` returned, and loads it into the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lightning_shardckpt.format.index import Component, TensorSpec
from lightning_shardckpt.sources.source import ReadTarget, Source
from lightning_shardckpt.sources.source_view import SourceView
from lightning_shardckpt.state.dtensor_layout import this_rank, view_at
from lightning_shardckpt.state.key_paths import KEYS, Path, key_of
from lightning_shardckpt.state.model import is_extra_state, model_leaves
from lightning_shardckpt.state.nested_dict import remove_at, value_at
from lightning_shardckpt.state.optimizer import optimizer_leaves
from lightning_shardckpt.state.snapshot import Leaves, specs_of
from lightning_shardckpt.state.state_dicts import checked_keys, is_optimizer_state
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES

_EMPTY = Component({})
_NOTHING = torch.empty(0, device="meta")


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
    keys = checked_keys(known.get(KEYS), source.path)
    if keys is None:
        return source
    modules, _ = dicts_for(known, keys, [("model",)], [])
    optimizers: list[Path] = [(key,) for key, value in known.items() if is_optimizer_state(value)]
    return AsObjects(source, keys, modules, optimizers) if modules else source


def _at(known: Mapping[str, Any], path: Path) -> Any:
    try:
        return value_at(known, path) if path else {key: value for key, value in known.items() if key != KEYS}
    except LookupError:
        return None


def _is_state_dict(value: Any) -> bool:
    if not isinstance(value, Mapping) or not any(isinstance(one, torch.Tensor) for one in value.values()):
        return False
    return all(isinstance(k, str) and (isinstance(v, torch.Tensor) or is_extra_state(k)) for k, v in value.items())


class AsObjects(SourceView):
    """A source in which some state dicts among the trainer's state are modules and optimizers.

    Args:
        source: what is stored, which stays the caller's to close.
        keys: where its modules and optimizers are.
        modules: places of state dicts of modules.
        optimizers: places of state dicts of optimizers.
    """

    def __init__(
        self, source: Source, keys: Mapping[str, Any], modules: Sequence[Path], optimizers: Sequence[Path]
    ) -> None:
        super().__init__(source)
        self._places, self._stored = [*modules, *optimizers], source.components()
        blanks: dict[str, torch.Tensor] = {}

        def blank(key: str) -> torch.Tensor:
            spec = self._stored["trainer"].tensors[key]
            return blanks.setdefault(key, torch.empty(spec.shape, dtype=TORCH_DTYPES[spec.dtype], device="meta"))

        known = source.trainer(blank)
        alone = len(modules) == 1 and "model" not in self._stored
        prefixes = {path: "" if alone else f"{key_of(path)}/" for path in modules}
        state = {prefix + name: v for path, prefix in prefixes.items() for name, v in _at(known, path).items()}
        leaves, values = model_leaves(state)
        document = source.document("optimizer") or {}
        count = len(document)
        states: list[Any] = [{}] * count + [_at(known, path) for path in optimizers]
        of_optimizers, described = optimizer_leaves(states)
        self._documents = {
            "model": (source.document("model") or {}) | values,
            "optimizer": {**described, **document} if states else source.document("optimizer"),
        }
        self._keys = {
            "modules": {**keys["modules"], **{key_of(path): prefix for path, prefix in prefixes.items()}},
            "optimizers": [*keys["optimizers"][:count], *map(key_of, optimizers)],
        }
        self._found = {"model": leaves, "optimizer": of_optimizers}
        of = {id(tensor): key for key, tensor in blanks.items()}
        self._of = {
            (component, key): of[id(tensor)]
            for component, found in self._found.items()
            for key, tensor in found.tensors.items()
            if id(tensor) in of
        }
        self._components = {**self._stored, **{name: self._joined(name) for name in self._found}}
        if "trainer" in self._stored:
            trainer, taken = self._stored["trainer"], {*self._of.values()}
            rest = {key: spec for key, spec in trainer.tensors.items() if key not in taken}
            self._components["trainer"] = Component(rest, trainer.aliases)

    def _joined(self, component: str) -> Component:
        """Return a component with what was found among the trainer's state."""
        found, stored = self._found[component], self._stored.get(component, _EMPTY)
        in_memory = {key: t for key, t in found.tensors.items() if (component, key) not in self._of}
        specs: dict[str, TensorSpec] = specs_of(component, Leaves(in_memory), ((0, 1),))
        specs |= {k: self._stored["trainer"].tensors[of] for (name, k), of in self._of.items() if name == component}
        return Component({**stored.tensors, **specs}, {**stored.aliases, **found.aliases})

    def components(self) -> Mapping[str, Component]:
        """Tensors by component."""
        return self._components

    def document(self, role: str, rank: int = 0) -> Any:
        """Return what was stored under a role."""
        return self._documents[role] if role in self._documents else self._source.document(role, rank)

    def trainer(self, stored: Callable[[str], torch.Tensor]) -> dict[str, Any]:
        """The trainer's state without these state dicts."""
        taken = {*self._of.values()}
        found = self._source.trainer(lambda key: _NOTHING if key in taken else stored(key))
        for path in self._places:
            if path:
                remove_at(found, path)
            else:
                found.clear()
        return found | {KEYS: self._keys}

    def stored_as(self, component: str, key: str) -> tuple[str, str]:
        """Component and key under which a tensor is stored."""
        of = self._of.get((component, key))
        return (component, key) if of is None else ("trainer", of)

    def _in_memory(self, component: str, key: str) -> torch.Tensor | None:
        if component not in self._found or (component, key) in self._of:
            return None
        return self._found[component].tensors.get(key)

    def backed(self, component: str, key: str) -> tuple[int, ...]:
        """The shape of a stored tensor."""
        here = self._in_memory(component, key)
        return super().backed(component, key) if here is None else tuple(here.shape)

    def verify(self, targets: list[ReadTarget]) -> int:
        """Verify what is not in memory already, as small tensors are."""
        return super().verify([target for target in targets if self._in_memory(target.component, target.key) is None])

    def fill(self, targets: list[ReadTarget]) -> None:
        """Fill the targets, from memory where the tensors are there."""
        super().fill([target for target in targets if self._in_memory(target.component, target.key) is None])
        for target in targets:
            full = self._in_memory(target.component, target.key)
            for part in target.parts(this_rank()) if full is not None else ():
                assert full is not None
                view_at(target.local, part.local).copy_(view_at(full, part.box))
