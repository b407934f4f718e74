"""Load a checkpoint into the objects of a flat dict: match objects and names, then fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.checkpoint import LoadResult, load
from lightning_shardckpt.checkpoint.checkpoint_options import LoadOptions
from lightning_shardckpt.checkpoint.match import LoadTargets
from lightning_shardckpt.checkpoint.nested_save import check_state
from lightning_shardckpt.checkpoint.partly_loaded import mark_partly_loaded
from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike
from lightning_shardckpt.sources.model_names import fit_names, has_weights_only, map_names, parameters_of
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.state_dict_views import as_values, blank_trainer, places_of
from lightning_shardckpt.state.dtensor_layout import copy_slice
from lightning_shardckpt.state.load_hooks import LoadHooks, load_remaining, loaded_state_dict
from lightning_shardckpt.state.model import WholeNames, is_value, model_leaves, tied_names
from lightning_shardckpt.state.nested_dict import (
    NestedObjects,
    names_for,
    names_in,
    put_at,
    remove_at,
    sharded_tensors,
    unwrap,
    value_at,
)
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.state_dicts import KEYS, Path, check_keys, is_optimizer_state, is_weights, key_of
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.system.memory import gc_paused
from lightning_shardckpt.system.text import list_some


@dataclass(slots=True)
class _Found:
    """The parts of a state that a checkpoint has.

    Attributes:
        missing: keys of the state that it does not have.
        present: its own keys.
        dicts: of these, the keys of state dicts.
        fillable: paths of tensors that match stored ones.
    """

    missing: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    dicts: list[str] = field(default_factory=list)
    fillable: set[Path] = field(default_factory=set)


class NestedLoad:
    """One load into a flat dict, on one rank.

    Args:
        state: the dict to load into.
        prefix: of the stored names.
        key_mapping: from stored names without ``prefix`` to names in the state.
        name: returns the names of the model over all pipeline stages, and the module of the optimizers in a state
            without modules; by default, ranks exchange names if they have different ones.
        keep_parameters: see ``load_remaining``.
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
        self._found = _Found()

    # --- agreement, in the order of the calls ---

    def look(self) -> tuple[str, list[str]]:
        """Return a digest of the names in this rank's state, and the keys of its objects.

        Raises:
            TypeError: if the state is not a dict with strings as keys.
            StateError: see ``collect_objects``.
            ValueError: for a malformed key mapping.
        """
        self._key_mapping = KeyMapping.of(self._key_mapping)
        self._objects = check_state(self._state)
        names = names_in(self._objects) if self._name is None else ()
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
            own = sorted(names_in(self._objects))
            joined: list[str] = ranks.step("joining names", lambda: own, lambda all_: sorted({*chain(*all_)}))
            self._whole = WholeNames(frozenset(joined))

    def targets(self) -> LoadTargets:
        """Return the live objects that ``checkpoint.load`` fills."""
        objects, owner = self._objects, None
        if self._name is not None:
            self._whole, owner = self._name(objects)
        self._state_dict, names = objects.state_dict(), names_for(objects, owner, self._whole)
        if not objects.modules and owner is not None:
            self._whole = _optimizer_names(names_in(objects, owner), unwrap(owner), self._whole)
        tensors = {n: v for n, v in self._state_dict.items() if not is_value(n, v)}
        leaves, _ = model_leaves(tensors, objects.root if objects.modules else None, self._whole)
        optimizers = list(objects.optimizers.values())
        named = all(id(param) in names for optimizer in optimizers for param in _params(optimizer))
        return LoadTargets(
            leaves,
            frozenset(clean_fqn(n) for n, v in self._state_dict.items() if is_value(n, v)),
            optimizers if optimizers else None,
            {id(p): names.get(id(p), f"#{i}") for one in optimizers for i, p in enumerate(_params(one))},
            self._whole,
            fit_source=partial(self._fit, leaves, optimizers, named),
            trainer_tensors={key_of(path): tensor.detach() for path, tensor in objects.tensors.items()},
            like=sharded_tensors(objects),
            remedy="Pass strict=False",
            in_stages=self._name is not None,
            has_model=bool(objects.modules),
            hooks=LoadHooks.of(objects.named, self._state_dict),
        )

    # --- matching ---

    def _fit(
        self, leaves: Leaves, optimizers: list[Optimizer], named: bool, source: Source
    ) -> tuple[Source, list[str]]:
        """Return a source of the requested state under the live names, and a line for each difference.

        Takes optimizers that were not stored out of ``optimizers``.
        """
        source = source.all_modules() if source.all_modules is not None else source
        objects, found, trainer = self._objects, _Found(), blank_trainer(source)
        keys = check_keys(trainer.get(KEYS), source.path)
        of_objects = [*keys["modules"], *keys["optimizers"]] if keys is not None else []
        found.present = [*of_objects, *(key for key in trainer if key != KEYS)]
        paths: list[Path] = [*((key,) for key in trainer), *objects.modules, *objects.optimizers]
        found.dicts = [key_of(path) for path in dict.fromkeys(paths) if _is_state_dict(trainer, path)]
        prefixes = _stored_prefixes(objects.prefixes, keys, "model" in source.components(), found)
        numbers = _stored_numbers([*objects.optimizers], keys, source.document("optimizer"), found)
        optimizers[:] = [one for path, one in objects.optimizers.items() if key_of(path) not in found.missing]
        requested = (*objects.tensors, *objects.stateful, *objects.values)
        places = places_of(source, keys, self._state, requested, alone=not objects.modules)
        if places.modules or places.optimizers:
            source = as_values(source, places)
            trainer = blank_trainer(source)
        problems = _compare_rest(objects, trainer, found)
        if found.missing:
            kinds = (found.present, found.missing, found.dicts)
            present, missing, dicts = (list_some([*map(repr, kind)]) for kind in kinds)
            there = f"it has {present}" if present else "it has a model alone"
            hint = f". {dicts} there are state dicts: load them into such, as model.state_dict()" if dicts else ""
            problems.append(f"the checkpoint does not have {missing} of the state; {there}{hint}")
        document = source.document("optimizer")
        if numbers and not named and any(not one["numbered"] for one in document.values()):
            remedy = "load it together with its module, or build it from named_parameters()"
            problems.append(f"optimizer  its parameters are in no module of the state: {remedy}")
        self._found = found
        live_prefixes = {stored: objects.prefixes[path] for path, stored in prefixes.items()}
        if not objects.modules:
            parameters = parameters_of(source.document("optimizer"), numbers)
            common = _common_prefix((name.removeprefix(self._prefix) for name in parameters), keys)
            live_prefixes = {common: ""}
        mapping, move = KeyMapping.of(self._key_mapping), partial(_move_prefix, prefixes=live_prefixes)
        renamed, more = map_names(source, mapping, prefix=self._prefix, move=move, optimizers=numbers)
        if prefixes and has_weights_only(renamed):
            names = self._whole.state or {*leaves.tensors, *leaves.aliases}
            renamed, _, different, _ = fit_names(renamed, objects.root, names)
            more += different
        return renamed, problems + more

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
            return mark_partly_loaded(filled, path, is_full, hooks=True)

        result = load(path, self, ranks=ranks, options=options, filling=filling, storage=storage)

        def finish() -> list[str]:
            notes = self._finish_modules(result, strict=options.strict)
            self._finish_others(result.trainer)
            return notes

        phase = f"loading the rest of {path!r} into modules and other objects"
        with filling():
            result.notes.extend(ranks.step(phase, finish, lambda notes: list(dict.fromkeys(chain(*notes)))))
        remainder = {key: value for key, value in result.trainer.items() if key not in (KEYS, "rank_state")}
        return remainder, result

    def _finish_modules(self, result: LoadResult, *, strict: bool) -> list[str]:
        """Load entries that can't be filled in place; return the differences that the modules' own code reports."""
        modules, live = self._objects.named, self._state_dict
        entries = loaded_state_dict(modules, live, result.extra_state, result.hooked)
        keep = self._keep_parameters
        return load_remaining(modules, live, entries, result.hooked, self._whole, strict=strict, keep_parameters=keep)

    @torch.no_grad()
    def _finish_others(self, trainer: dict[str, Any]) -> None:
        """Move the requested entries of the trainer's state into the objects and the dict."""
        tensors = {path: self._objects.tensors[path] for path in self._found.fillable}
        missing, moved = {*self._found.missing}, list[Path]()
        for path in (*tensors, *self._objects.stateful, *self._objects.values):
            if key_of(path) in missing:
                continue
            value = value_at(trainer, path)
            if path in tensors:
                if tensors[path].numel() and not _is_same_memory(value, tensors[path]):  # it was inside the JSON
                    copy_slice(tensors[path], value)
            elif path in self._objects.stateful:
                self._objects.stateful[path].load_state_dict(value)
            else:
                put_at(self._state, path, value)
            moved.append(path)
        for path in moved:  # all at the end, since a list is removed with its last requested item
            remove_at(trainer, path)


