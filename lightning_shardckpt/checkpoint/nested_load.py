"""Load a checkpoint into the objects of a flat dict: match objects and names, then fill them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_shardckpt.checkpoint.checkpoint import LoadOptions, load, mark_partly_loaded
from lightning_shardckpt.checkpoint.describe import NestedObjects, unwrap
from lightning_shardckpt.checkpoint.load_job import LoadJob, LoadTargets
from lightning_shardckpt.distributed.ranks import Ranks
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import checksum
from lightning_shardckpt.sources.key_mapping import KeyMapping, KeyMappingLike, map_names, parameters_of
from lightning_shardckpt.sources.model_names import fit_names
from lightning_shardckpt.sources.source import Source, StoredTensor, assemble
from lightning_shardckpt.state.json_tree import decode
from lightning_shardckpt.state.local_tensors import TORCH_DTYPES, copy_slice, is_elsewhere
from lightning_shardckpt.state.model import Leaves, LoadedModules, WholeNames, named_tensors, tied_names
from lightning_shardckpt.state.state_dicts import (
    KEYS,
    NOTHING,
    Path,
    check_keys,
    insert,
    items_of,
    key_of,
    replaced,
    states_of_checkpoint,
    value_at,
)
from lightning_shardckpt.storage.protocol import Storage
from lightning_shardckpt.system.host import gc_paused
from lightning_shardckpt.system.text import list_some


@dataclass(slots=True)
class NestedLoad:
    """One load into a flat dict, on one rank: ``run`` does it; ``checkpoint.load`` calls the others in this order."""

    state: dict[str, Any]  # to load into
    prefix: str = ""  # of the stored names
    key_mapping: KeyMappingLike | None = None  # from stored names without ``prefix`` to names in the state
    # returns the names of the model over all pipeline stages, and the module of the optimizers in a state without
    # modules; by default, ranks exchange names if they have different ones
    name: Callable[[NestedObjects], tuple[WholeNames, nn.Module | None]] | None = None
    keep_parameters: bool = False  # see ``LoadedModules.load``
    _objects: NestedObjects = field(default_factory=NestedObjects, init=False)
    _whole: WholeNames = field(default_factory=WholeNames, init=False)
    _state_dict: dict[str, Any] = field(default_factory=dict, init=False)  # of all modules
    _tensors: dict[Path, torch.Tensor] = field(default_factory=dict, init=False)  # of plain state
    _others: list[Path] = field(default_factory=list, init=False)  # of stateful objects and plain values

    @gc_paused()
    def run(self, path: str, ranks: Ranks, *, options: LoadOptions, storage: Storage) -> tuple[dict[str, Any], LoadJob]:
        """Load the checkpoint; return its remaining plain state, and the result of ``checkpoint.load``.

        Collective: every rank of ``ranks`` must call it. Raises the errors of ``api.load``.
        """
        result = load(path, self, ranks=ranks, options=options, storage=storage)
        remainder = dict[str, Any]()

        def finish() -> list[str]:
            loaded = LoadedModules(self._objects.named, self._state_dict, result.hooked, self._whole)
            entries, keep = loaded.state_dict(result.extra_state), self.keep_parameters
            notes = loaded.load(entries, strict=options.strict, keep_parameters=keep)
            remainder.update(self._finish_others(result.trainer))
            return notes

        phase = f"loading the rest of {path!r} into modules and other objects"
        with mark_partly_loaded(self._objects.filled, path):
            result.notes.extend(ranks.step(phase, finish, lambda notes: list(dict.fromkeys(chain(*notes)))))
        return {key: value for key, value in remainder.items() if key not in (KEYS, "rank_state")}, result

    def look(self) -> tuple[str, list[str]]:
        """Return a digest of the names in this rank's state, and the keys of its objects.

        Raises the errors of ``NestedObjects.of``, and a ValueError for a malformed key mapping.
        """
        self.key_mapping, self._objects = KeyMapping.of(self.key_mapping), NestedObjects.of(self.state)
        if self.name is None:
            self._state_dict = self._objects.state_dict()
        return checksum("\n".join(sorted(map(clean_fqn, self._state_dict))).encode()), self._objects.keys

    def agree(self, views: list[tuple[str, list[str]]], ranks: Ranks) -> None:
        """Bring the objects into the order of rank 0, and exchange the names of pipeline stages, if they differ.

        Collective: every rank must call it.
        """
        self._objects = NestedObjects.of(self.state, views[0][1])
        if len({digest for digest, _ in views}) > 1:
            own = sorted(map(clean_fqn, self._state_dict))
            joined: list[str] = ranks.step("joining names", lambda: own, lambda all_: sorted({*chain(*all_)}))
            self._whole = WholeNames(frozenset(joined))

    def targets(self) -> LoadTargets:
        """Return the live objects that ``checkpoint.load`` fills."""
        objects, owner = self._objects, None
        if self.name is not None:
            self._whole, owner = self.name(objects)
            self._state_dict = objects.state_dict()
        optimizers = [*objects.optimizers.values()]
        names = objects.parameter_names(owner, self._whole) if optimizers else {}
        if not objects.modules and owner is not None:  # the names of other ranks, and all ties
            module = unwrap(owner)
            own = frozenset(clean_fqn(name) for name, p in named_tensors(module)[0] if not is_elsewhere(p))
            ties = self._whole.ties or tied_names(module)
            own = own.union(*(tie for tie in ties if own.intersection(tie)))
            self._whole = WholeNames(self._whole.state - own, ties, self._whole.parameters)
        leaves, like = dict[Path, Any](), dict[str, torch.Tensor]()
        for path, value in objects.plain.items():
            leaves |= _leaves(value, path, (dict, list), torch.Tensor)
        for path, one in objects.stateful.items():
            inside = _leaves(one.state_dict(), path, (dict, list, tuple), DTensor)
            like |= {key_of(place): leaf for place, leaf in inside if isinstance(leaf, DTensor)}
        self._tensors = {path: value.detach() for path, value in leaves.items() if isinstance(value, torch.Tensor)}
        self._others = [*objects.stateful, *(path for path in leaves if path not in self._tensors)]
        params = [[p for group in optimizer.param_groups for p in group["params"]] for optimizer in optimizers]
        named = all(id(param) in names for of in params for param in of)
        targets = LoadTargets.of_module(objects.root, self._state_dict, self._whole, modules=objects.named)
        return replace(
            targets,
            optimizers=optimizers or None,
            names={id(param): names.get(id(param), f"#{i}") for of in params for i, param in enumerate(of)},
            fit_source=partial(self._fit, targets.model, optimizers, named),
            trainer_tensors={key_of(path): tensor for path, tensor in self._tensors.items()},
            like=like,
            remedy="Pass strict=False",
            has_model=bool(objects.modules),
            objects=objects.filled,
        )

    def _fit(
        self, leaves: Leaves, optimizers: list[Optimizer], named: bool, source: Source
    ) -> tuple[Source, list[str]]:
        """Return a source of the requested state under the live names, and a line for each difference.

        Takes optimizers that were not stored out of ``optimizers``.
        """
        source = source.all_modules() if source.all_modules is not None else source
        objects, trainer, document = self._objects, _blank_trainer(source), source.document("optimizer") or {}
        keys, has_model = check_keys(trainer.pop(KEYS, None), source.path), "model" in source.table
        stored = keys or {"modules": {}, "optimizers": []}
        prefixes = _stored_prefixes(objects.prefixes, stored["modules"], keys is None and has_model, trainer)
        numbers = _stored_numbers([*objects.optimizers], stored["optimizers"][: len(document)], len(document), trainer)
        optimizers[:] = [one for path, one in objects.optimizers.items() if path in numbers]
        free = {str(path[0]) for path in self._tensors} - trainer.keys()
        if keys is None and has_model and not objects.modules and len(free) == 1:
            stored["modules"] = dict.fromkeys(free, "")  # a model without a key fills the only dict of tensors
        present = stored["modules"], stored["optimizers"], trainer
        # the keys of the state, and of items of its lists, that are no modules and no optimizers
        plain = {path for path, _ in items_of(self.state, bool)} - objects.modules.keys() - objects.optimizers.keys()
        if as_dicts := {*stored["modules"], *stored["optimizers"][: len(document)]} & {*map(key_of, plain)}:
            source = _with_state_dicts(source, stored, as_dicts)
            trainer = _blank_trainer(source)
        values, problems = self._compare_plain(trainer)
        lacking = [[key_of(path) for path in objects.modules if path not in prefixes]]
        lacking += [[key_of(path) for path in objects.optimizers if path not in numbers], values]
        if any(lacking):
            has = _list_kinds(*present) or "a model alone"
            problems.append(f"the checkpoint does not have {_list_kinds(*lacking)} of the state; it has {has}")
        if numbers and not named and any(not one["numbered"] for one in document.values()):
            remedy = "load it together with its module, or build it from named_parameters()"
            problems.append(f"optimizer  its parameters are in no module of the state: {remedy}")
        moved = {prefix: objects.prefixes[path] for path, prefix in prefixes.items()}  # new prefix by stored prefix
        if not objects.modules:  # the stored module that has all parameters of the optimizers
            parameters = [n.removeprefix(self.prefix) for n in parameters_of(document, numbers.values())]
            common = [p for p in stored["modules"].values() if all(n.startswith(p) for n in parameters)]
            moved = {max(common, key=len, default=""): ""}

        def move(name: str) -> str | None:
            longest = max((prefix for prefix in moved if name.startswith(prefix)), key=len, default=None)
            return None if longest is None else moved[longest] + name.removeprefix(longest)

        mapping, used = KeyMapping.of(self.key_mapping), [*numbers.values()]
        is_same = moved == {"": ""} and (not objects.optimizers or used == [*range(len(document))])
        if self.prefix or not mapping.is_empty or not is_same:
            source, more = map_names(source, mapping, prefix=self.prefix, move=move, optimizers=used)
            problems += more
        if prefixes and source.has_weights_only:
            names = self._whole.state or {*leaves.tensors, *leaves.aliases}
            source, more = fit_names(source, objects.root, names)
            problems += more
        return source, problems

    def _compare_plain(self, trainer: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        """Return the keys of plain state and other objects that are not stored, and a line for each other difference.

        What is not stored, or differs, stays as it is.
        """
        missing, problems = list[str](), list[str]()
        for path in (*self._tensors, *self._others):
            live, stored = self._tensors.get(path), value_at(trainer, path, NOTHING)
            if stored is NOTHING:
                missing.append(key_of(path))
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
        return missing, problems

    @torch.no_grad()
    def _finish_others(self, trainer: dict[str, Any]) -> dict[str, Any]:
        """Move the requested entries of the trainer's state into the objects and the dict; return the others."""
        for path, tensor in self._tensors.items():
            value = value_at(trainer, path)
            if value is not tensor and tensor.numel():  # it was inside the JSON
                copy_slice(tensor, value)
        found = {path: value for path in self._others if (value := value_at(trainer, path, NOTHING)) is not NOTHING}
        for path, value in found.items():
            if path in self._objects.stateful:
                self._objects.stateful[path].load_state_dict(value)
            else:
                value_at(self.state, path[:-1])[path[-1]] = value
        objects = (*self._objects.modules, *self._objects.optimizers)
        in_lists = [path for path in objects if len(path) > 1]  # where None stands for them
        return replaced(trainer, dict.fromkeys((*self._tensors, *found, *in_lists), NOTHING))


