"""Describe the state that a save stores, on one rank: Lightning's checkpoint dict, or a flat dict of objects.

Objects are values of the dict, or items of a list there. All modules together are the model. The FQNs of a single
module are unchanged; those of several modules begin with the module's key in the dict, as in
``generator.net.weight``. So the key of a single module does not matter, and the checkpoint of a LightningModule whose
attributes are the networks fits, too. Optimizers are numbered in order. Everything else is trainer state at its place
in the dict: tensors and plain values may be nested at will.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_shardckpt.checkpoint.background import SaveGroup
from lightning_shardckpt.checkpoint.checkpoint import check_loaded
from lightning_shardckpt.compat.dtensor import live_state_dict
from lightning_shardckpt.compat.torch_modules import fabric_original, loader_of_fabric
from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.layout import parts_of_rank
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.libraries import describe_adapters, describe_hugging_face
from lightning_shardckpt.state.local_tensors import layout_of, this_rank
from lightning_shardckpt.state.model import WholeNames, parameter_names
from lightning_shardckpt.state.optimizer import is_of_torch, optimizer_state, refuse_own_state, refuse_zero_redundancy
from lightning_shardckpt.state.state_dicts import (
    NOTHING,
    Path,
    items_of,
    join_states,
    key_of,
    lightning_dict,
    prefixes_of,
    replaced,
)
from lightning_shardckpt.state.trainer import Snapshot, snapshot
from lightning_shardckpt.system.host import gc_paused

RANK_STATE = "rank_state"
"""Key of Lightning's checkpoint dict under which ``ShardedStrategy`` passes the state of this rank alone."""
WRAPPED = "_shardckpt_wrapped"
"""Attribute of a wrapper module that holds the wrapped module."""


def add_libraries(described: Snapshot, module: nn.Module, names: Collection[str] = ()) -> Snapshot:
    """Return rank 0's save with the documents of PEFT and transformers; ``names`` are those of the whole state dict."""
    documents, notes, adapters = dict(described.documents), described.notes, describe_adapters(module)
    if adapters:
        documents["peft"] = {"adapters": adapters}
    if "model" in described.leaves:
        model, more = describe_hugging_face(module, names)
        documents, notes = documents if model is None else {**documents, "huggingface": model}, (*notes, *more)
    return replace(described, documents=documents, notes=notes)


