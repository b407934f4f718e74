"""Flat states with state dicts of modules and optimizers, as Lightning's checkpoint dict and back.

Plain Fabric gives such a state to a CheckpointIO, and its files hold one. A module's state dict is recognized by the
attribute ``_metadata``, or by its tensors if no value has it; an optimizer's by its two keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.clean_fqn import clean_fqn
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.documents import FROZEN

METADATA = "_metadata"
"""The attribute of a state dict."""
_FIRST = {"version": 1}
KEYS = "shardckpt_keys"
"""Key of the places of objects in trainer state: ``{"modules": {key: prefix}, "optimizers": [key, …]}``."""
_RESERVED = ("state_dict", "optimizer_states", "rank_state", KEYS)
Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the outermost dict to a value."""
VERSION = "pytorch-lightning_version"
"""Key of a Trainer's checkpoint, which a state of Fabric does not have."""
NOTHING = object()
"""Stands for a missing value, and in ``replaced`` for one to leave out."""


def key_of(path: Path) -> str:
    """Return the key of a path in trainer state.

    >>> key_of(("nets", 0, "ema"))
    'nets/0/ema'
    """
    return "/".join(map(str, path))


def items_of(state: Mapping[str, Any], expands: Callable[[list[Any]], bool]) -> Iterator[tuple[Path, Any]]:
    """Yield the values of a flat state, and in their places the items of lists that ``expands`` selects, by path."""
    for key, value in state.items():
        if isinstance(value, list) and expands(value):
            yield from (((key, number), item) for number, item in enumerate(value))
        else:
            yield (key,), value


def value_at(tree: Any, path: Path, default: Any = None) -> Any:
    """Return the value at a path of a tree of dicts and lists; ``default`` if there is none."""
    for key in path:
        known: Any = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
        if key not in known:
            return default
        tree = tree[key]
    return tree


def replaced(tree: Mapping[str, Any], new: Mapping[Path, Any]) -> dict[str, Any]:
    """Return a tree with other values at some paths; other parts are the same objects.

    ``NOTHING`` leaves a value out; None takes its place in a list. Containers of which nothing is left are left out.

    >>> replaced({"a": [1, 2], "b": {"c": 3}}, {("a", 0): NOTHING, ("b", "c"): NOTHING})
    {'a': [None, 2]}
    """
    inside = {path[:end] for path in new for end in range(len(path))}

    def rebuild(value: Any, path: Path) -> Any:
        if path in new or path not in inside:
            return new.get(path, value)
        if isinstance(value, Mapping):
            items = {key: rebuild(item, (*path, key)) for key, item in value.items()}
            return {key: item for key, item in items.items() if item is not NOTHING} or NOTHING
        if not isinstance(value, list):
            return value
        kept = [rebuild(item, (*path, number)) for number, item in enumerate(value)]
        return [None if item is NOTHING else item for item in kept] if {*map(id, kept)} != {id(NOTHING)} else NOTHING

    result = rebuild(tree, ())
    return {} if result is NOTHING else dict(result)


def prefixes_of(paths: Collection[Path]) -> dict[Path, str]:
    """Return the prefix of the names of each module's state; it is empty for a single module."""
    return {path: ".".join(map(str, path)) + "." if len(paths) > 1 else "" for path in paths}


def is_lightning_dict(state: Mapping[str, Any]) -> bool:
    """Return whether a dict has the structure of a Trainer's checkpoint."""
    if VERSION in state or KEYS in state or not isinstance(state.get("state_dict"), Mapping):
        return VERSION in state or KEYS in state
    return isinstance(state.get("optimizer_states"), list) or not any(map(is_optimizer_state, state.values()))


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value has the structure of ``Optimizer.state_dict``."""
    has_state = isinstance(value, Mapping) and isinstance(value.get("state"), Mapping)
    groups = value.get("param_groups") if has_state else None
    if not isinstance(groups, list):
        return False
    return all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)


def is_weights(value: Any) -> bool:
    """Return whether a value is a module's state dict, or a non-empty dict of tensors."""
    import torch  # other functions of this file work without it

    if not isinstance(value, Mapping) or not value:
        return False
    tensors = (isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())
    return _is_module_state(value) or all(tensors)  # a module's may have extra state


