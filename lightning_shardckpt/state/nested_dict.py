"""The objects with a state in a nested dict, and the places of their state in a checkpoint.

Modules together are the model, whose names are their FQNs: one module's as they are, those of several after the place
of each in the dict, as in ``generator.net.weight``. So the key of a single module is of no consequence, and a
LightningModule's checkpoint, where networks are attributes, is one of several modules as well. Optimizers are numbered
in order. Everything else is trainer state at its place in the dict.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shardckpt.compat.lightning_attributes import fabric_original, loader_of_fabric
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.model import WholeNames, is_elsewhere, named_tensors
from lightning_shardckpt.state.module_io import parameter_names
from lightning_shardckpt.state.optimizer import is_of_torch, optimizer_state, own_entries, refuse_zero_redundancy
from lightning_shardckpt.state.state_dicts import KEYS, RESERVED, Path, join_states, key_of, prefixes_of
from lightning_shardckpt.system.memory import gc_paused

WRAPPED = "_shardckpt_wrapped"
"""Attribute of a module that only runs another one: that one."""

T = TypeVar("T")

Keep: TypeAlias = Callable[[str, Any], bool]


@runtime_checkable
class Stateful(Protocol):
    """An object that saves and restores itself, such as a learning rate scheduler."""

    def state_dict(self) -> Any:
        """Return the object's state."""

    def load_state_dict(self, state: Any) -> Any:
        """Take a state."""