def _leaves(value: Any, path: Path, containers: tuple[type, ...], kind: type) -> list[tuple[Path, Any]]:
    """Return the values of a kind in nested containers, and the largest parts without any, by path."""
    if not isinstance(value, containers):
        return [(path, value)]
    tree: Any = value
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    leaves = [leaf for key, item in items for leaf in _leaves(item, (*path, key), containers, kind)]
    return leaves if any(isinstance(leaf, kind) for _, leaf in leaves) else [(path, value)]


def _stored_prefixes(
    live: Mapping[Path, str], stored: Mapping[str, str], is_unnamed: bool, others: Mapping[str, Any]
) -> dict[Path, str]:
    """Return the prefix of the stored names of each live module that the checkpoint has.

    A single module gets the single stored one, unless its key in the checkpoint is that of something else. A stored
    model without keys, ``is_unnamed``, has all modules.
    """
    prefixes = dict[Path, str]()
    for path, prefix in live.items():
        if key_of(path) in stored:
            prefixes[path] = stored[key_of(path)]
        elif len(live) == len(stored) == 1 and value_at(others, path) is None:
            prefixes[path] = next(iter(stored.values()))
        elif is_unnamed:
            prefixes[path] = prefix
    return prefixes


def _stored_numbers(live: list[Path], stored: list[str], count: int, others: Mapping[str, Any]) -> dict[Path, int]:
    """Return the stored number of each live optimizer that the checkpoint has: by key, or else in order."""
    if len(live) == count and not set(stored) & set(map(key_of, live)):
        return {path: number for number, path in enumerate(live) if value_at(others, path) is None}
    return {path: stored.index(key_of(path)) for path in live if key_of(path) in stored}


