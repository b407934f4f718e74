"""The objects with a state in a flat dict, and the places of their state in a checkpoint.

Objects are values of the dict, or items of a list there. All modules together are the model. The FQNs of a single
module are unchanged; those of several modules begin with the module's key in the dict, as in
``generator.net.weight``. So the key of a single module does not matter, and the checkpoint of a LightningModule whose
attributes are the networks fits, too. Optimizers are numbered in order. Everything else is trainer state at its place
in the dict: tensors and plain values may be nested at will.
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
from lightning_shardckpt.state.model import WholeNames, is_elsewhere, named_tensors, parameter_names
from lightning_shardckpt.state.optimizer import extra_entries, is_of_torch, optimizer_state, refuse_zero_redundancy
from lightning_shardckpt.state.state_dicts import KEYS, RESERVED, Path, join_states, key_of, prefixes_of
from lightning_shardckpt.system.memory import gc_paused

WRAPPED = "_shardckpt_wrapped"
"""Attribute of a wrapper module that holds the wrapped module."""

_PLAIN = (str, int, float, bool, bytes, type(None), dict, list, tuple)
"""Types that are no objects with a state, for speed."""

T = TypeVar("T")

Keep: TypeAlias = Callable[[str, Any], bool]


@runtime_checkable
class Stateful(Protocol):
    """An object with a state dict, such as a learning rate scheduler."""

    def state_dict(self) -> Any:
        """Return the object's state."""

    def load_state_dict(self, state: Any) -> Any:
        """Restore a state."""