@dataclass(slots=True)
class NestedObjects:
    """Objects in a nested dict, each kind by path; ``values`` are the largest parts without any object or tensor.

    ``loaders`` have no state of their own: they stay as they are.
    """

    modules: dict[Path, nn.Module] = field(default_factory=dict)
    optimizers: dict[Path, Optimizer] = field(default_factory=dict)
    stateful: dict[Path, Stateful] = field(default_factory=dict)
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    loaders: dict[Path, DataLoader[Any]] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """What a user should know of a save of these objects."""
        if not self.loaders:
            return []
        keys = ", ".join(repr(key_of(path)) for path in self.loaders)
        return [
            f"{keys}: a DataLoader has no state of its own, so none is saved. When the state is loaded it stays as it "
            "is, at the beginning of an epoch. To go on in one, use a loader with state_dict and load_state_dict, such "
            "as torchdata's StatefulDataLoader."
        ]

    @property
    def prefixes(self) -> dict[Path, str]:
        """The text before the names of each module's state."""
        return prefixes_of(self.modules)

    @property
    def named(self) -> dict[str, nn.Module]:
        """The modules by the text before the names of each."""
        return {prefix: self.modules[path] for path, prefix in self.prefixes.items()}

    @property
    def root(self) -> nn.Module:
        """A module with all modules, that has their parameters under the names with prefixes."""
        if len(self.modules) == 1:
            return next(iter(self.modules.values()))
        root = nn.Module()
        for path, module in self.modules.items():
            root._modules[".".join(map(str, path))] = module
        return root

    @property
    def keys(self) -> list[str]:
        """The places of all objects, in order."""
        return [*map(key_of, (*self.modules, *self.optimizers, *self.stateful, *self.tensors))]

    def in_order(self, keys: Sequence[str]) -> NestedObjects:
        """Return the same objects in the order of ``keys``, and those that are not among them after that.

        So ranks whose dicts have other orders come to objects that communicate, and number optimizers, alike.
        """
        places = {key: place for place, key in enumerate(keys)}

        def ordered(of: dict[Path, T]) -> dict[Path, T]:
            return dict(sorted(of.items(), key=lambda item: places.get(key_of(item[0]), len(places))))

        return NestedObjects(
            ordered(self.modules),
            ordered(self.optimizers),
            ordered(self.stateful),
            ordered(self.tensors),
            self.values,
            self.loaders,
        )

    @gc_paused()
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of all modules; tensors are live.

        Raises:
            StateError: if two modules have an entry of one name.
        """
        return join_states({prefix: self.modules[path].state_dict() for path, prefix in self.prefixes.items()})


def names_in(objects: NestedObjects, named_by: nn.Module | None) -> frozenset[str]:
    """Return the canonical names of all entries of the modules; of a state without any, those of parameters.

    Args:
        objects: what is in the state.
        named_by: the module of lone optimizers.

    Raises:
        StateError: if two modules have an entry of one name.
    """
    if objects.modules:
        return frozenset(map(clean_fqn, objects.state_dict()))
    parameters, _ = named_tensors(unwrap(named_by))
    return frozenset(clean_fqn(name) for name, parameter in parameters if not is_elsewhere(parameter))


def objects_in(state: Mapping[str, Any]) -> NestedObjects:
    """Return what is in a nested dict. It may hold dicts and lists of objects and tensors.

    Raises:
        StateError: for an object in a tuple or a set, where nothing can be put back, and for two under one key.
    """
    found = NestedObjects()
    for key, value in state.items():
        _visit(value, (key,), found)
    for paths in (found.modules, found.optimizers):
        if twice := len(paths) - len({key_of(path) for path in paths}):
            raise StateError(f"{twice} of {[*map(key_of, paths)]} are spelled like another one: choose other keys")
    _refuse_foreign(found)
    return found


def _refuse_foreign(found: NestedObjects) -> None:
    """Refuse what shards state in ways of its own, of which neither tensors nor state dicts tell."""
    for path, optimizer in found.optimizers.items():
        refuse_zero_redundancy(optimizer, repr(key_of(path)))
    for path, module in found.modules.items() if found.optimizers else ():
        if any(is_of_torch(part, "FullyShardedDataParallel") for part in module.modules()):
            raise StateError(
                f"{key_of(path)!r} has FullyShardedDataParallel modules (FSDP1), whose optimizers have pieces of flat "
                "parameters as state, and no word of where they belong. Use torch's fully_shard (FSDP2) or "
                "ShardedStrategy. To move a run: save it once with torch.distributed.checkpoint and its "
                "get_state_dict; such a directory can be loaded here."
            )


def unwrap(value: Any) -> Any:
    """The object inside another one that only runs it, such as DistributedDataParallel; else the value."""
    if isinstance(value, DistributedDataParallel):
        return value.module
    if isinstance(value, nn.Module):
        inner = value.__dict__.get(WRAPPED) or fabric_original(value)
        return value if inner is None else unwrap(inner)
    return loader_of_fabric(value)


def _visit(value: Any, path: Path, found: NestedObjects) -> None:
    value = unwrap(value)
    if isinstance(value, nn.Module):
        found.modules[path] = value
    elif isinstance(value, Optimizer):
        found.optimizers[path] = value
    elif isinstance(value, torch.Tensor):
        found.tensors[path] = value
    elif _is_stateful(value):
        found.stateful[path] = value
    elif isinstance(value, DataLoader):
        found.loaders[path] = value
    elif isinstance(value, dict | list) and _holds_objects(value):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _visit(item, (*path, key), found)
    else:
        if isinstance(value, tuple | set | frozenset):
            inside = next((item for item in value if _is_object(item)), None)
            if inside is not None:
                raise StateError(
                    f"{key_of(path)!r} is a {type(value).__name__} that holds a {type(inside).__name__}; objects are "
                    "saved and restored in dicts and lists"
                )
        found.values[path] = value


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, type)


def _is_object(value: Any) -> bool:
    value = loader_of_fabric(value)
    return isinstance(value, nn.Module | Optimizer | DataLoader) or _is_stateful(value)


def _holds_objects(value: Any) -> bool:
    if isinstance(value, dict | list):
        return any(_holds_objects(item) for item in (value.values() if isinstance(value, dict) else value))
    return isinstance(value, torch.Tensor) or _is_object(value)


# ── to a checkpoint ───────────────────────────────────────────────────────────────────────────────────────────────


def checkpoint_of(
    state: Mapping[str, Any],
    objects: NestedObjects,
    names: Mapping[int, str],
    filters: Mapping[str, Keep] | None = None,
) -> dict[str, Any]:
    """Lightning's checkpoint dict for a nested dict; tensors are live.

    Args:
        state: what was given.
        objects: what is in it.
        names: under which parameters of optimizers are stored, by ``id``; see ``names_for``.
        filters: by key of ``state``, which entries of its state dict are saved, given name and value.

    Raises:
        StateError: if a key of the state has a meaning of its own in a checkpoint.
    """
    filters = filters or {}
    of_others = {id(one): one.state_dict() for one in objects.stateful.values()}
    rest = {key: _rest(value, of_others) for key, value in state.items()}
    checkpoint = {key: _kept(filters.get(key), value) for key, value in rest.items() if value is not _NOTHING}
    if wrong := checkpoint.keys() & {*RESERVED}:
        raise StateError(f"the key {min(wrong)!r} of the state means something else in a checkpoint: choose another")
    if objects.modules:
        checkpoint["state_dict"] = _filtered_modules(objects, filters)
    if objects.optimizers:
        states = ((path, _state_of(optimizer, names)) for path, optimizer in objects.optimizers.items())
        empty: dict[str, Any] = {"state": {}, "param_groups": []}
        checkpoint["optimizer_states"] = [empty | _kept(filters.get(str(path[0])), one) for path, one in states]
    checkpoint[KEYS] = {
        "modules": {key_of(path): prefix for path, prefix in objects.prefixes.items()},
        "optimizers": [key_of(path) for path in objects.optimizers],
    }
    return checkpoint


_NOTHING = object()


def _rest(value: Any, states: Mapping[int, Any]) -> Any:
    """A value without modules, optimizers and loaders, the state of other objects, by ``id``, in their place."""
    value = loader_of_fabric(value)
    if id(value) in states:
        return states[id(value)]
    if isinstance(value, nn.Module | Optimizer | DataLoader):
        return _NOTHING
    if isinstance(value, dict | list) and _holds_objects(value):
        if isinstance(value, dict):
            items = {key: _rest(item, states) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not _NOTHING} or _NOTHING
        found = [_rest(item, states) for item in value]
        kept = [None if item is _NOTHING else item for item in found]
        return _NOTHING if all(item is _NOTHING for item in found) else kept
    return value


def _kept(keep: Keep | None, state: Any) -> Any:
    if keep is None or not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if keep(name, value)}


def _filtered_modules(objects: NestedObjects, filters: Mapping[str, Keep]) -> dict[str, Any]:
    found = objects.state_dict()
    for path, prefix in objects.prefixes.items():
        keep = filters.get(str(path[0]))
        if keep is not None:
            mine = [name for name in found if name.startswith(prefix)]
            for name in mine:
                if not keep(name.removeprefix(prefix), found[name]):
                    del found[name]
    return found


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state by parameter name, or by number if nobody knows a name."""
    if any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        return optimizer_state(optimizer, names)
    own_entries(optimizer)  # raises for one that this would not keep
    found: dict[str, Any] = optimizer.state_dict()
    return found


