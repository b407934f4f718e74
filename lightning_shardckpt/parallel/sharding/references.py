"""References to parameters in the attributes of modules, which follow when others take the place of these.

What only shares the memory of a parameter can't follow, and is refused.

A parameter of before still acts as the new one, but is another object: a set, a dict or ``is`` would not find the new
one. So containers in attributes (lists, tuples, sets, dicts, also of ids of parameters) get the new ones, in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_shardckpt.compat.torch_tensors import below_modes, dispatches, storage_id
from lightning_shardckpt.errors import UnsupportedCodeError

_WITHOUT_SHAPE = (UninitializedBuffer, UninitializedParameter)
_DEPTH = 4  # of containers in containers
REGISTRIES = frozenset(vars(nn.Module()))
"""The attributes that every module has for itself, its parameters among them."""


def refuse_shared_memory(root: nn.Module) -> None:
    """Raise for buffers over the memory of parameters, which they could not follow when these are sharded.

    Raises:
        UnsupportedCodeError: naming the first one.
    """
    with below_modes():
        memory = {_memory(parameter): name for name, parameter in root.named_parameters()}
        for name, buffer in root.named_buffers():
            where = _memory(buffer)
            if where is not None and (found := memory.get(where)) and not isinstance(buffer, nn.Parameter):
                raise UnsupportedCodeError(
                    f"the buffer {name} is in the memory of the parameter {found}: it would change with every step on "
                    "one process, but not when the parameter is sharded. Register a clone(), or read the parameter."
                )


def _memory(tensor: Tensor) -> int | None:
    """What tells the memory of a tensor, None for none."""
    if dispatches(type(tensor)) or tensor.layout is not torch.strided or isinstance(tensor, _WITHOUT_SHAPE):
        return None
    return storage_id(tensor.untyped_storage()) if tensor.numel() else None


def follow_parameters(root: nn.Module, replaced: Mapping[nn.Parameter, Tensor]) -> None:
    """Put the new parameters in the place of the old ones, wherever attributes of modules inside ``root`` have them.

    Args:
        root: has the new parameters already.
        replaced: old ones → new ones, or what stands for those of other pipeline stages.
    """
    known = {id(old): new for old, new in replaced.items() if old is not new}
    if not known:
        return

    def new_one(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return known.get(id(value), value)
        return id(known[value]) if type(value) is int and value in known else value

    replace_in_attributes(root, new_one, len(known) + 100)  # data has more items than there are parameters


def replace_in_attributes(root: nn.Module, new_one: Callable[[Any], Any], limit: int) -> None:
    """Put ``new_one(value)`` in the place of each value in attributes of modules, and in containers that these are.

    Args:
        root: the parameters, buffers and children of its modules are left alone.
        new_one: returns its argument to leave it.
        limit: containers with more items are left alone.
    """
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in REGISTRIES:
                found = _replaced(value, new_one, limit, _DEPTH)
                if found is not value:
                    module.__dict__[name] = found


def _replaced(value: Any, new_one: Callable[[Any], Any], limit: int, depth: int) -> Any:
    """The new one for a value; a container itself, with the new ones in it, or another tuple."""
    if type(value) not in (list, tuple, set, frozenset, dict):
        return new_one(value)
    if not depth or len(value) > limit:
        return value
    items = [*value.items()] if type(value) is dict else [*value]
    found = [_replaced(item, new_one, limit, depth - 1) for item in items]
    if all(new is old for new, old in zip(found, items, strict=True)):
        return value
    if type(value) in (tuple, frozenset):
        return type(value)(found)
    value.clear()
    value.extend(found) if type(value) is list else value.update(found)
    return value
