"""Load a checkpoint into the objects of a flat dict: match objects and names, then fill them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.checkpoint import LoadResult, load
from lightning_shardckpt.checkpoint.checkpoint_options import LoadOptions
from lightning_shardckpt.checkpoint.load_targets import LoadTargets
from lightning_shardckpt.checkpoint.nested_save import check_state
from lightning_shardckpt.checkpoint.partly_loaded import mark_partly_loaded
from lightning_shardckpt.compat import dtensor
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.checksum import checksum
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike
from lightning_shardckpt.sources.match import fit_to
from lightning_shardckpt.sources.source import Source
from lightning_shardckpt.sources.source_view import model_names, parameters_of, rename_source
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


class NestedLoad:
    """One load into a flat dict, on one rank.

    Args:
        state: the dict to load into.
        prefix: of the stored names.
        key_mapping: from stored names without ``prefix`` to names in the state.
        name: returns the names of the model over all pipeline stages, and the module of the optimizers in a state
            without modules; by default, ranks exchange names if they have different ones.
        keep_parameters: see ``load_remaining``.

    Attributes:
        missing: keys of the state that the checkpoint does not have, once the load has begun.
        present: keys of the checkpoint, once the load has begun.
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
        self._state, self._prefix, self._given_mapping, self._key_mapping = state, prefix, key_mapping, KeyMapping()
        self._name, self._keep_parameters = name, keep_parameters
        self._objects, self._whole = NestedObjects(), WholeNames()
        self._own_names, self._are_same = frozenset[str](), True
        self._state_dict: dict[str, Any] = {}
        self._leaves = Leaves()
        self._optimizers: list[Optimizer] = []
        self._named: dict[int, str] = {}
        self._fillable: set[Path] = set()  # paths of tensors that match the stored ones
        self.missing: list[str] = []
        self.present: list[str] = []
        self._dicts: list[str] = []  # keys of the checkpoint that are state dicts

    # --- agreement, in the order of the calls ---

    @property
    def in_stages(self) -> bool:
        """True if a strategy names the parameters, which knows those of all stages."""
        return self._name is not None

    def look(self) -> tuple[str, list[str]]:
        """Return a digest of the names in this rank's state, and the keys of its objects.

        Raises:
            TypeError: if the state is not a dict with strings as keys.
            StateError: see ``collect_objects``.
            ValueError: for a malformed key mapping.
        """
        self._key_mapping = KeyMapping.of(self._given_mapping)
        self._objects = check_state(self._state)
        self._own_names = names_in(self._objects) if self._name is None else frozenset()
        return checksum("\n".join(sorted(self._own_names)).encode()), self._objects.keys

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
            own = sorted(self._own_names)
            joined: list[str] = ranks.step("joining names", lambda: own, lambda all_: sorted({*chain(*all_)}))
            self._whole = WholeNames(frozenset(joined))

    def targets(self) -> LoadTargets:
        """Return the live objects that ``checkpoint.load`` fills."""
        objects, owner = self._objects, None
        if self._name is not None:
            self._whole, owner = self._name(objects)
            self._own_names = names_in(objects, owner)
        self._state_dict, self._named = objects.state_dict(), names_for(objects, owner, self._whole)
        if not objects.modules and owner is not None:
            self._whole = _optimizer_names(self._own_names, unwrap(owner), self._whole)
        tensors = {n: v for n, v in self._state_dict.items() if not is_value(n, v)}
        self._leaves, _ = model_leaves(tensors, objects.root if objects.modules else None, self._whole)
        self._optimizers = list(objects.optimizers.values())
        return LoadTargets(
            self._leaves,
            frozenset(clean_fqn(n) for n, v in self._state_dict.items() if is_value(n, v)),
            self._optimizers if self._objects.optimizers else None,
            {id(p): self._named.get(id(p), f"#{i}") for o in self._optimizers for i, p in enumerate(_params(o))},
            self._whole,
            fit_source=self.fit_source,
            trainer_tensors={key_of(path): tensor.detach() for path, tensor in self._objects.tensors.items()},
            like=sharded_tensors(self._objects),
            remedy="Pass strict=False",
            has_model=bool(self._objects.modules),
            hooks=LoadHooks.of(self._objects.named, self._state_dict),
        )

    def fit_source(self, source: Source) -> tuple[Source, list[str]]:
        """Return a source of the requested state under the live names, and a line for each difference."""
        source = source.all_modules() if source.all_modules is not None else source
        self.missing.clear()  # of an earlier start of this load
        self._fillable.clear()
        trainer = blank_trainer(source)
        keys = check_keys(trainer.get(KEYS), source.path)
        objects = [*keys["modules"], *keys["optimizers"]] if keys is not None else []
        self.present = [*objects, *(key for key in trainer if key != KEYS)]
        wanted = [path for path in (*self._objects.modules, *self._objects.optimizers) if len(path) > 1]
        paths: list[Path] = [*((key,) for key in trainer), *wanted]
        self._dicts = [key_of(path) for path in paths if _is_state_dict(trainer, path)]
        prefixes = self._stored_prefixes(keys, "model" in source.components())
        numbers = self._stored_numbers(keys, source.document("optimizer"))
        requested = (*self._objects.tensors, *self._objects.stateful, *self._objects.values)
        places = places_of(source, keys, self._state, requested, alone=not self._objects.modules)
        if places.modules or places.optimizers:
            source = as_values(source, places)
            trainer = blank_trainer(source)
        problems = self._compare_rest(trainer)
        problems += [f"{key}  in the state only" for key in self.missing]
        if numbers and any(id(p) not in self._named for o in self._optimizers for p in _params(o)):
            problems += self._unnamed(source)
        stored_prefixes = {self._objects.prefixes[path]: prefix for path, prefix in prefixes.items()}
        if not self._objects.modules:
            parameters = parameters_of(source.document("optimizer"), numbers)
            stored_prefixes = {"": _common_prefix((name.removeprefix(self._prefix) for name in parameters), keys)}
        names, others, left_out = self._names(stored_prefixes, source, problems)
        live_named = rename_source(source, names, others, numbers, left_out)
        if not prefixes:
            return live_named, problems
        fitted, more = fit_to(live_named, module=self._objects.root, live=self._leaves, whole=self._whole)
        return fitted, problems + more

    def _stored_prefixes(self, keys: dict[str, Any] | None, has_model: bool) -> dict[Path, str]:
        """Return the prefix of the stored names of each live module that the checkpoint has."""
        live, prefixes = self._objects.prefixes, {}
        stored: dict[str, str] = {} if keys is None else keys["modules"]
        for path, prefix in live.items():
            if key_of(path) in stored:
                prefixes[path] = stored[key_of(path)]
            elif len(live) == len(stored) == 1 and key_of(path) not in self._dicts:
                prefixes[path] = next(iter(stored.values()))
            elif keys is None and has_model:
                prefixes[path] = prefix
            else:
                self.missing.append(key_of(path))
        return prefixes

    def _stored_numbers(self, keys: dict[str, Any] | None, document: Any) -> list[int]:
        """Return the stored numbers of the live optimizers; drop live optimizers that were not stored."""
        count = len(document or ())
        stored: list[str] = (keys["optimizers"] if keys is not None else [])[:count]
        paths = list(self._objects.optimizers)
        in_order = len(paths) == count and not set(stored) & set(map(key_of, paths))
        numbers = []
        for place, path in enumerate(paths):
            if key_of(path) in stored:
                numbers.append(stored.index(key_of(path)))
            elif in_order and key_of(path) not in self._dicts:
                numbers.append(place)
            else:
                self.missing.append(key_of(path))
        self._optimizers[:] = [o for path, o in self._objects.optimizers.items() if key_of(path) not in self.missing]
        return numbers

    def _unnamed(self, source: Source) -> list[str]:
        document = source.document("optimizer") or {}
        if all(optimizer["numbered"] for optimizer in document.values()):
            return []
        remedy = "load it together with its module, or build it from named_parameters()"
        return [f"optimizer  its parameters are in no module of the state: {remedy}"]

    def _compare_rest(self, trainer: dict[str, Any]) -> list[str]:
        problems = []
        for path in (*self._objects.tensors, *self._objects.stateful, *self._objects.values):
            try:
                stored = value_at(trainer, path)
            except LookupError:
                self.missing.append(key_of(path))
                continue
            live = self._objects.tensors.get(path)
            if live is None:
                continue
            if not isinstance(stored, torch.Tensor):
                problems.append(f"{key_of(path)}  {type(stored).__name__} in checkpoint, a tensor in the state")
            elif (stored.shape, stored.dtype) != (live.shape, live.dtype):
                there, here = (f"{t.dtype} {tuple(t.shape)}" for t in (stored, live))
                problems.append(f"{key_of(path)}  {there} in checkpoint, {here} in the state")
            else:
                self._fillable.add(path)
        return problems

    def _names(
        self, stored_prefixes: Mapping[str, str], source: Source, problems: list[str]
    ) -> tuple[dict[str, str | None], Callable[[str], str | None], list[str]]:
        """Return the stored name of each live entry, a function from other stored to live names, and those left out."""
        live_prefixes = {stored: live for live, stored in stored_prefixes.items()}
        known = [n.removeprefix(self._prefix) for n in model_names(source) if n.startswith(self._prefix)]
        if wrong := self._key_mapping.suggest(known):
            raise MismatchError(f"cannot load {source.path!r}: key_mapping: " + "\n  ".join(wrong))
        unused = self._key_mapping.unused(known)
        problems += [f"key_mapping: {old!r}  matches no name in the checkpoint" for old in unused]
        stored_names = self._key_mapping.apply(known)

        def live_name(name: str) -> str | None:
            new = self._key_mapping(name.removeprefix(self._prefix)) if name.startswith(self._prefix) else ()
            return _move_prefix(new[0], live_prefixes) if new else None

        names: dict[str, str | None] = {}
        for name in sorted(self._own_names | self._whole.state):
            if (moved := _move_prefix(name, stored_prefixes)) is not None:
                names[name] = self._prefix + stored_names[moved] if moved in stored_names else None
        return names, live_name, [self._prefix + name for name in known if not self._key_mapping(name)]

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

        try:
            result = load(path, self, ranks=ranks, options=options, filling=filling, storage=storage)
        except MismatchError as error:
            if self.missing and options.strict:
                present, missing = (list_some([*map(repr, names)]) for names in (self.present, self.missing))
                there = f"it has {present}" if present else "it has a model alone"
                remedy = "Pass strict=False to load the rest"
                if self._dicts:
                    listed = list_some([*map(repr, self._dicts)])
                    remedy += f". {listed} there are state dicts: load them into such, as model.state_dict()"
                problem = f"checkpoint {path!r} does not have {missing} of the state; {there}"
                raise KeyError(f"{problem}. {remedy}") from error
            raise

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
        tensors = {path: self._objects.tensors[path] for path in self._fillable}
        missing, moved = {*self.missing}, list[Path]()
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
