"""Load a checkpoint into the objects of a flat dict: match objects and names, then fill them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.checkpoint import LoadResult, load
from lightning_shardckpt.checkpoint.load_job import LoadOptions
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint.partly_loaded import mark_partly_loaded
from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.index import Component
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike, map_names, parameters_of
from lightning_shardckpt.sources.model_names import fit_names, has_weights_only
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.state.documents import StoredOptimizer
from lightning_shardckpt.state.dtensor_layout import copy_slice
from lightning_shardckpt.state.json_tree import decode_small
from lightning_shardckpt.state.load_hooks import LoadedModules
from lightning_shardckpt.state.model import WholeNames, tied_names
from lightning_shardckpt.state.nested_dict import NestedObjects, unwrap
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import (
    KEYS,
    NOTHING,
    Path,
    check_keys,
    insert,
    is_optimizer_state,
    is_weights,
    items_of,
    key_of,
    replaced,
    value_at,
)
from lightning_shardckpt.state.tensor_bytes import TORCH_DTYPES
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.system.memory import gc_paused
from lightning_shardckpt.system.text import list_some

_EMPTY = Component({})


class NestedLoad:
    """One load into a flat dict, on one rank.

    Args:
        state: the dict to load into.
        prefix: of the stored names.
        key_mapping: from stored names without ``prefix`` to names in the state.
        name: returns the names of the model over all pipeline stages, and the module of the optimizers in a state
            without modules; by default, ranks exchange names if they have different ones.
        keep_parameters: see ``LoadedModules.load``.
    """

    def __init__(
        self,
        state: dict[str, Any],
        *,
        prefix: str = "",
        key_mapping: KeyMappingLike | None = None,
        name: Callable[[NestedObjects], tuple[WholeNames, nn.Module | None]] | None = None,
        keep_parameters: bool = False,
    ) -> None:
        self._state, self._prefix, self._key_mapping = state, prefix, key_mapping
        self._name, self._keep_parameters = name, keep_parameters
        self._objects, self._whole, self._are_same = NestedObjects(), WholeNames(), True
        self._state_dict: dict[str, Any] = {}
        self._tensors: dict[Path, torch.Tensor] = {}  # of plain state
        self._values: list[Path] = []
        self._missing: list[str] = []  # keys of the state that the checkpoint does not have

    # --- agreement, in the order of the calls ---

    def look(self) -> tuple[str, list[str]]:
        """Return a digest of the names in this rank's state, and the keys of its objects.

        Raises:
            TypeError: if the state is not a dict with strings as keys.
            StateError: see ``NestedObjects.of``.
            ValueError: for a malformed key mapping.
        """
        self._key_mapping = KeyMapping.of(self._key_mapping)
        self._objects = NestedObjects.of(self._state)
        names = self._objects.entries() if self._name is None else ()
        return checksum("\n".join(sorted(names)).encode()), self._objects.keys

    def agree(self, views: list[tuple[str, list[str]]]) -> tuple[bool, list[str]]:
        """Return whether all ranks have the same names, and the order of rank 0's objects."""
        return len({digest for digest, _ in views}) == 1, views[0][1]

    def take(self, answer: tuple[bool, list[str]]) -> None:
        """Bring the objects into the order of rank 0."""
        self._are_same, order = answer
        self._objects = self._objects.in_order(order)

    def join(self, ranks: Ranks) -> None:
        """Exchange the names of pipeline stages, if they differ. Collective: every rank must call it."""
        if not self._are_same:
            own = sorted(self._objects.entries())
            joined: list[str] = ranks.step("joining names", lambda: own, lambda all_: sorted({*chain(*all_)}))
            self._whole = WholeNames(frozenset(joined))

    def targets(self) -> LoadTargets:
        """Return the live objects that ``checkpoint.load`` fills."""
        objects, owner = self._objects, None
        if self._name is not None:
            self._whole, owner = self._name(objects)
        self._state_dict, names = objects.state_dict(), objects.parameter_names(owner, self._whole)
        if not objects.modules and owner is not None:
            self._whole = _optimizer_names(objects.entries(owner), unwrap(owner), self._whole)
        for path, value in objects.leaves():
            if isinstance(value, torch.Tensor):
                self._tensors[path] = value
            else:
                self._values.append(path)
        optimizers = list(objects.optimizers.values())
        params = [[p for group in one.param_groups for p in group["params"]] for one in optimizers]
        named = all(id(param) in names for one in params for param in one)
        targets = LoadTargets.of_module(
            objects.root, self._state_dict, self._whole, optimizers if optimizers else None, modules=objects.named
        )
        return replace(
            targets,
            names={id(param): names.get(id(param), f"#{i}") for one in params for i, param in enumerate(one)},
            fit_source=partial(self._fit, targets.model, optimizers, named),
            trainer_tensors={key_of(path): tensor.detach() for path, tensor in self._tensors.items()},
            like=objects.sharded_tensors(),
            remedy="Pass strict=False",
            in_stages=self._name is not None,
            has_model=bool(objects.modules),
        )

    # --- matching ---

    def _fit(
        self, leaves: Leaves, optimizers: list[Optimizer], named: bool, source: Source
    ) -> tuple[Source, list[str]]:
        """Return a source of the requested state under the live names, and a line for each difference.

        Takes optimizers that were not stored out of ``optimizers``.
        """
        source = source.all_modules() if source.all_modules is not None else source
        objects, trainer = self._objects, _blank_trainer(source)
        keys = check_keys(trainer.get(KEYS), source.path)
        stored = {"modules": {}, "optimizers": []} if keys is None else keys
        requested = [*objects.modules, *objects.optimizers]
        dicts = [key_of(p) for p in dict.fromkeys([*((k,) for k in trainer), *requested]) if _is_state_dict(trainer, p)]
        present = [*stored["modules"], *stored["optimizers"], *(key for key in trainer if key != KEYS)]
        prefixes = _stored_prefixes(objects.prefixes, keys, "model" in source.components(), dicts)
        numbers = _stored_numbers([*objects.optimizers], stored["optimizers"], source.document("optimizer"), dicts)
        optimizers[:] = [one for path, one in objects.optimizers.items() if path in numbers]
        self._missing = [key_of(path) for path in requested if path not in prefixes and path not in numbers]
        module_dicts, optimizer_dicts = _requested_dicts(
            source, keys, self._state, requested, alone=not objects.modules
        )
        if module_dicts or optimizer_dicts:
            source = _as_values(source, module_dicts, optimizer_dicts)
            trainer = _blank_trainer(source)
        problems = self._compare_plain((*self._tensors, *objects.stateful, *self._values), trainer)
        if self._missing:
            missing, has, states = (list_some([*map(repr, kind)]) for kind in (self._missing, present, dicts))
            there = f"it has {has}" if has else "it has a model alone"
            hint = f". {states} there are state dicts: load them into such, as model.state_dict()" if states else ""
            problems.append(f"the checkpoint does not have {missing} of the state; {there}{hint}")
        document = source.document("optimizer")
        if numbers and not named and any(not one["numbered"] for one in document.values()):
            remedy = "load it together with its module, or build it from named_parameters()"
            problems.append(f"optimizer  its parameters are in no module of the state: {remedy}")
        moved = {prefix: objects.prefixes[path] for path, prefix in prefixes.items()}
        if not objects.modules:  # the stored module that has all parameters of the optimizers
            parameters = [n.removeprefix(self._prefix) for n in parameters_of(document, numbers.values())]
            common = [p for p in stored["modules"].values() if all(n.startswith(p) for n in parameters)]
            moved = {max(common, key=len, default=""): ""}
        mapping, move = KeyMapping.of(self._key_mapping), partial(_move_prefix, prefixes=moved)
        numbered = list(numbers.values())
        renamed, more = map_names(source, mapping, prefix=self._prefix, move=move, optimizers=numbered)
        problems += more
        if prefixes and has_weights_only(renamed):
            names = self._whole.state or {*leaves.tensors, *leaves.aliases}
            renamed, _, more, _ = fit_names(renamed, objects.root, names)
            problems += more
        return renamed, problems

    def _compare_plain(self, paths: Iterable[Path], trainer: Mapping[str, Any]) -> list[str]:
        """Return a line for each tensor outside of modules that differs; note the missing entries.

        Tensors that differ, or are missing, stay as they are.
        """
        problems = list[str]()
        for path in paths:
            live, stored = self._tensors.get(path), value_at(trainer, path, NOTHING)
            if stored is NOTHING:
                self._missing.append(key_of(path))
            elif live is None:
                continue
            elif not isinstance(stored, torch.Tensor):
                problems.append(f"{key_of(path)}  {type(stored).__name__} in checkpoint, a tensor in the state")
            elif (stored.shape, stored.dtype) != (live.shape, live.dtype):
                there, here = (f"{t.dtype} {tuple(t.shape)}" for t in (stored, live))
                problems.append(f"{key_of(path)}  {there} in checkpoint, {here} in the state")
            else:
                continue
            self._tensors.pop(path, None)
        return problems

    # --- loading ---

    @gc_paused()
    def run(
        self,
        path: str,
        ranks: Ranks,
        *,
        options: LoadOptions,
        storage: Storage,
    ) -> tuple[dict[str, Any], LoadResult]:
        """Load the checkpoint; return its remaining plain state, and the result of ``checkpoint.load``.

        Collective: every rank of ``ranks`` must call it. Raises the errors of ``api.load``.
        """

        def filling(is_full: bool = False) -> AbstractContextManager[None]:
            filled: list[nn.Module | Optimizer] = [*self._objects.modules.values(), *self._objects.optimizers.values()]
            return mark_partly_loaded(filled, path, is_full)

        result = load(path, self, ranks=ranks, options=options, filling=filling, storage=storage)
        remainder = dict[str, Any]()

        def finish() -> list[str]:
            loaded = LoadedModules(self._objects.named, self._state_dict, result.hooked, self._whole)
            entries, keep = loaded.state_dict(result.extra_state), self._keep_parameters
            notes = loaded.load(entries, strict=options.strict, keep_parameters=keep)
            remainder.update(self._finish_others(result.trainer))
            return notes

        phase = f"loading the rest of {path!r} into modules and other objects"
        with filling():
            result.notes.extend(ranks.step(phase, finish, lambda notes: list(dict.fromkeys(chain(*notes)))))
        return {key: value for key, value in remainder.items() if key not in (KEYS, "rank_state")}, result

    @torch.no_grad()
    def _finish_others(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """Move the requested entries of the trainer's state into the objects and the dict; return the others."""
        found = [path for path in (*self._objects.stateful, *self._values) if key_of(path) not in self._missing]
        for path, tensor in self._tensors.items():
            value = value_at(trainer, path)
            if tensor.numel() and not _is_same_memory(value, tensor):  # it was inside the JSON
                copy_slice(tensor, value)
        for path in found:
            value = value_at(trainer, path)
            if path in self._objects.stateful:
                self._objects.stateful[path].load_state_dict(value)
            else:
                value_at(self._state, path[:-1])[path[-1]] = value
        objects = (*self._objects.modules, *self._objects.optimizers, *self._objects.loaders)
        in_lists = [path for path in objects if len(path) > 1]  # where None stands for them
        return replaced(trainer, dict.fromkeys((*self._tensors, *found, *in_lists), NOTHING))


def _stored_prefixes(
    live: Mapping[Path, str], keys: dict[str, Any] | None, has_model: bool, dicts: list[str]
) -> dict[Path, str]:
    """Return the prefix of the stored names of each live module that the checkpoint has."""
    prefixes, stored = dict[Path, str](), {} if keys is None else keys["modules"]
    for path, prefix in live.items():
        if key_of(path) in stored:
            prefixes[path] = stored[key_of(path)]
        elif len(live) == len(stored) == 1 and key_of(path) not in dicts:
            prefixes[path] = next(iter(stored.values()))
        elif keys is None and has_model:
            prefixes[path] = prefix
    return prefixes


def _stored_numbers(live: list[Path], keys: list[str], document: Any, dicts: list[str]) -> dict[Path, int]:
    """Return the stored number of each live optimizer that the checkpoint has: by key, or else in order."""
    stored = keys[: len(document or ())]
    if len(live) == len(document or ()) and not set(stored) & set(map(key_of, live)):
        return {path: number for number, path in enumerate(live) if key_of(path) not in dicts}
    return {path: stored.index(key_of(path)) for path in live if key_of(path) in stored}


def _is_state_dict(trainer: Mapping[str, Any], path: Path) -> bool:
    value = value_at(trainer, path, None)
    return is_weights(value) or is_optimizer_state(value)


def _move_prefix(name: str, prefixes: Mapping[str, str]) -> str | None:
    """Return the name with its longest prefix replaced, or None if it has none of the prefixes."""
    longest = max((prefix for prefix in prefixes if name.startswith(prefix)), key=len, default=None)
    return None if longest is None else prefixes[longest] + name.removeprefix(longest)


def _optimizer_names(own: frozenset[str], module: nn.Module, whole: WholeNames) -> WholeNames:
    """Return the names for optimizers that are loaded without modules: those of other ranks, and all ties."""
    ties = whole.ties or tuple(map(tuple, tied_names(module)))
    own = own.union(*(tie for tie in ties if own.intersection(tie)))
    return WholeNames(whole.state - own, ties, whole.parameters)


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    locals_ = [dtensor.local_tensor(t) for t in (a, b)]
    return type(a) is type(b.detach()) and locals_[0].data_ptr() == locals_[1].data_ptr() and bool(locals_[0].numel())


# ── stored objects as state dicts ─────────────────────────────────────────────────────────────────────────────────────
# Fabric's own strategies and plain files do not distinguish the state dict of a module from one that a script kept as a
# value, such as the best weights so far.


def _blank_trainer(source: Source) -> dict[str, Any]:
    """Return the trainer's state with meta tensors for its tensors."""
    specs = source.components().get("trainer", _EMPTY).tensors

    def blank(key: str) -> torch.Tensor:
        return torch.empty(specs[key].shape, dtype=TORCH_DTYPES[specs[key].dtype], device="meta")

    return source.trainer(blank)


def _requested_dicts(
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


def _as_values(source: Source, modules: Mapping[str, str], optimizers: Mapping[str, tuple[int, bool]]) -> Source:
    """Return a source whose trainer's state has state dicts of stored modules and optimizers, which remain stored.

    Args:
        source: the stored state, which the caller closes.
        modules: of ``_requested_dicts``.
        optimizers: of ``_requested_dicts``.
    """
    model, optimizer = (source.components().get(name, _EMPTY) for name in ("model", "optimizer"))
    names, values = {name: name for name in model.tensors} | dict(model.aliases), source.document("model") or {}
    table, document = dict(source.table.get("trainer", {})), source.document("optimizer") or {}
    for place, prefix in modules.items():
        inside = {_inside(place, n.removeprefix(prefix)): key for n, key in names.items() if n.startswith(prefix)}
        table |= {name: source.table["model"][key] for name, key in inside.items()}
    states = list[tuple[str, bool, StoredOptimizer, dict[str, str]]]()
    for place, (number, by_number) in optimizers.items():
        one = StoredOptimizer(number, document[str(number)], optimizer, decode_small)
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