# ── a flat dict of objects ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class NestedObjects:
    """The values of a flat dict, and the items of lists with objects there, each kind by path.

    Attributes:
        stateful: other objects with a state dict, such as learning rate schedulers.
        plain: all other values: tensors and plain values, which may be nested.
    """

    modules: dict[Path, nn.Module] = field(default_factory=dict)
    optimizers: dict[Path, Optimizer] = field(default_factory=dict)
    stateful: dict[Path, Any] = field(default_factory=dict)
    plain: dict[Path, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Any, order: Sequence[str] = ()) -> NestedObjects:
        """Return the objects of a state.

        Args:
            state: the dict.
            order: keys of objects that come first, so that ranks whose dicts have different orders visit objects that
                communicate, and number optimizers, alike.

        Raises:
            TypeError: if it is not a dict with strings as keys.
            StateError: for an object that is neither a value of the dict nor an item of a list there, for two under one
                key, and for objects that are sharded without DTensors.
        """
        if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
            given = f"keys {shown([*state])}" if isinstance(state, dict) else type(state).__name__
            raise TypeError(f'a state is a dict with strings as keys, such as {{"model": model}}, got {given}')
        objects, places = cls(), {key: place for place, key in enumerate(order)}
        items = items_of(state, lambda items: any(map(_is_object, items)))
        for path, value in sorted(items, key=lambda item: places.get(key_of(item[0]), len(places))):
            one, key = unwrap(value), key_of(path)
            if isinstance(one, nn.Module):
                objects.modules[path] = one
            elif isinstance(one, Optimizer):
                refuse_zero_redundancy(one, repr(key))
                objects.optimizers[path] = one
            elif _is_stateful(one):
                objects.stateful[path] = one
            elif isinstance(one, DataLoader):
                raise StateError(
                    f"{key!r} is a {type(one).__name__} without a state dict, so its position can't be saved: leave it "
                    "out of the state, or use a loader with state_dict and load_state_dict, such as torchdata's "
                    "StatefulDataLoader"
                )
            else:
                _refuse_objects(one, path)
                objects.plain[path] = one
        for paths in (objects.modules, objects.optimizers):
            if len({*map(key_of, paths)}) < len(paths):
                raise StateError(
                    f"several of {[*map(key_of, paths)]} have the same key in a checkpoint: choose other keys"
                )
        for path, module in objects.modules.items() if objects.optimizers else ():
            if any(is_of_torch(part, "FullyShardedDataParallel") for part in module.modules()):
                raise StateError(
                    f"{key_of(path)!r} has FullyShardedDataParallel modules (FSDP1), whose optimizers have pieces of "
                    "flat parameters as state, which can't be assigned to parameters. Use torch's fully_shard (FSDP2) "
                    "or ShardedStrategy. To move a run: save it once with torch.distributed.checkpoint and its "
                    "get_state_dict; such a directory can be loaded here."
                )
        return objects

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
        root = nn.Module()
        for prefix, module in self.named.items():
            if not prefix:
                return module
            root._modules[prefix[:-1]] = module
        return root

    @property
    def keys(self) -> list[str]:
        """The keys of all objects, in order."""
        return [*map(key_of, (*self.modules, *self.optimizers, *self.stateful))]

    @property
    def filled(self) -> list[nn.Module | Optimizer]:
        """The objects whose tensors a load fills in place."""
        return [*self.modules.values(), *self.optimizers.values()]

    @gc_paused()
    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of all modules; tensors are live.

        Raises:
            StateError: if two modules have an entry of one name.
        """
        return join_states({prefix: live_state_dict(module) for prefix, module in self.named.items()})

    def parameter_names(
        self, owner: nn.Module | None = None, whole: WholeNames | None = None, prefix: str = ""
    ) -> dict[int, str]:
        """Return the name of each parameter of the optimizers, by ``id``, with ``prefix`` before it.

        An optimizer built from ``named_parameters`` names its own parameters, if no module contains them. ``owner`` is
        the module of the optimizers in a state without modules, if known; ``whole`` is that of all pipeline stages.
        """
        names = parameter_names(unwrap(owner), whole) if owner is not None else {}
        names |= parameter_names(self.root, whole)
        for groups in (optimizer.param_groups for optimizer in self.optimizers.values()):
            if all("param_names" in group for group in groups):
                own = {id(p): n for group in groups for p, n in zip(group["params"], group["param_names"], strict=True)}
                names |= own if not names.keys() & own.keys() else {}
        return {number: prefix + name for number, name in names.items()}


def unwrap(value: Any) -> Any:
    """Return the object inside a wrapper such as DistributedDataParallel; any other value unchanged."""
    if isinstance(value, DistributedDataParallel):
        return value.module
    if isinstance(value, nn.Module):
        inner = value.__dict__.get(WRAPPED) or fabric_original(value)
        return value if inner is None else unwrap(inner)
    return loader_of_fabric(value)


def _refuse_objects(value: Any, path: Path) -> None:
    """Refuse objects inside a value."""
    if _is_object(value):
        raise StateError(
            f"{key_of(path)!r} of the state is a {type(unwrap(value)).__name__}: objects are saved and restored as "
            "values of the state, or in a list that is one. Give it a key of its own, such as "
            f"{'_'.join(map(str, path))!r}"
        )
    if isinstance(value, dict | list | tuple | set | frozenset):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            _refuse_objects(item, (*path, key))


def _is_stateful(value: Any) -> bool:
    has_methods = hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
    return has_methods and not isinstance(value, type | torch.Tensor)


def _is_object(value: Any) -> bool:
    value = loader_of_fabric(value)
    return isinstance(value, nn.Module | Optimizer | DataLoader) or _is_stateful(value)


def checkpoint_of(
    state: Mapping[str, Any],
    objects: NestedObjects,
    names: Mapping[int, str],
    filters: Mapping[str, Callable[[str, Any], bool]] | None = None,
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict for a flat dict and the ``objects`` in it; tensors are live.

    ``names`` are those of ``NestedObjects.parameter_names``. ``filters`` take, by key of ``state``, name and value of
    an entry, and return True if it is saved. Raises a StateError if a key of the state is reserved.
    """

    def filtered(path: Path, entries: Any) -> Any:
        keep = (filters or {}).get(str(path[0]))
        if keep is None or not isinstance(entries, dict):
            return entries
        kept = copy(entries)  # with the versions of modules
        for name in [name for name, value in entries.items() if not keep(name, value)]:
            del kept[name]
        return kept

    with gc_paused():
        modules = {path: filtered(path, module.state_dict()) for path, module in objects.modules.items()}
    optimizers = dict[Path, Any]()
    for path, optimizer in objects.optimizers.items():
        if any(id(p) in names for group in optimizer.param_groups for p in group["params"]):
            entries = optimizer_state(optimizer, names)
        else:  # by number
            refuse_own_state(optimizer)
            entries = optimizer.state_dict()
        optimizers[path] = {"state": {}, "param_groups": [], **filtered(path, entries)}
    new: dict[Path, Any] = {path: one.state_dict() for path, one in objects.stateful.items()}
    rest = replaced(state, new | dict.fromkeys((*modules, *optimizers), NOTHING))
    return lightning_dict({key: filtered((key,), value) for key, value in rest.items()}, modules, optimizers)


