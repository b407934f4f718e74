"""Versions of modules, which ``Module.state_dict`` records for the code that loads an older version.

torch keeps them in the attribute ``_metadata`` of a state dict: by name of a module, ``{"version": 1}`` and additions
of hooks. A module without an entry in the document "versions" has version 1. No torch.
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
    """Return the document "versions" of a state dict; None if it has no ``_metadata``.

    Args:
        state_dict: of a module.
        encode: encodes a value as JSON, given its path for errors.
    """
    metadata = getattr(state_dict, METADATA, None)
    if not isinstance(metadata, Mapping):
        return None
    versions = {clean_fqn(name): version for name, version in metadata.items() if isinstance(version, Mapping)}
    return {name: encode(v, f"state_dict/{METADATA}/{name}") for name, v in versions.items() if v != _FIRST}


def add_versions(
    state_dict: dict[str, Any], versions: Mapping[str, Any] | None, modules: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return a state dict with the ``_metadata`` of its modules, as torch makes it.

    Args:
        state_dict: entries by name.
        versions: by canonical name of a module, decoded; None if unknown, to return ``state_dict`` itself.
        modules: names of the modules; by default all modules that contain an entry.
    """
    if versions is None:
        return state_dict
    new = OrderedDict(state_dict)
    names = {module for name in state_dict for module in _modules_around(name)} if modules is None else modules
    metadata = OrderedDict((name, dict(versions.get(clean_fqn(name), _FIRST))) for name in sorted(names))
    vars(new)[METADATA] = metadata
    return new


def versions_in(versions: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return the versions of the modules below a prefix, by names without it."""
    inside = ((f"{name}.", version) for name, version in versions.items() if f"{name}.".startswith(prefix))
    return OrderedDict((name.removeprefix(prefix).removesuffix("."), version) for name, version in inside)


def rename_versions(versions: Mapping[str, Any] | None, stored: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the document for renamed modules; new names follow from the names of their entries.

    >>> rename_versions({"net.norm": {"version": 2}}, {"norm.weight": "net.norm.weight"})
    {'norm': {'version': 2}}

    Args:
        versions: by stored name.
        stored: new name of an entry → its stored name.
    """
    if versions is None:
        return None
    renamed = dict[str, Any]()
    for new, old in stored.items() if versions else ():
        new_parts, old_parts = new.split(".")[:-1], old.split(".")[:-1]
        while True:
            if ".".join(old_parts) in versions:
                renamed.setdefault(".".join(new_parts), versions[".".join(old_parts)])
            if not new_parts or not old_parts or new_parts.pop() != old_parts.pop():
                break
    return renamed


def _modules_around(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[:count]) for count in range(len(parts) + 1)]
