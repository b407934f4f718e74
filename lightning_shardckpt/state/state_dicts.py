"""Nested dicts with state dicts of modules and optimizers, as Lightning's checkpoint dict and back.

Plain Fabric gives such a nested dict to a CheckpointIO, and its files hold one. A module's state dict is recognized by
the attribute ``_metadata``, or by its tensors if no value has it; an optimizer's by its two keys.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

from lightning_shardckpt.errors import FormatError, StateError
from lightning_shardckpt.format.value_checks import shown
from lightning_shardckpt.state.documents import FROZEN
from lightning_shardckpt.state.module_versions import METADATA, versions_in

KEYS = "shardckpt_keys"
"""Key of the places of objects in trainer state: ``{"modules": {key: prefix}, "optimizers": [key, …]}``."""

RESERVED = ("state_dict", "optimizer_states", "rank_state", KEYS)

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the outermost dict to a value."""

VERSION = "pytorch-lightning_version"
"""Key of a Trainer's checkpoint, which a state of Fabric does not have."""
_NOTHING = object()


def key_of(path: Path) -> str:
    """Return the key of a path in trainer state.

    >>> key_of(("nets", 0, "ema"))
    'nets/0/ema'
    """
    return "/".join(map(str, path))


def prefixes_of(paths: Collection[Path]) -> dict[Path, str]:
    """Return the prefix of the names of each module's state; it is empty for a single module."""
    return {path: ".".join(map(str, path)) + "." if len(paths) > 1 else "" for path in paths}


def is_lightning_dict(state: Mapping[str, Any]) -> bool:
    """Return whether a dict has the structure of a Trainer's checkpoint."""
    if VERSION in state or KEYS in state:
        return True
    if not isinstance(state.get("state_dict"), Mapping):
        return False
    return isinstance(state.get("optimizer_states"), list) or not any(map(is_optimizer_state, state.values()))


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value has the structure of ``Optimizer.state_dict``."""
    if not isinstance(value, Mapping) or not value.keys() >= {"state", "param_groups"}:
        return False
    groups = value["param_groups"]
    if not isinstance(value["state"], Mapping) or not isinstance(groups, list):
        return False
    return all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)


def is_weights(value: Any) -> bool:
    """Return whether a value is a module's state dict, or a non-empty dict of tensors."""
    if not isinstance(value, Mapping) or not value:
        return False
    if _is_module_state(value):
        return True  # with any extra state
    import torch  # other functions of this file work without it

    return all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in value.items())


def _is_module_state(value: Any) -> bool:
    return isinstance(value, Mapping) and hasattr(value, METADATA)


def checkpoint_of_states(states: Mapping[str, Any], *, nested: bool, only: str | None = None) -> dict[str, Any] | None:
    """Return Lightning's checkpoint dict, as ``nested_dict.checkpoint_of`` does for objects; None without state dicts.

    Args:
        states: state dicts and values by key.
        nested: whether to look for state dicts in dicts and lists, too.
        only: key of a module; other modules are left out, if it exists.

    Raises:
        StateError: if a key of the state is reserved, or two modules have an entry of the same name.
    """
    split = _StateDicts(_is_module_state, nested)
    rest = split.split_off(states)
    if not split.modules:  # a filter may have copied them to plain dicts
        split = _StateDicts(lambda value: False, nested)
        split.modules |= {(key,): value for key, value in states.items() if is_weights(value)}
        rest = split.split_off({key: value for key, value in states.items() if (key,) not in split.modules})
    if not split.modules and not split.optimizers:
        return None
    if only is not None and (only,) in split.modules:
        split.modules = {(only,): split.modules[(only,)]}
    if reserved := rest.keys() & {*RESERVED}:
        raise StateError(f"the key {min(reserved)!r} of the state has another meaning in a checkpoint: choose another")
    prefixes = prefixes_of(split.modules)
    if split.modules:
        rest["state_dict"] = join_states({prefixes[path]: state for path, state in split.modules.items()})
    if split.optimizers:
        rest["optimizer_states"] = list(split.optimizers.values())
    modules = {key_of(path): prefix for path, prefix in prefixes.items()}
    return rest | {KEYS: {"modules": modules, "optimizers": [key_of(path) for path in split.optimizers]}}


