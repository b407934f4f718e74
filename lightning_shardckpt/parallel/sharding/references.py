"""References to parameters in the attributes of modules, which follow when others take the place of these.

A parameter of before still acts as the new one, but is another object: a set, a dict or ``is`` would not find the new
one. So containers in attributes (lists, tuples, sets, dicts, also of ids of parameters) get the new ones, in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

_DEPTH = 4  # of containers in containers
_REGISTRIES = frozenset(vars(nn.Module()))  # what every module has for itself, its parameters among it


def follow_parameters(root: nn.Module, replaced: Mapping[nn.Parameter, Tensor]) -> None:
    """Put the new parameters in the place of the old ones, wherever attributes of modules inside ``root`` have them.

    Args:
        root: has the new parameters already.
        replaced: old ones → new ones, or what stands for those of other pipeline stages.
    """
    known = {id(old): new for old, new in replaced.items() if old is not new}
    if not known:
        return
    for module in root.modules():
        for name, value in list(vars(module).items()):
            if name not in _REGISTRIES:
                found = _followed(value, known, _DEPTH)
                if found is not value:
                    module.__dict__[name] = found


def _followed(value: Any, known: Mapping[int, Tensor], depth: int) -> Any:
    """The new one for an old parameter or its id; a container itself, with the new ones in it, or another tuple."""
    if isinstance(value, nn.Parameter):
        return known.get(id(value), value)
    if type(value) is int:
        return id(known[value]) if value in known else value
    if type(value) not in (list, tuple, set, frozenset, dict) or not depth or len(value) > len(known) + 100:
        return value  # data has more items than there are parameters
    items = [*value.items()] if type(value) is dict else [*value]
    found = [_followed(item, known, depth - 1) for item in items]
    if all(new is old for new, old in zip(found, items, strict=True)):
        return value
    if type(value) in (tuple, frozenset):
        return type(value)(found)
    value.clear()
    value.extend(found) if type(value) is list else value.update(found)
    return value