@dataclass(slots=True)
class NestedObjects:
    """Objects and tensors in a dict, each kind by path.

    Attributes:
        values: the largest parts of the dict that contain no object or tensor.
        loaders: DataLoaders without a state dict, which are neither saved nor restored.
    """

    modules: dict[Path, nn.Module] = field(default_factory=dict)
    optimizers: dict[Path, Optimizer] = field(default_factory=dict)
    stateful: dict[Path, Stateful] = field(default_factory=dict)
    tensors: dict[Path, torch.Tensor] = field(default_factory=dict)
    values: dict[Path, Any] = field(default_factory=dict)
    loaders: dict[Path, DataLoader[Any]] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """Warnings for the user about a save of these objects."""
        if not self.loaders:
            return []
        keys = ", ".join(repr(key_of(path)) for path in self.loaders)
        return [
            f"{keys}: a DataLoader has no state dict, so its position is not saved, and a load leaves it unchanged. To "
            "resume within an epoch, use a loader with state_dict and load_state_dict, such as torchdata's "
            "StatefulDataLoader."
        ]

    @property
    def prefixes(self) -> dict[Path, str]:
        """The prefix of the names of each module's state."""
        return prefixes_of(self.modules)

    @property
    def named(self) -> dict[str, nn.Module]:
        """The modules by prefix of their names."""
        return {prefix: self.modules[path] for path, prefix in self.prefixes.items()}

    @property
    def root(self) -> nn.Module:
        """A module that contains all modules, so that its parameters' names have the prefixes."""
        if len(self.modules) == 1:
            return next(iter(self.modules.values()))
        root = nn.Module()
        for path, module in self.modules.items():
            root._modules[".".join(map(str, path))] = module
        return root

    @property
    def keys(self) -> list[str]:
        """The keys of all objects, in order."""
        return [*map(key_of, (*self.modules, *self.optimizers, *self.stateful, *self.tensors))]

    def in_order(self, keys: Sequence[str]) -> NestedObjects:
        """Return the same objects in the order of ``keys``, followed by objects not among them.

        Ranks whose dicts have different orders so visit objects that communicate, and number optimizers, alike.
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


def names_in(objects: NestedObjects, owner: nn.Module | None = None) -> frozenset[str]:
    """Return the canonical names of all entries of the modules, or without modules, of the parameters of ``owner``.

    Args:
        objects: of the state.
        owner: the module of the optimizers in a state without modules, if known.

    Raises:
        StateError: if two modules have an entry of one name.
    """
    if objects.modules:
        return frozenset(map(clean_fqn, objects.state_dict()))
    parameters, _ = named_tensors(unwrap(owner))
    return frozenset(clean_fqn(name) for name, parameter in parameters if not is_elsewhere(parameter))


def collect_objects(state: Mapping[str, Any]) -> NestedObjects:
    """Collect the objects of a flat dict, and its tensors, which may be in dicts and lists.

    Raises:
        StateError: for an object that is neither a value of the dict nor an item of a list there, and for two under one
            key.
    """
    objects = NestedObjects()
    for key, value in state.items():
        if isinstance(value, list) and any(map(_is_object, value)):
            for number, item in enumerate(value):
                _add(item, (key, number), objects)
        else:
            _add(value, (key,), objects)
    for paths in (objects.modules, objects.optimizers):
        if len({key_of(path) for path in paths}) < len(paths):
            raise StateError(f"several of {[*map(key_of, paths)]} have the same key in a checkpoint: choose other keys")
    _refuse_opaque_sharding(objects)
    return objects


def _refuse_opaque_sharding(objects: NestedObjects) -> None:
    """Refuse objects whose state is sharded without DTensors, so that its place in the whole is unknown."""
    for path, optimizer in objects.optimizers.items():
        refuse_zero_redundancy(optimizer, repr(key_of(path)))
    for path, module in objects.modules.items() if objects.optimizers else ():
        if any(is_of_torch(part, "FullyShardedDataParallel") for part in module.modules()):
            raise StateError(
                f"{key_of(path)!r} has FullyShardedDataParallel modules (FSDP1), whose optimizers have pieces of flat "
                "parameters as state, which can't be assigned to parameters. Use torch's fully_shard (FSDP2) or "
                "ShardedStrategy. To move a run: save it once with torch.distributed.checkpoint and its "
                "get_state_dict; such a directory can be loaded here."
            )


def unwrap(value: Any) -> Any:
    """Return the object inside a wrapper such as DistributedDataParallel; any other value unchanged."""
    if isinstance(value, DistributedDataParallel):
        return value.module
    if isinstance(value, nn.Module):
        inner = value.__dict__.get(WRAPPED) or fabric_original(value)
        return value if inner is None else unwrap(inner)
    return loader_of_fabric(value)


def _add(value: Any, path: Path, objects: NestedObjects) -> None:
    """Add a value of the state, or an item of a list there."""
    value = unwrap(value)
    if isinstance(value, nn.Module):
        objects.modules[path] = value
    elif isinstance(value, Optimizer):
        objects.optimizers[path] = value
    elif isinstance(value, DataLoader) and not _is_stateful(value):
        objects.loaders[path] = value
    elif not isinstance(value, torch.Tensor) and _is_stateful(value):
        objects.stateful[path] = value
    else:
        _add_tensors(value, path, objects)


def _add_tensors(value: Any, path: Path, objects: NestedObjects) -> None:
    """Add the tensors in a value without objects, and the parts without tensors.

    Raises:
        StateError: for an object.
    """
    if isinstance(value, torch.Tensor):
        objects.tensors[path] = value
        return
    if type(value) not in _PLAIN and _is_object(value):
        raise StateError(
            f"{key_of(path)!r} of the state is a {type(unwrap(value)).__name__}: objects are saved and restored as "
            "values of the state, or in a list that is one. Give it a key of its own, such as "
            f"{'_'.join(map(str, path))!r}"
        )
    if isinstance(value, tuple | set | frozenset):
        for number, item in enumerate(value):
            _add_tensors(item, (*path, number), NestedObjects())  # refuses objects; tensors are part of the value
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        inside = NestedObjects()
        for key, item in items:
            _add_tensors(item, (*path, key), inside)
        if inside.tensors:
            objects.tensors |= inside.tensors
            objects.values |= inside.values
            return
    objects.values[path] = value


def _is_stateful(value: Any) -> bool:
    return isinstance(value, Stateful) and not isinstance(value, type)


def _is_object(value: Any) -> bool:
    value = loader_of_fabric(value)
    return isinstance(value, nn.Module | Optimizer | DataLoader) or _is_stateful(value)


# ── saving ────────────────────────────────────────────────────────────────────────────────────────────────────────


def checkpoint_of(
    state: Mapping[str, Any],
    objects: NestedObjects,
    names: Mapping[int, str],
    filters: Mapping[str, Keep] | None = None,
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict for a flat dict; tensors are live.

    Args:
        state: the dict.
        objects: in the state.
        names: of the parameters of optimizers, by ``id``; see ``names_for``.
        filters: by key of ``state``: takes name and value of an entry, and returns True if it is saved.

    Raises:
        StateError: if a key of the state is reserved.
    """
    filters = filters or {}
    state_dicts = {id(one): one.state_dict() for one in objects.stateful.values()}
    values = {key: _without_objects(value, state_dicts) for key, value in state.items()}
    checkpoint = {key: _filter(filters.get(key), value) for key, value in values.items() if value is not _NOTHING}
    if reserved := checkpoint.keys() & {*RESERVED}:
        raise StateError(f"the key {min(reserved)!r} of the state has another meaning in a checkpoint: choose another")
    if objects.modules:
        checkpoint["state_dict"] = _filtered_modules(objects, filters)
    if objects.optimizers:
        states = ((path, _state_of(optimizer, names)) for path, optimizer in objects.optimizers.items())
        empty: dict[str, Any] = {"state": {}, "param_groups": []}
        checkpoint["optimizer_states"] = [empty | _filter(filters.get(str(path[0])), one) for path, one in states]
    checkpoint[KEYS] = {
        "modules": {key_of(path): prefix for path, prefix in objects.prefixes.items()},
        "optimizers": [key_of(path) for path in objects.optimizers],
    }
    return checkpoint


