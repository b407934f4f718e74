"""A nested dict in which state dicts stand for modules and optimizers, and Lightning's checkpoint dict of it.

The first is what plain Fabric hands to a CheckpointIO and what its files hold. A module's state dict is told by the
versions that torch attaches to it, as ``_metadata``; where nothing has them, by its tensors. An optimizer's is told by
its two keys.
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
"""Key of trainer state that tells where objects were: ``{"modules": {key: prefix}, "optimizers": [key, …]}``."""

RESERVED = ("state_dict", "optimizer_states", "rank_state", KEYS)

Path: TypeAlias = tuple[str | int, ...]
"""Keys and list indices from the outermost dict to a value."""

VERSION = "pytorch-lightning_version"
"""Key of a Trainer's checkpoint that Fabric's states don't have."""
_NOTHING = object()


def key_of(path: Path) -> str:
    """A path as trainer state spells it.

    >>> key_of(("nets", 0, "ema"))
    'nets/0/ema'
    """
    return "/".join(map(str, path))


def prefixes_of(paths: Collection[Path]) -> dict[Path, str]:
    """Return the text before the names of each module's state: nothing, of a single one."""
    return {path: ".".join(map(str, path)) + "." if len(paths) > 1 else "" for path in paths}


def is_lightnings(found: Mapping[str, Any]) -> bool:
    """Return whether a dict has Lightning's keys: a Trainer's, ours, or made by somebody for a Trainer."""
    if VERSION in found or KEYS in found:
        return True
    if not isinstance(found.get("state_dict"), Mapping):
        return False
    return isinstance(found.get("optimizer_states"), list) or not any(map(is_optimizer_state, found.values()))


def is_optimizer_state(value: Any) -> bool:
    """Return whether a value is what ``Optimizer.state_dict`` gives."""
    if not isinstance(value, Mapping) or not value.keys() >= {"state", "param_groups"}:
        return False
    groups = value["param_groups"]
    if not isinstance(value["state"], Mapping) or not isinstance(groups, list):
        return False
    return all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups)


def is_weights(found: Any) -> bool:
    """Return whether a value is a module's state dict, or a dict of tensors, and of at least one."""
    if not isinstance(found, Mapping) or not found:
        return False
    if _is_module_state(found):
        return True  # with whatever extra state
    import torch  # what makes a checkpoint a dict again needs none

    return all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in found.items())


def _is_module_state(value: Any) -> bool:
    return isinstance(value, Mapping) and hasattr(value, METADATA)


def checkpoint_of_states(states: Mapping[str, Any], *, nested: bool, only: str | None = None) -> dict[str, Any] | None:
    """Lightning's checkpoint dict, as ``nested_dict.checkpoint_of`` makes it of objects; None without any state dict.

    Args:
        states: by key, state dicts and values.
        nested: whether to look for state dicts in dicts and lists, too.
        only: of several modules, the key of the one that is taken, if it is there; the others are left out.

    Raises:
        StateError: if a key of the state has a meaning of its own in a checkpoint, or two modules have an entry of one
            name.
    """
    found = _Found(_is_module_state, nested)
    rest = found.split(states)
    if not found.modules:  # a filter has made other dicts of them
        found = _Found(lambda value: False, nested)
        found.modules |= {(key,): value for key, value in states.items() if is_weights(value)}
        rest = found.split({key: value for key, value in states.items() if (key,) not in found.modules})
    if not found.modules and not found.optimizers:
        return None
    if only is not None and (only,) in found.modules:
        found.modules = {(only,): found.modules[(only,)]}
    if wrong := rest.keys() & {*RESERVED}:
        raise StateError(f"the key {min(wrong)!r} of the state means something else in a checkpoint: choose another")
    prefixes = prefixes_of(found.modules)
    if found.modules:
        rest["state_dict"] = join_states({prefixes[path]: state for path, state in found.modules.items()})
    if found.optimizers:
        rest["optimizer_states"] = list(found.optimizers.values())
    modules = {key_of(path): prefix for path, prefix in prefixes.items()}
    return rest | {KEYS: {"modules": modules, "optimizers": [key_of(path) for path in found.optimizers]}}


