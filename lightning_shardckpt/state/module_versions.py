"""The versions of modules, which ``state_dict`` records and code that loads an older one asks for.

torch has them as an attribute of a state dict, ``_metadata``: by name of a module, ``{"version": 1}`` and what hooks
have added. Where a checkpoint has the document "versions", a module that is not in it is of version 1. No torch.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_shardckpt.format.clean_fqn import clean_fqn

METADATA = "_metadata"
"""The attribute of a state dict."""
_FIRST = {"version": 1}


def versions_of(state_dict: object, encode: Callable[[Any, str], Any]) -> dict[str, Any] | None:
    """Return the document "versions" of a state dict; None if it does not tell.

    Args:
        state_dict: as ``Module.state_dict`` gives it.
        encode: makes JSON of a value, given its place for errors.
    """
    known = getattr(state_dict, METADATA, None)
    if not isinstance(known, Mapping):
        return None
    of = {clean_fqn(name): version for name, version in known.items() if isinstance(version, Mapping)}
    return {name: encode(version, f"state_dict/{METADATA}/{name}") for name, version in of.items() if version != _FIRST}


def with_versions(
    state_dict: dict[str, Any], versions: Mapping[str, Any] | None, modules: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return a state dict as torch has it, with the versions of its modules; the dict itself if none are known.

    Args:
        state_dict: entries by name.
        versions: by canonical name of a module, decoded; None if nothing is known of them.
        modules: names of the modules; by default those that the entries are in.
    """
    if versions is None:
        return state_dict
    found = OrderedDict(state_dict)
    names = {around for name in state_dict for around in _modules_around(name)} if modules is None else modules
    known = OrderedDict((name, dict(versions.get(clean_fqn(name), _FIRST))) for name in sorted(names))
    vars(found)[METADATA] = known
    return found


def versions_in(known: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return the versions of the modules below a prefix, by names without it."""
    inside = ((f"{name}.", version) for name, version in known.items() if f"{name}.".startswith(prefix))
    return OrderedDict((name.removeprefix(prefix).removesuffix("."), version) for name, version in inside)


def rename_versions(versions: Mapping[str, Any] | None, stored: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the document for modules under other names, as far as the names of their entries tell.

    >>> rename_versions({"net.norm": {"version": 2}}, {"norm.weight": "net.norm.weight"})
    {'norm': {'version': 2}}

    Args:
        versions: by stored name.
        stored: new name of an entry → its stored name.
    """
    if versions is None:
        return None
    found = dict[str, Any]()
    for new, old in stored.items() if versions else ():
        here, there = new.split(".")[:-1], old.split(".")[:-1]
        while True:
            if ".".join(there) in versions:
                found.setdefault(".".join(here), versions[".".join(there)])
            if not here or not there or here.pop() != there.pop():
                break
    return found


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]
