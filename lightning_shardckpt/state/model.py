"""A model's state dict as leaves by canonical FQN.

The canonical FQN of a tensor omits wrappers (torch.compile, activation checkpointing, FSDP1). A tensor with several
names is stored once, under the first name, and the other names are its aliases.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.errors import StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn, shared_names
from lightning_shardckpt.state.dtensor_layout import local_tensor
from lightning_shardckpt.state.snapshot import Leaves
from lightning_shardckpt.state.tensor_bytes import refuse_compound

_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True)
class WholeNames:
    """Canonical FQNs of the whole model, of which a pipeline stage has a part.

    Attributes:
        state: all entries of the state dict, including extra state.
        ties: the names of each tied tensor, the stored name first.
        parameters: the stored names of all parameters, in order of registration.
    """

    state: frozenset[str] = frozenset()
    ties: tuple[tuple[str, ...], ...] = ()
    parameters: tuple[str, ...] = ()

    def elsewhere(self, here: Collection[str]) -> frozenset[str]:
        """Return the entries that only other ranks have under any of their names, given this rank's names."""
        if not self.state:
            return frozenset()
        own = set(here)
        return self.state - own.union(*(tie for tie in self.ties if own.intersection(tie)))


def is_extra_state(name: str) -> bool:
    """Return whether a state dict entry comes from ``get_extra_state`` of a module."""
    return name.endswith(_EXTRA) and name.rpartition(".")[2] == _EXTRA


def named_tensors(module: nn.Module | None) -> tuple[list[tuple[str, torch.Tensor]], list[tuple[str, torch.Tensor]]]:
    """Return a module's parameters and its buffers under all their names, in order of registration."""
    if module is None:
        return [], []
    return [*module.named_parameters(remove_duplicate=False)], [*module.named_buffers(remove_duplicate=False)]


def parameter_names(module: nn.Module, whole: WholeNames | None = None) -> dict[int, str]:
    """Return the canonical FQN by ``id`` of each parameter; the first name of a tie, in the whole model if given."""
    first = {name: tie[0] for tie in whole.ties for name in tie} if whole is not None else {}
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), first.get(clean_fqn(name), clean_fqn(name)))
    return names


def tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Return the canonical FQNs of each tied parameter or buffer, in order of registration."""
    return tuple(shared_names(chain(*named_tensors(module))))


def model_leaves(
    state_dict: Mapping[str, Any], module: nn.Module | None = None, whole: WholeNames | None = None
) -> tuple[Leaves, dict[str, Any]]:
    """Return the tensors of a state dict, and its other entries by canonical name.

    Args:
        state_dict: of the module, possibly changed by hooks; tensors may be DTensors.
        module: tells buffers from parameters and which names are tied. Without it, plain tensors that share their
            memory count as tied.
        whole: names of the model over all pipeline stages; a stage stores its part of a tie under the common name.

    Raises:
        StateError: for an entry that cannot be stored, or two names with the same canonical FQN.
    """
    tensors: dict[str, torch.Tensor] = {}
    other: dict[str, Any] = {}
    for name, value in state_dict.items():
        key = clean_fqn(name)
        if key in tensors or key in other:
            raise StateError(f"two entries of the state dict have the canonical name {key!r}")
        if is_extra_state(key) or not isinstance(value, torch.Tensor):  # stored as JSON
            other[key] = value
            continue
        refuse_compound(value, f"model/{key}")
        tensors[key] = value
    parameters, buffers = named_tensors(module)
    aliases = _aliases(tensors, shared_names(chain(parameters, buffers)))
    for alias in aliases:
        del tensors[alias]
    leaves = Leaves(tensors, aliases, frozenset(tensors.keys() & {clean_fqn(name) for name, _ in buffers}))
    if module is not None and whole is not None and whole.ties:
        leaves = _tied_over_stages(leaves, whole.ties)
    return leaves, other


def _tied_over_stages(leaves: Leaves, ties: Iterable[tuple[str, ...]]) -> Leaves:
    """Return the tensors, each under the first name of its tie; stages that have different values fail the save."""
    first = dict[str, str]()
    for tie in ties:
        stored = [name for name in tie if name in leaves.tensors]
        if len(stored) == 1:
            first[stored[0]] = tie[0]
    renamed = leaves.renamed(lambda name: first.get(name, name))
    aliases = {name: key for name, key in (renamed.aliases | first).items() if name not in renamed.tensors}
    return replace(renamed, aliases=aliases)


def _aliases(tensors: dict[str, torch.Tensor], ties: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Return the stored name of each alias."""
    tie_of = {name: tie for tie in ties for name in tie}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        mark: Any = name
        if isinstance(tensor, DTensor):
            # a rank may hold no element of it, so that memory does not show the tie, but the module does
            if name in tie_of:
                mark = (tie_of[name], local_tensor(tensor).numel() and local_tensor(tensor).data_ptr())
        elif tensor.numel() and not tensor.is_meta:
            mark = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if first.setdefault(mark, name) != name:
            aliases[name] = first[mark]
    return aliases


def names_of(live: Leaves, ties: Collection[tuple[str, ...]]) -> dict[str, list[str]]:
    """Return all names of each live tensor, including names in other pipeline stages, by key."""
    names: dict[str, list[str]] = {key: [key] for key in live.tensors}
    for alias, of in live.aliases.items():
        names[of].append(alias)
    if not ties:
        return names
    here = {name for group in names.values() for name in group}
    for tie in ties:  # other stages may have the tensor under other names
        for key in names.keys() & set(tie):
            names[key] += [name for name in tie if name not in here]
    return names