def _stored_prefixes(
    live: Mapping[Path, str], keys: dict[str, Any] | None, has_model: bool, found: _Found
) -> dict[Path, str]:
    """Return the prefix of the stored names of each live module that the checkpoint has; note the missing ones."""
    prefixes, stored = dict[Path, str](), {} if keys is None else keys["modules"]
    for path, prefix in live.items():
        if key_of(path) in stored:
            prefixes[path] = stored[key_of(path)]
        elif len(live) == len(stored) == 1 and key_of(path) not in found.dicts:
            prefixes[path] = next(iter(stored.values()))
        elif keys is None and has_model:
            prefixes[path] = prefix
        else:
            found.missing.append(key_of(path))
    return prefixes


def _stored_numbers(live: list[Path], keys: dict[str, Any] | None, document: Any, found: _Found) -> list[int]:
    """Return the stored numbers of the live optimizers; note the missing ones."""
    count = len(document or ())
    stored: list[str] = (keys["optimizers"] if keys is not None else [])[:count]
    in_order = len(live) == count and not set(stored) & set(map(key_of, live))
    numbers = []
    for place, path in enumerate(live):
        if key_of(path) in stored:
            numbers.append(stored.index(key_of(path)))
        elif in_order and key_of(path) not in found.dicts:
            numbers.append(place)
        else:
            found.missing.append(key_of(path))
    return numbers