def _is_module_state(value: Any) -> bool:
    return isinstance(value, Mapping) and hasattr(value, METADATA)


def lift_state_dicts(state: Mapping[str, Any], *, only: str | None = None) -> dict[str, Any]:
    """Return Lightning's checkpoint dict, in which the state dicts of a flat state are stored as objects would be.

    A state without state dicts is returned as it is. If no value has the mark of a module's state dict, each dict of
    tensors counts, since a filter may have copied state dicts to plain dicts.

    Args:
        state: by key, state dicts, lists of these, and values; or the state dict of a module.
        only: key of a module; other modules are left out, if it exists.

    Raises:
        StateError: if a key of the state is reserved, or two modules have an entry of the same name.
    """
    if _is_module_state(state):
        return {"state_dict": state, KEYS: {"modules": {"": ""}, "optimizers": []}}
    items = dict(items_of(state, bool))
    modules = {path: value for path, value in items.items() if _is_module_state(value)}
    modules = modules or {path: value for path, value in items.items() if len(path) == 1 and is_weights(value)}
    optimizers = {path: value for path, value in items.items() if path not in modules and is_optimizer_state(value)}
    if not modules and not optimizers:
        return dict(state)
    rest = replaced(state, dict.fromkeys((*modules, *optimizers), NOTHING))
    if only is not None and (only,) in modules:
        modules = {(only,): modules[(only,)]}
    return lightning_dict(rest, modules, optimizers)


def lightning_dict(
    rest: Mapping[str, Any], modules: Mapping[Path, Mapping[str, Any]], optimizers: Mapping[Path, Any]
) -> dict[str, Any]:
    """Return Lightning's checkpoint dict of state dicts by path, with these places, and the other entries of the state.

    Raises:
        StateError: if a key of the state is reserved, or two modules have an entry of the same name.
    """
    if reserved := rest.keys() & {*_RESERVED}:
        raise StateError(f"the key {min(reserved)!r} of the state has another meaning in a checkpoint: choose another")
    prefixes, checkpoint = prefixes_of(modules), dict(rest)
    if modules:
        checkpoint["state_dict"] = join_states({prefixes[path]: value for path, value in modules.items()})
    if optimizers:
        checkpoint["optimizer_states"] = [*optimizers.values()]
    places = {key_of(path): prefix for path, prefix in prefixes.items()}
    return {**checkpoint, KEYS: {"modules": places, "optimizers": [*map(key_of, optimizers)]}}


