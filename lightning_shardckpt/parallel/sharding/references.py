"""References to parameters in attributes of modules, which are replaced when parameters are sharded.

A replaced parameter still behaves like the new one, but is another object: a set, a dict or ``is`` would not find the
new one. So the new ones are put into attributes, and into containers there (lists, tuples, sets, dicts, also with ids
of parameters), in place. Buffers that share the memory of a parameter are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_shardckpt.compat.torch_tensors import below_functions, dispatches, storage_id
from lightning_shardckpt.errors import UnsupportedCodeError

_WITHOUT_SHAPE = (UninitializedBuffer, UninitializedParameter)
_DEPTH = 4  # of containers in containers
REGISTRIES = frozenset(vars(nn.Module()))
"""The attributes of nn.Module itself, such as ``_parameters``."""


def refuse_shared_memory(root: nn.Module) -> None:
    """Check that no buffer shares the memory of a parameter.

    Raises:
        UnsupportedCodeError: naming the first one that does.
    """
    with below_functions():
        names = {_memory(parameter): name for name, parameter in root.named_parameters()}
        for name, buffer in root.named_buffers():
            memory = _memory(buffer)
            if memory is not None and memory in names and not isinstance(buffer, nn.Parameter):
                raise UnsupportedCodeError(
                    f"the buffer {name} is in the memory of the parameter {names[memory]}: it would change with every "
                    "step on one process, but not when the parameter is sharded. Register a clone(), or read the "
                    "parameter."
                )


def _memory(tensor: Tensor) -> int | None:
    """Return an id of the memory of a tensor, if it has some."""
    if dispatches(type(tensor)) or tensor.layout is not torch.strided or isinstance(tensor, _WITHOUT_SHAPE):
        return None
    return storage_id(tensor.untyped_storage()) if tensor.numel() else None


def follow_parameters(root: nn.Module, replaced: Mapping[nn.Parameter, Tensor]) -> None:
    """Replace old parameters by new ones in the attributes of modules inside ``root``.

    Args:
        root: a module that has the new parameters already.
        replaced: the new parameter, or a placeholder, for each old one.
    """
    new_by_id = {id(old): new for old, new in replaced.items() if old is not new}
    if not new_by_id:
        return

    def replace(value: Any) -> Any:
        if isinstance(value, nn.Parameter):
            return new_by_id.get(id(value), value)
        return id(new_by_id[value]) if type(value) is int and value in new_by_id else value

    replace_in_attributes(root, replace, len(new_by_id) + 100)  # longer containers hold data


def replace_in_attributes(root: nn.Module, replace: Callable[[Any], Any], limit: int) -> None:
    """Apply ``replace`` to each value in attributes of modules, also in containers; parameters and buffers stay.

    Args:
        root: the module tree.
        replace: returns the new value, or its argument.
        limit: containers with more items are skipped.
    """
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in REGISTRIES:
                new = _replace_nested(value, replace, limit, _DEPTH)
                if new is not value:
                    module.__dict__[name] = new


def _replace_nested(value: Any, replace: Callable[[Any], Any], limit: int, depth: int) -> Any:
    """Return the new value; a list, set or dict is changed in place."""
    if type(value) not in (list, tuple, set, frozenset, dict):
        return replace(value)
    if not depth or len(value) > limit:
        return value
    items = [*value.items()] if type(value) is dict else [*value]
    new_items = [_replace_nested(item, replace, limit, depth - 1) for item in items]
    if all(new is old for new, old in zip(new_items, items, strict=True)):
        return value
    if type(value) in (tuple, frozenset):
        return type(value)(new_items)
    value.clear()
    value.extend(new_items) if type(value) is list else value.update(new_items)
    return value