class _Found:
    """The state dicts in a nested dict, by path; ``split`` returns what is left without them."""

    def __init__(self, is_module: Callable[[Any], bool], nested: bool) -> None:
        self.modules: dict[Path, Mapping[str, Any]] = {}
        self.optimizers: dict[Path, dict[str, Any]] = {}
        self._is_module, self._nested = is_module, nested

    def split(self, states: Mapping[str, Any]) -> dict[str, Any]:
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
        known = len(self.modules), len(self.optimizers)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        rest = {key: self._split(item, (*path, key)) for key, item in items}
        if (len(self.modules), len(self.optimizers)) == known:
            return value
        kept = {key: item for key, item in rest.items() if item is not _NOTHING}
        if not kept:
            return _NOTHING
        return kept if isinstance(value, dict) else [kept.get(place) for place in range(len(value))]


def join_states(by_prefix: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return state dicts as one, with a prefix before the names of each.

    Raises:
        StateError: if two of them have an entry of one name.
    """
    joined, versions = OrderedDict[str, Any](), OrderedDict[str, Any]()
    for prefix, state in by_prefix.items():
        named = {prefix + name: value for name, value in state.items()}
        if twice := joined.keys() & named.keys():
            raise StateError(
                f"{prefix.removesuffix('.')!r} and another module of the state both have {max(twice)!r}: choose keys "
                "of which none is the beginning of another one"
            )
        joined |= named
        for name, version in getattr(state, METADATA, {}).items():
            versions[f"{prefix}{name}".removesuffix(".")] = version
    vars(joined)[METADATA] = versions
    return joined


def lightnings_of(given: dict[str, Any], *, of_fabric: bool) -> dict[str, Any]:
    """Return what one of Lightning's own strategies gave to a CheckpointIO as Lightning's checkpoint dict.

    Args:
        given: of a Trainer, or the state of Fabric, with state dicts of objects. It is returned as it is where it needs
            no translation.
        of_fabric: whether Fabric gave it, whose states may have the keys of a Trainer's checkpoint, but its version.

    Raises:
        StateError: as ``checkpoint_of_states`` does.
    """
    if is_lightnings(given) and (VERSION in given or not of_fabric):
        return given
    found = checkpoint_of_states(given, nested=False)
    return given if found is None else found


def states_of_checkpoint(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Lightning's checkpoint dict as the state that was saved; without a trace of that, as it is.

    Raises:
        FormatError: if it says of modules and optimizers what cannot be.
    """
    checkpoint.pop(FROZEN, None)
    keys = check_keys(checkpoint.pop(KEYS, None), "the checkpoint")
    if keys is None:
        return checkpoint
    model, optimizers = checkpoint.pop("state_dict", {}), checkpoint.pop("optimizer_states", [])
    for key, prefix in keys["modules"].items():
        state = OrderedDict((n.removeprefix(prefix), value) for n, value in model.items() if n.startswith(prefix))
        vars(state)[METADATA] = versions_in(getattr(model, METADATA, {}), prefix)  # and no dict of tensors
        insert(checkpoint, key, state)
    for key, state in zip(keys["optimizers"], optimizers, strict=False):
        insert(checkpoint, key, state)
    return checkpoint


def is_told_apart(checkpoint: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint tells of modules and optimizers, and each name of the model is of one of those
    modules.

    Raises:
        FormatError: if it says of modules and optimizers what cannot be.
    """
    keys = check_keys(checkpoint.get(KEYS), "the checkpoint")
    if keys is None:
        return False
    prefixes = tuple(keys["modules"].values())
    return all(name.startswith(prefixes) for name in checkpoint.get("state_dict", {}))


def insert(state: Any, key: str, value: Any) -> None:
    """Put a value in its place in a nested dict, by its path as ``key_of`` spells it; makes the dicts around it."""
    *parents, last = key.split("/")
    for parent in parents:
        state = state[int(parent)] if isinstance(state, list) else state.setdefault(parent, {})
    if isinstance(state, list):
        state[int(last)] = value
    else:
        state[last] = value


def check_keys(keys: Any, path: str) -> dict[str, Any] | None:
    """Return what a checkpoint says of where modules and optimizers were; None if it says nothing.

    Raises:
        FormatError: naming ``path``, if that cannot be.
    """
    if keys is None:
        return None
    if isinstance(keys, dict) and isinstance(keys.get("modules"), dict) and isinstance(keys.get("optimizers"), list):
        texts = [*keys["modules"], *keys["modules"].values(), *keys["optimizers"]]
        if all(isinstance(text, str) for text in texts):
            return keys
    raise FormatError(f"{path!r}: {KEYS} of the trainer's state names no modules and optimizers: {shown(keys)}")