def _list_kinds(*keys: Iterable[str]) -> str:
    """Return a text of the keys of modules, optimizers and values; a state dict is a value.

    >>> _list_kinds(["a"], [], ["b", "c"])
    "modules 'a', values 'b', 'c'"
    """
    kinds = zip(("modules", "optimizers", "values"), ([*map(repr, names)] for names in keys), strict=True)
    return ", ".join(f"{kind} {list_some(names)}" for kind, names in kinds if names)


def _blank_trainer(source: Source) -> dict[str, Any]:
    """Return the trainer's state with meta tensors for its tensors."""
    specs = source.component("trainer").tensors
    return source.trainer(lambda k: torch.empty(specs[k].shape, dtype=TORCH_DTYPES[specs[k].dtype], device="meta"))


def _with_state_dicts(source: Source, stored: Mapping[str, Any], keys: Collection[str]) -> Source:
    """Return a source whose trainer's state has state dicts of the stored modules and optimizers with these keys.

    They remain stored as objects, too. Fabric's own strategies and plain files do not distinguish the state dict of an
    object from one that a script kept as a value, such as the best weights so far.
    """
    objects = replace(source, trainer=lambda _: {KEYS: stored})
    flat = states_of_checkpoint(assemble(objects, lambda component, key: source.table[component][key], decode))
    places = [path for path, _ in items_of(flat, bool) if key_of(path) in keys]
    leaves = chain.from_iterable(_leaves(value_at(flat, path), path, (dict,), StoredTensor) for path in places)
    tensors = {path: leaf for path, leaf in leaves if isinstance(leaf, StoredTensor)}

    def trainer(tensor: Callable[[str], Any]) -> dict[str, Any]:
        state, filled = source.trainer(tensor), replaced(flat, {path: tensor(key_of(path)) for path in tensors})
        for path in places:
            insert(state, key_of(path), value_at(filled, path))
        return state

    table = {**source.table.get("trainer", {}), **{key_of(path): stored for path, stored in tensors.items()}}
    return replace(source.with_names({"trainer": table}, {}, {}), trainer=trainer)