def describe_state(state: dict[str, Any], order: list[str], group: SaveGroup, prefix: str) -> Snapshot:
    """Return this rank's part of a save of a flat dict by ``group``, with ``prefix`` before the names of the modules.

    ``order`` has the keys of the objects in rank 0's dict. Raises the errors of ``NestedObjects.of`` and ``snapshot``.
    """
    objects = NestedObjects.of(state, order)
    check_loaded(objects.filled)
    names = objects.parameter_names(prefix=prefix)
    module = objects.root if objects.modules else None
    described = snapshot(checkpoint_of(state, objects, names), module)
    if module is not None and group.ranks.rank == 0:
        described = add_libraries(described, module)
    _check_members(described, group)
    return _add_prefix(described, prefix) if prefix else described


def _add_prefix(described: Snapshot, prefix: str) -> Snapshot:
    documents = {role: document for role, document in described.documents.items() if role != "huggingface"}
    if "model" not in described.leaves:
        return replace(described, documents=documents)
    model = described.leaves["model"].renamed(lambda name: prefix + name)
    documents["model"] = {prefix + key: value for key, value in documents["model"].items()}
    versions = (documents["versions"] or {}).items()
    documents["versions"] = {f"{prefix}{name}".removesuffix("."): version for name, version in versions}
    return replace(described, leaves={**described.leaves, "model": model}, documents=documents)


def _check_members(described: Snapshot, group: SaveGroup) -> None:
    """Check that ranks of a group have the same slices of each DTensor by group rank as by global rank."""
    if group.members is None:
        return
    for component, leaves in described.leaves.items():
        for key, tensor in leaves.tensors.items():
            if not isinstance(tensor, DTensor):
                continue
            mesh, layout, shape = tensor.device_mesh, layout_of(tensor), tuple(tensor.shape)
            parts = [parts_of_rank(layout, shape, rank) for rank in group.members]
            is_same = parts == [parts_of_rank(layout, shape, rank) for rank in range(len(parts))]
            if not is_same or not {*mesh.mesh.flatten().tolist()} <= {*group.members}:
                raise StateError(
                    f"{component}/{key} is on {mesh}, which rank {this_rank()} cannot save with the ranks "
                    f"{list(group.members)} alone: let all ranks of the job save it"
                )