def join_states(by_prefix: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Join state dicts into one, with a prefix before the names of each."""
    joined, versions = OrderedDict[str, Any](), OrderedDict[str, Any]()
    for prefix, state in by_prefix.items():
        named = {prefix + name: value for name, value in state.items()}
        if twice := joined.keys() & named.keys():
            raise StateError(
                f"{prefix.removesuffix('.')!r} and another module of the state both have {max(twice)!r}: choose keys "
                "so that none begins with another"
            )
        joined |= named
        for name, version in getattr(state, METADATA, {}).items():
            versions[f"{prefix}{name}".removesuffix(".")] = version
    vars(joined)[METADATA] = versions
    return joined


def states_of_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the flat state that was saved as Lightning's checkpoint dict; any other dict unchanged. Changes the dict.

    If a name of the model is in none of the modules, since a prefix or a mapping changed it, the model stays in one.
    """
    checkpoint.pop(FROZEN, None)
    keys, model = check_keys(checkpoint.pop(KEYS, None), "the checkpoint"), checkpoint.get("state_dict", {})
    if keys is None or not all(name.startswith(tuple(keys["modules"].values())) for name in model):
        return checkpoint
    checkpoint.pop("state_dict", None)
    for key, prefix in keys["modules"].items():
        state = OrderedDict((n.removeprefix(prefix), value) for n, value in model.items() if n.startswith(prefix))
        vars(state)[METADATA] = versions_in(getattr(model, METADATA, {}), prefix)
        insert(checkpoint, key, state)
    for key, state in zip(keys["optimizers"], checkpoint.pop("optimizer_states", []), strict=False):
        insert(checkpoint, key, state)
    return checkpoint


def insert(state: Any, key: str, value: Any) -> None:
    """Insert a value into a flat state at a key of ``key_of``, which may be a place in a list; a dict into it at ""."""
    parent, _, last = key.rpartition("/")
    items = state.setdefault(parent, []) if parent and last.isdecimal() else None
    if not key:
        state.update(value)
    elif isinstance(items, list) and int(last) <= len(items):
        items[int(last) : int(last) + 1] = [value]
    else:
        state[key] = value


def check_keys(keys: Any, path: str) -> dict[str, Any] | None:
    """Return the checked places of modules and optimizers; None if the checkpoint has none.

    Raises:
        FormatError: naming ``path``, if they are malformed.
    """
    if keys is None:
        return None
    if isinstance(keys, dict) and isinstance(keys.get("modules"), dict) and isinstance(keys.get("optimizers"), list):
        texts = [*keys["modules"], *keys["modules"].values(), *keys["optimizers"]]
        if all(isinstance(text, str) for text in texts):
            return keys
    raise FormatError(f"{path!r}: {KEYS} of the trainer's state does not name modules and optimizers: {shown(keys)}")


# ── versions of modules ───────────────────────────────────────────────────────────────────────────────────────────────
# ``Module.state_dict`` records them for the code that loads an older version, in the attribute ``_metadata`` of a state
# dict: by name of a module, ``{"version": 1}`` and additions of hooks. A module without an entry in the document
# "versions" has version 1.


def versions_of(state_dict: object, encode: Callable[[Any, str], Any]) -> dict[str, Any] | None:
    """Return the document "versions" of a state dict, None if it has no ``_metadata``; ``encode`` takes a path, too."""
    metadata = getattr(state_dict, METADATA, None)
    if not isinstance(metadata, Mapping):
        return None
    versions = {clean_fqn(name): version for name, version in metadata.items() if isinstance(version, Mapping)}
    return {name: encode(v, f"state_dict/{METADATA}/{name}") for name, v in versions.items() if v != _FIRST}


def add_versions(
    state_dict: dict[str, Any], versions: Mapping[str, Any] | None, modules: Iterable[str] | None = None
) -> dict[str, Any]:
    """Return a state dict with the ``_metadata`` of its modules, as torch makes it.

    ``versions`` are decoded, by canonical name of a module, or None, unknown, which returns the state dict itself;
    ``modules`` are names, by default of all modules that contain an entry.
    """
    if versions is None:
        return state_dict
    if modules is None:
        parts = (name.split(".") for name in state_dict)
        modules = {".".join(around[:count]) for around in parts for count in range(len(around))}
    new = OrderedDict(state_dict)
    vars(new)[METADATA] = OrderedDict((n, dict(versions.get(clean_fqn(n), _FIRST))) for n in sorted(modules))
    return new


def versions_in(versions: Mapping[str, Any], prefix: str) -> OrderedDict[str, Any]:
    """Return the versions of the modules below a prefix, by names without it."""
    inside = ((f"{name}.", version) for name, version in versions.items() if f"{name}.".startswith(prefix))
    return OrderedDict((name.removeprefix(prefix).removesuffix("."), version) for name, version in inside)


def rename_versions(versions: Mapping[str, Any] | None, stored: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the document for renamed modules; new names follow from ``stored``, old names of entries by new name.

    >>> rename_versions({"net.norm": {"version": 2}}, {"norm.weight": "net.norm.weight"})
    {'norm': {'version': 2}}
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