def names_for(
    objects: NestedObjects, named_by: nn.Module | None = None, whole: WholeNames | None = None, prefix: str = ""
) -> dict[int, str]:
    """The name of each parameter that an optimizer may have, by ``id``.

    Args:
        objects: whose modules have the parameters.
        named_by: the module of a lone optimizer.
        whole: of the model over all pipeline stages.
        prefix: before each name.

    Names that an optimizer was built with, of ``named_parameters``, count where no module has its parameters.
    """
    names = parameter_names(unwrap(named_by), whole) if named_by is not None else {}
    if objects.modules:
        names |= parameter_names(objects.root, whole)
    for optimizer in objects.optimizers.values():
        groups = optimizer.param_groups
        if all("param_names" in group for group in groups):
            own = {id(p): n for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)}
            if not names.keys() & own.keys():
                names |= own
    return {of: prefix + name for of, name in names.items()}


# ── and back ──────────────────────────────────────────────────────────────────────────────────────────────────────


def value_at(tree: Any, path: Path) -> Any:
    """Return what stored state has at a path.

    Raises:
        LookupError: if it has nothing there.
    """
    for key in path:
        if isinstance(tree, dict) or (isinstance(tree, list) and isinstance(key, int)):
            tree = tree[key]  # type: ignore[index]  # a list by number
        else:
            raise LookupError(key)
    return tree


def put_at(state: Any, path: Path, value: Any) -> None:
    """Replace the value at a path of a live dict."""
    for key in path[:-1]:
        state = state[key]
    state[path[-1]] = value


def remove_at(tree: Any, path: Path) -> None:
    """Take a value out of stored state, and dicts that are empty without it; in lists None takes its place.

    Does nothing if it went with a list that has nothing else.
    """
    with_parents: list[tuple[Any, str | int]] = []
    for key in path:
        if isinstance(tree, dict) and key not in tree:
            return
        with_parents.append((tree, key))
        tree = tree[key]
    for parent, key in reversed(with_parents):
        if isinstance(parent, dict):
            del parent[key]
            if parent:
                return
        else:
            parent[key] = None
            if any(item is not None for item in parent):
                return


def sharded_tensors(objects: NestedObjects) -> dict[str, DTensor]:
    """The sharded tensors in the state of stateful objects, by key of trainer state: what is loaded is laid out so."""
    tensors = (item for path, one in objects.stateful.items() for item in _tensors_in(one.state_dict(), path))
    return {key_of(path): tensor for path, tensor in tensors if isinstance(tensor, DTensor)}


def _tensors_in(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, (*path, key))
