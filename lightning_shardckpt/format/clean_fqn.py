"""FQNs without the components that wrappers add, and patterns of FQNs. Pure: strings only.

Checkpoints and tensor-parallel plans name a module as it was before torch.compile, activation checkpointing or FSDP1
wrapped it. PEFT moves a model below ``base_model.model``, a module with an adapter below ``base_layer``, and a module
that is trained as a whole below ``original_module``, next to one copy per adapter in ``modules_to_save``. Source:
PEFT 0.21, ``utils/save_and_load.py``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
_PEFT_MODEL = re.compile(r"(^|\.)base_model\.model(?=\.|$)")
_PEFT_LAYERS = re.compile(r"(^|\.)(token_adapter|base_layer|original_module|modules_to_save\.[^.]+)(?=\.|$)")


def clean_fqn(name: str) -> str:
    """Return a registered name without the components that wrappers add. Components of PEFT stay.

    >>> clean_fqn("net._orig_mod.layers.0._checkpoint_wrapped_module.weight")
    'net.layers.0.weight'
    """
    if "_orig_mod" not in name and "_wrapped_module" not in name:  # a fast path: nearly all names have neither
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def state_name(name: str) -> str:
    """Return the state dict's name for a registered name; of the wrappers, a state dict names only torch.compile's."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS[1:])


def base_fqn(name: str) -> str:
    """Return the FQN that a module or tensor had before PEFT wrapped the model and some of its modules.

    A module that an adapter trains as a whole gets the name of its original.

    >>> base_fqn("model.base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.model.layers.0.self_attn.q_proj.weight'
    >>> base_fqn("base_model.model.lm_head.modules_to_save.default.weight"), base_fqn("net.bias")
    ('lm_head.weight', 'net.bias')
    """
    return without_peft_layers(_PEFT_MODEL.sub("", name, count=1))


def without_peft_layers(name: str) -> str:
    """Return a name without the components that PEFT's layers add; ``base_model.model`` stays."""
    return _PEFT_LAYERS.sub("", name).removeprefix(".")


def names_peft_layers(pattern: str) -> bool:
    """Return True if a name or pattern has components that PEFT's layers add."""
    return _PEFT_LAYERS.search(pattern) is not None


def matching_fqns(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match a pattern: ``*`` is any part of one component, ``**`` any number of components.

    >>> matching_fqns(["a", "a.b", "a.b.c"], "a.*"), matching_fqns(["a", "a.b", "a.b.c"], "**.c")
    (['a.b'], ['a.b.c'])
    """
    regex = fqn_regex(pattern)
    return [name for name in names if regex.fullmatch(name)]


def fqn_regex(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a pattern of ``matching_fqns``."""
    pieces = {"**": ".*", "*": "[^.]*"}
    return re.compile("".join(pieces.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*)", pattern)))


def shared_names(named: Iterable[tuple[str, object]]) -> list[tuple[str, ...]]:
    """Return the clean FQNs of each object with several names, such as tied tensors, in order of registration.

    >>> a, b = object(), object()
    >>> shared_names([("x", a), ("y", b), ("_orig_mod.z", a)])
    [('x', 'z')]
    """
    names_by_id: dict[int, list[str]] = {}
    items = list(named)  # which keeps the objects, and with them their ids
    for name, value in items:
        names_by_id.setdefault(id(value), []).append(name)
    return [tuple(map(clean_fqn, names)) for names in names_by_id.values() if len(names) > 1]