def _compare_rest(objects: NestedObjects, trainer: dict[str, Any], found: _Found) -> list[str]:
    """Return a line for each tensor outside of modules that differs; note those that match, and missing entries."""
    problems = []
    for path in (*objects.tensors, *objects.stateful, *objects.values):
        try:
            stored = value_at(trainer, path)
        except LookupError:
            found.missing.append(key_of(path))
            continue
        live = objects.tensors.get(path)
        if live is None:
            continue
        if not isinstance(stored, torch.Tensor):
            problems.append(f"{key_of(path)}  {type(stored).__name__} in checkpoint, a tensor in the state")
        elif (stored.shape, stored.dtype) != (live.shape, live.dtype):
            there, here = (f"{t.dtype} {tuple(t.shape)}" for t in (stored, live))
            problems.append(f"{key_of(path)}  {there} in checkpoint, {here} in the state")
        else:
            found.fillable.add(path)
    return problems


def _is_state_dict(trainer: Mapping[str, Any], path: Path) -> bool:
    try:
        value = value_at(trainer, path)
    except LookupError:
        return False
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


def _common_prefix(names: Iterable[str], keys: Mapping[str, Any] | None) -> str:
    """Return the prefix of the stored module that has all parameters of the optimizers, "" if there is none."""
    known, prefixes = list(names), keys["modules"].values() if keys is not None else ()
    common = [prefix for prefix in prefixes if all(name.startswith(prefix) for name in known)]
    return max(common, key=len, default="")


def _params(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _is_same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    locals_ = [dtensor.local_tensor(t) for t in (a, b)]
    return type(a) is type(b.detach()) and locals_[0].data_ptr() == locals_[1].data_ptr() and bool(locals_[0].numel())