_NOTHING = object()


def _without_objects(value: Any, state_dicts: Mapping[int, Any]) -> Any:
    """Return a value without modules, optimizers and loaders, and with other objects replaced by their state dicts."""
    if isinstance(value, list) and any(map(_is_object, value)):
        items = [_without_objects(item, state_dicts) for item in value]
        is_empty = all(item is _NOTHING for item in items)
        return _NOTHING if is_empty else [None if item is _NOTHING else item for item in items]
    value = loader_of_fabric(value)
    if id(value) in state_dicts:
        return state_dicts[id(value)]
    return _NOTHING if isinstance(value, nn.Module | Optimizer | DataLoader) else value


def _filter(keep: Keep | None, state: Any) -> Any:
    if keep is None or not isinstance(state, dict):
        return state
    return {name: value for name, value in state.items() if keep(name, value)}


def _filtered_modules(objects: NestedObjects, filters: Mapping[str, Keep]) -> dict[str, Any]:
    state_dict = objects.state_dict()
    for path, prefix in objects.prefixes.items():
        keep = filters.get(str(path[0]))
        if keep is not None:
            for name in [name for name in state_dict if name.startswith(prefix)]:
                if not keep(name.removeprefix(prefix), state_dict[name]):
                    del state_dict[name]
    return state_dict


def _state_of(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Return an optimizer's state by parameter name, or by number if none of its parameters has a name."""
    if any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
        return optimizer_state(optimizer, names)
    extra_entries(optimizer)  # raises for an optimizer whose state would be lost
    state_dict: dict[str, Any] = optimizer.state_dict()
    return state_dict


def names_for(
    objects: NestedObjects, owner: nn.Module | None = None, whole: WholeNames | None = None, prefix: str = ""
) -> dict[int, str]:
    """Return the name of each parameter of the optimizers, by ``id``.

    An optimizer built from ``named_parameters`` names its own parameters, if no module contains them.

    Args:
        objects: of the state.
        owner: the module of the optimizers in a state without modules, if known.
        whole: names of the model over all pipeline stages.
        prefix: before each name.
    """
    names = parameter_names(unwrap(owner), whole) if owner is not None else {}
    if objects.modules:
        names |= parameter_names(objects.root, whole)
    for optimizer in objects.optimizers.values():
        groups = optimizer.param_groups
        if all("param_names" in group for group in groups):
            own = {id(p): n for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)}
            if not names.keys() & own.keys():
                names |= own
    return {of: prefix + name for of, name in names.items()}


# ── loading ───────────────────────────────────────────────────────────────────────────────────────────────────────


def value_at(tree: Any, path: Path) -> Any:
    """Return the value of stored state at a path.

    Raises:
        LookupError: if there is none.
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
    """Remove a value from stored state, and containers that become empty; in lists, None takes its place.

    Does nothing if the value was removed already, with a list that contained nothing else.
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
    """Return the sharded tensors in the state of stateful objects, by key of trainer state, as models for the load."""
    tensors = (item for path, one in objects.stateful.items() for item in _tensors_in(one.state_dict(), path))
    return {key_of(path): tensor for path, tensor in tensors if isinstance(tensor, DTensor)}


def _tensors_in(value: Any, path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _tensors_in(item, (*path, key))