def with_state_dicts(checkpoint: dict[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return Lightning's checkpoint dict with state dicts of modules stored as the modules would be.

    So a module loads what was saved from its state dict, and the reverse. The state may be a state dict itself. A
    single dict of tensors counts, too, since filters copy a state dict to a plain dict. If the state has no optimizers,
    state dicts of optimizers are stored as these would be. Without state dicts of modules, returns the dict unchanged.

    Args:
        checkpoint: of a nested dict without modules, see ``nested_dict.checkpoint_of``.
        state: the nested dict.
    """
    if _is_module_state(state):
        return {"state_dict": state, KEYS: {"modules": {"": ""}, "optimizers": []}}
    modules: dict[Path, Mapping[str, Any]] = {(k,): value for k, value in state.items() if _is_module_state(value)}
    modules = modules or {(key,): value for key, value in state.items() if is_weights(value)}
    if not modules or (len(modules) > 1 and not any(map(_is_module_state, modules.values()))):
        return checkpoint
    prefixes, keys = prefixes_of(modules), dict(checkpoint[KEYS])
    optimizers = {} if keys["optimizers"] else {k: v for k, v in state.items() if is_optimizer_state(v)}
    rest = {key: value for key, value in checkpoint.items() if (key,) not in modules and key not in optimizers}
    rest["state_dict"] = join_states({prefixes[path]: value for path, value in modules.items()})
    keys["modules"] = {key_of(path): prefix for path, prefix in prefixes.items()}
    if optimizers:
        rest["optimizer_states"] = list(optimizers.values())
        keys["optimizers"] = list(optimizers)
    return rest | {KEYS: keys}


class _StateDicts:
    """The state dicts in a nested dict, by path; ``split_off`` collects them and returns the rest."""

    def __init__(self, is_module: Callable[[Any], bool], nested: bool) -> None:
        self.modules: dict[Path, Mapping[str, Any]] = {}
        self.optimizers: dict[Path, dict[str, Any]] = {}
        self._is_module, self._nested = is_module, nested

    def split_off(self, states: Mapping[str, Any]) -> dict[str, Any]:
        rest = {key: self._split(value, (key,)) for key, value in states.items()}
        return {key: value for key, value in rest.items() if value is not _NOTHING}

    def _split(self, value: Any, path: Path) -> Any:
        if self._is_module(value):
            self.modules[path] = value
            return _NOTHING
        if is_optimizer_state(value):
            self.optimizers[path] = value
            return _NOTHING
        if not self._nested or type(value) not in (dict, list) or not value:
            return value
        counts = len(self.modules), len(self.optimizers)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        rest = {key: self._split(item, (*path, key)) for key, item in items}
        if (len(self.modules), len(self.optimizers)) == counts:
            return value
        kept = {key: item for key, item in rest.items() if item is not _NOTHING}
        if not kept:
            return _NOTHING
        return kept if isinstance(value, dict) else [kept.get(place) for place in range(len(value))]


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


def to_lightning_dict(state: dict[str, Any], *, of_fabric: bool) -> dict[str, Any]:
    """Return Lightning's checkpoint dict for the argument of ``CheckpointIO.save_checkpoint``.

    Args:
        state: of a Trainer, which is returned unchanged, or of Fabric, with state dicts of objects.
        of_fabric: whether Fabric saves: its state may have any key of a Trainer's checkpoint except its version.

    Raises:
        StateError: as ``checkpoint_of_states`` does.
    """
    if is_lightning_dict(state) and (VERSION in state or not of_fabric):
        return state
    checkpoint = checkpoint_of_states(state, nested=False)
    return state if checkpoint is None else checkpoint


def states_of_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return the nested dict that was saved as Lightning's checkpoint dict; any other dict unchanged. Changes the dict.

    Raises:
        FormatError: if the places of modules and optimizers are malformed.
    """
    checkpoint.pop(FROZEN, None)
    keys = check_keys(checkpoint.pop(KEYS, None), "the checkpoint")
    if keys is None:
        return checkpoint
    model, optimizers = checkpoint.pop("state_dict", {}), checkpoint.pop("optimizer_states", [])
    for key, prefix in keys["modules"].items():
        state = OrderedDict((n.removeprefix(prefix), value) for n, value in model.items() if n.startswith(prefix))
        vars(state)[METADATA] = versions_in(getattr(model, METADATA, {}), prefix)
        insert(checkpoint, key, state)
    for key, state in zip(keys["optimizers"], optimizers, strict=False):
        insert(checkpoint, key, state)
    return checkpoint


def has_places(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint has the places of modules and optimizers, and every name of the model is in one.

    Raises:
        FormatError: if the places are malformed.
    """
    keys = check_keys(checkpoint.get(KEYS), "the checkpoint")
    if keys is None:
        return False
    prefixes = tuple(keys["modules"].values())
    return all(name.startswith(prefixes) for name in checkpoint.get("state_dict", {}))


def insert(state: Any, key: str, value: Any) -> None:
    """Insert a value into a nested dict at a key of ``key_of``, or a dict into it at ""; creates missing dicts."""
    if not key:
        state.update(value)
        return
    *parents, last = key.split("/")
    for parent in parents:
        state = state[int(parent)] if isinstance(state, list) else state.setdefault(parent, {})
    if isinstance(state, list):
        state[int(last)] = value
    else:
        state[last] = value


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
