"""The code that runs in a module when a state dict is loaded. Checked with torch 2.12 to 2.15.

Relies on the dicts of hooks of ``nn.Module``, on ``_load_from_state_dict``, and on hooks before being wrapped, as
``hook`` of an object of torch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn

_LIBRARIES = ("torch.", "transformers.", "peft.")


def code_before(module: nn.Module) -> set[str]:
    """Return where the functions come from that get the state dict before it is in the module, or load it themselves.

    Each is "user" or "library"; functions of torch.distributed, which only put its own shards in order, are left out.
    Those of torch, transformers (5.x) and PEFT (0.21) do something only where other names or shapes are stored than the
    module has: they make files of earlier versions fit.
    """
    found = [vars(hook).get("hook") for hook in module._load_state_dict_pre_hooks.values()]
    load = module.__dict__.get("_load_from_state_dict", type(module)._load_from_state_dict)
    return set(_origins([*found, *([] if load is nn.Module._load_from_state_dict else [load])]))


def has_code_after(module: nn.Module) -> bool:
    """Return whether hooks run when the module is loaded, other than those of torch.distributed."""
    return any(_origins(module._load_state_dict_post_hooks.values()))


def has_own_load(module: nn.Module) -> bool:
    """Return whether its class has a ``load_state_dict`` of its own, which runs where it is the root."""
    return "user" in _origins([type(module).load_state_dict])


def _origins(functions: Any) -> Iterator[str]:
    for function in functions:
        while isinstance(function, partial):
            function = function.func
        package = getattr(function, "__module__", None) or type(function).__module__
        if not package.startswith(("torch.distributed.", "lightning_shardckpt.")):
            yield "library" if package.startswith(_LIBRARIES) else "user"
