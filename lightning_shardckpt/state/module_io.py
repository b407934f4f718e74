"""Bring loaded values into a module where its state dict is not its own memory."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_shardckpt.errors import MismatchError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.state.compound_tensors import memory_of
from lightning_shardckpt.state.dtensor_layout import copy_slice
from lightning_shardckpt.state.model import WholeNames, is_extra_state, is_value


def parameter_names(module: nn.Module, whole: WholeNames | None = None) -> dict[int, str]:
    """Canonical FQN by ``id`` of the parameter; the first one of a tied parameter, of the ``whole`` model if given."""
    first = {name: tie[0] for tie in whole.ties for name in tie} if whole is not None else {}
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), first.get(clean_fqn(name), clean_fqn(name)))
    return names


def not_live(module: nn.Module, state_dict: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of entries that are copies: filling them does not fill the module."""
    live = {
        part.untyped_storage().data_ptr()
        for named in (module.named_parameters(), module.named_buffers())
        for _, tensor in named
        for part in memory_of(tensor)
    }
    return frozenset(
        name
        for name, value in state_dict.items()
        if not is_value(name, value)
        and any(part.numel() and part.untyped_storage().data_ptr() not in live for part in memory_of(value))
    )


def load_edited(
    module: nn.Module,
    loaded: Mapping[str, Any],
    now: Mapping[str, Any],
    copies: frozenset[str],
    whole: WholeNames | None = None,
) -> None:
    """Bring entries of the loaded state dict into the module that filling it in place did not, or that hooks replaced.

    Args:
        module: the live module.
        loaded: entries as they were filled.
        now: the same after on_load_checkpoint hooks; whole tensors may stand for sharded ones.
        copies: names of entries that are not the module's own memory.
        whole: names of the model over all pipeline stages; a hook may name what another stage has.

    Raises:
        MismatchError: for entries that the module does not have.
    """
    whole = whole or WholeNames()
    edited = {name: value for name, value in now.items() if name in copies or value is not loaded.get(name)}
    for tie in whole.ties:  # the hook may have used a name that another stage has for the tensor
        names = [name for name in edited if clean_fqn(name) in tie]
        if names:
            value = edited[max(names, key=lambda name: tie.index(clean_fqn(name)))]
            edited |= {name: value for name in loaded if clean_fqn(name) in tie}
    for name, value in edited.items():
        before = loaded.get(name)
        if isinstance(before, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            edited[name] = torch.empty_like(before, dtype=value.dtype)
            copy_slice(edited[name], value)
    if edited:
        found = module.load_state_dict(edited, strict=False).unexpected_keys
        unexpected = [name for name in found if clean_fqn(name) not in whole.state]
        if unexpected and getattr(module, "strict_loading", True):
            raise MismatchError(f"on_load_checkpoint left entries that the model does not have: {unexpected}")


def put_values(module: nn.Module, state_dict: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    """Bring loaded values, by canonical name, into the module and into its state dict: extra state, and no tensors."""
    for name, sub in module.named_modules():
        key = clean_fqn(f"{name}._extra_state" if name else "_extra_state")
        if key in values:
            sub.set_extra_state(values[key])
    keys = {name: clean_fqn(name) for name, value in state_dict.items() if is_value(name, value)}
    found = {name: values[key] for name, key in keys.items() if key in values}
    state_dict.update(found)
    if others := {name: value for name, value in found.items() if not is_extra_state(name)}:
        module.load_state_dict(others, strict=False)
